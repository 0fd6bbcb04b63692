"""Checks this machine and its connection to a run for problems that prevent training, and says how to fix them."""
