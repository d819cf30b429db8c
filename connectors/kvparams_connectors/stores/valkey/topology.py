"""Determines which server of a deployment holds which key. Pure.

A cluster divides all keys into 16384 slots and says of each which primary has it; a single server has them all, until
one of its replicas takes its place. A map is replaced or gets one slot changed, in one step each, so that who reads it
needs no lock.

Source: the cluster specification, https://valkey.io/topics/cluster-spec/ (as of Valkey 8.0).
"""

from binascii import crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["SLOTS", "ClusterRedirect", "ClusterTopology", "ValkeyNode", "hash_slot", "parse_redirect"]

SLOTS: Final = 16384
_PORTS: Final = range(1, 65536)
_MOST_REPLICAS: Final = 16
"""So many are remembered, the latest first."""


@dataclass(frozen=True, slots=True)
class ValkeyNode:
    """Describes where one server listens: a host and a port, or the path of a unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


@dataclass(frozen=True, slots=True)
class ClusterRedirect:
    """Describes what a server of a cluster answers when another one is to be asked."""

    kind: Literal["MOVED", "ASK"]
    """MOVED: from now on. ASK: this time, because the slot is on its way there."""
    slot: int
    node: ValkeyNode


def hash_slot(key: bytes) -> int:
    """The slot of a key without braces: no key of ours has any, so none is a hash tag."""
    return crc_hqx(key, 0) % SLOTS


def parse_redirect(text: str, asked: ValkeyNode) -> ClusterRedirect | None:
    """Returns the target of a redirect such as `MOVED 3999 127.0.0.1:6381`, or None for any other error reply.

    Args:
        asked: who said it; an empty host means the same one.
    """
    words = text.split(" ")
    if len(words) < 3 or not (words[1].isascii() and words[1].isdigit() and len(words[1]) <= 5):
        return None
    kind: Literal["MOVED", "ASK"]
    if words[0] == "MOVED":
        kind = "MOVED"
    elif words[0] == "ASK":
        kind = "ASK"
    else:
        return None
    host, _, port = words[2].rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) in _PORTS) or int(words[1]) >= SLOTS:
        return None
    return ClusterRedirect(kind, int(words[1]), ValkeyNode(host.strip("[]") or asked.host, int(port)))


class ClusterTopology:
    """The map of slots, or the one server that is asked, and those that may take its place."""

    def __init__(self, seed: ValkeyNode) -> None:
        """Begins with one server, which is asked for all keys.

        Args:
            seed: the server until `replace` or `follow` names others.
        """
        self._named: Final = seed
        self._seed = seed
        self._replicas: tuple[ValkeyNode, ...] = ()
        self._nodes: list[ValkeyNode] | None = None

    @property
    def cluster(self) -> bool:
        """Returns whether there are slots at all."""
        return self._nodes is not None

    def node(self, key: bytes) -> ValkeyNode:
        """Returns the server that has `key`."""
        return self._seed if self._nodes is None else self._nodes[hash_slot(key)]

    def known(self) -> list[ValkeyNode]:
        """Everyone who may be asked how things stand: those that are asked for values, then the others."""
        return list(dict.fromkeys([*(self._nodes or ()), self._seed, self._named, *self._replicas]))

    @property
    def single(self) -> ValkeyNode:
        """Outside a cluster: who is asked."""
        return self._seed

    def follow(self, primary: ValkeyNode, replicas: Iterable[ValkeyNode]) -> None:
        """Outside a cluster: `primary` has everything now, and these are its replicas."""
        self._replicas = tuple(dict.fromkeys([*replicas, *self._replicas]))[:_MOST_REPLICAS]
        self._seed = primary

    def moved(self, slot: int, node: ValkeyNode) -> None:
        """`slot` is with `node` now."""
        if self._nodes is not None:
            self._nodes[slot] = node

    def replace(self, ranges: Iterable[tuple[int, int, ValkeyNode]]) -> None:
        """A new map: `(first, last, primary)`. A slot that nobody holds is asked of the seed, which will say so."""
        nodes = [self._seed] * SLOTS
        for first, last, node in ranges:
            for slot in range(max(0, first), min(last, SLOTS - 1) + 1):
                nodes[slot] = node
        self._nodes = nodes
