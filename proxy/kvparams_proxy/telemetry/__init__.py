"""Telemetry of requests: metrics, request log, traces."""
