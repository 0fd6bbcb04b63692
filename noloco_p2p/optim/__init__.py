"""Implement the inner optimizers and their learning rate schedule, without network, clock and files."""
