"""Defines where the proxy may stand beside an engine: as a process or in its server, on prefill's side or decode's.

Clients see the same answers in every place.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from demo.processes import Processes, Server, free_port
from kvparams.instances import Role

__all__ = ["PLACES", "Place", "place", "sidecar"]

PLACES = ("sidecar, prefill", "sidecar, decode", "middleware, prefill", "middleware, decode")
PROBE = ("--probe", "1")


class Place(NamedTuple):
    """One of them, and the engines behind it."""

    name: str
    server: Server
    ours: str
    """Where the proxy's own pages are, such as /metrics."""
    prefill: str
    """The engine's URL, where its own metrics are; so is the next."""
    decode: str
    local: Role
    port: int


def sidecar(processes: Processes, role: Role, engine: str, remotes: Sequence[str], *more: str) -> Server:
    """Start one."""
    port = free_port()
    remote = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    command = [sys.executable, "-m", "kvparams", "sidecar", "--role", role, "--engine", engine, "--port", str(port)]
    command += ["--connector", "store", "--expose-route", "--log-requests", "off"]
    for url in remotes:
        command += [f"--{remote}", url]
    return processes.start(f"sidecar-{role}", *command, *more, port=port)


def place(processes: Processes, name: str, prefill: Server, decode: Server, store: str, *more: str) -> Place:
    """Start what stands there; `more` are further arguments of an engine that has it in its server."""
    kind, _, which = name.partition(", ")
    role = Role(which)
    local, remote = (prefill, decode) if role is Role.PREFILL else (decode, prefill)
    if kind == "sidecar":
        server, ours = sidecar(processes, role, local.url, [remote.url], *PROBE), ""
    else:
        does = "prefill" if role is Role.PREFILL else "decode"
        local = server = processes.engine(f"split-{does}", does, store, "--remote", remote.url, *more)
        ours = "/kvparams"
    urls = (local.url, remote.url) if role is Role.PREFILL else (remote.url, local.url)
    return Place(name, server, server.url + ours, *urls, role, int(server.url.rpartition(":")[2]))
