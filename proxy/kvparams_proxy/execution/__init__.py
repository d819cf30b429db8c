"""Execution of one request: its legs, its responses, and the release of its resources."""
