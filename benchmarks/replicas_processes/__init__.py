"""Measures several real proxies that share a fleet of stub engines: `python -m benchmarks.replicas_processes`."""
