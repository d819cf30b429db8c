"""Provides a fake Kubernetes API server."""
