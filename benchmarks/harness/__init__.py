"""Parts that tests and benchmarks share: processes, peers on loopback, liars. The wheel does not contain them."""
