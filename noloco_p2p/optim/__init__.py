"""The mathematics of the inner and the outer step. Pure: no network, no clock, no files."""
