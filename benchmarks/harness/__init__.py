"""Parts that tests and benchmarks share, such as processes, peers on loopback and liars. The wheel leaves them out."""
