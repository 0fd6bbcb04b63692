"""A small run for demonstration: peers in processes on loopback, shown until they finish, and then evaluated."""
