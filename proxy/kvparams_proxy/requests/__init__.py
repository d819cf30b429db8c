"""Handles the way in, from a client's connection to a request that may be executed, and back."""
