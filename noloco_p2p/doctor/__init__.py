"""Checks this machine and its connection to a run, finds what would prevent training, and says how to fix it."""
