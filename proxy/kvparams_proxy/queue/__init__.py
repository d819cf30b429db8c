"""Connects prefill and decode through a broker: decode nodes pull work when they have room."""
