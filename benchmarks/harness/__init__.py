"""What tests and benchmarks start and look at: processes, peers on loopback, liars. The wheel does not have it."""
