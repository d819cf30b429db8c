"""`python -m demo`: KV cache made by one process, used by another, with proof.

`processes` and `client` are what the tests start and ask engines with, too.
"""
