"""A demonstration that runs peers in processes on loopback, shows their progress, and evaluates the result."""
