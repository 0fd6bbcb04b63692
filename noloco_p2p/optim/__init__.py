"""Implement the mathematics of the inner and outer steps. This package uses no network, no clock and no files."""
