"""Prefill and decode with a broker between them: decode nodes pull work when they have room."""
