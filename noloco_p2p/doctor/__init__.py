"""Checks this machine and its connection to a run: what would prevent training here, and how to fix it."""
