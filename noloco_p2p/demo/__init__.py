"""Runs a small swarm for demonstration on this machine, shows its progress, and evaluates the result."""
