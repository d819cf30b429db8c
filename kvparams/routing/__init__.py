"""Routing decisions without I/O: policies, plans, queues, breakers and cost models."""
