"""Checks whether this machine and its connection to a run would prevent training, and says how to fix it."""
