"""Divides the limits of a proxy among its workers."""

from dataclasses import replace

from kvparams_proxy.cli.configuration import Configuration

__all__ = ["share_limits"]


def share_limits(asked: Configuration, workers: int) -> Configuration:
    """Returns the configuration of one of `workers` workers: connections and bodies are divided among them.

    A worker may always hold one body of the maximum size. The limit of connections from one address is not divided: all
    connections of one client may be with the same worker.
    """
    settings, connections = asked.settings, asked.server.connections
    if asked.max_connections is not None:
        connections = replace(connections, total=_share(asked.max_connections, workers))
    body_bytes = max(settings.body.max_bytes, _share(settings.body_memory_bytes, workers))
    return asked._replace(
        settings=replace(settings, body_memory_bytes=body_bytes),
        server=replace(asked.server, connections=connections),
    )


def _share(total: int, workers: int) -> int:
    """Returns an equal share, rounded up."""
    return -(-total // workers)
