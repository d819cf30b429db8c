"""Several proxies in front of one fleet: what each knows is told to the others."""
