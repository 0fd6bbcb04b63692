"""Examines this machine, and its way to a run: what would keep a peer from training here, and what to do about it."""
