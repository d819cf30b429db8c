"""A trace of real requests replayed through a model of a fleet, under every policy. See `benchmarks/README.md`."""
