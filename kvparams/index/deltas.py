"""Encodes an index's contents as deltas, for snapshots and for replication between proxies.

A delta that is repeated, or reported by several replicas, changes nothing.

Both have one chain: the same seed and blocks of the same size. Whoever reads deltas of another chain is told so: they
would be believed and never match.
"""

import json
import struct
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import numpy as np

from kvparams.index.block_hashes import BlockHasher, BlockHashes
from kvparams.index.holder_sets import LEVELS
from kvparams.index.prefix_index import PrefixIndex

__all__ = ["IndexDelta", "apply_deltas", "decode_deltas", "encode_deltas", "snapshot_deltas"]

DeltaKind = Literal["stored", "removed", "cleared"]

_KINDS: Final[tuple[DeltaKind, ...]] = get_args(DeltaKind)
_DOMAIN: Final = b"kvparams index 1\n"
_HEAD: Final = struct.Struct("<BBHIQ")
_NO_HASHES: Final = np.empty(0, np.uint64)


class IndexDelta(NamedTuple):
    """An `IndexDelta` holds the arguments of `PrefixIndex.stored`, `removed` or `cleared` for one worker."""

    kind: DeltaKind
    worker: Hashable
    hashes: BlockHashes = _NO_HASHES
    parent: int = 0
    level: int = 0


def apply_deltas(index: PrefixIndex, deltas: Iterable[IndexDelta], now: float = 0.0) -> None:
    """Believe them."""
    for delta in deltas:
        if delta.kind == "stored":
            index.stored(delta.worker, delta.hashes, delta.parent, delta.level, now)
        elif delta.kind == "removed":
            index.removed(delta.worker, delta.hashes, delta.level)
        else:
            index.cleared(delta.worker)


def snapshot_deltas(index: PrefixIndex, step: int = 4096) -> Iterator[list[IndexDelta]]:
    """Yields all contents of the index, parents before children, without the times of last use.

    The index may change between two steps, each of which looks at `step` blocks: then what is said was true at some
    time in between.
    """
    tree, said = index.tree, np.zeros(index.capacity + 1, bool)
    said[0] = True
    waiting: list[tuple[int, int]] = []
    for first in range(1, tree.end, step):
        deltas: list[IndexDelta] = []
        for start, end, front in tree.rows(first, min(first + step, tree.end)):
            if said[front]:
                said[start:end] = True
                deltas += _of_row(index, start, end, front)
            else:
                waiting.append((start, end))
        yield deltas
    while waiting:  # behind blocks that have higher numbers
        rest: list[tuple[int, int]] = []
        deltas = []
        for first, last in waiting:
            for start, end, front in tree.rows(first, last):
                if said[front]:
                    said[start:end] = True
                    deltas += _of_row(index, start, end, front)
                else:
                    rest.append((start, end))
        yield deltas
        if len(rest) == len(waiting):
            return
        waiting = rest


def _of_row(index: PrefixIndex, start: int, end: int, front: int) -> Iterator[IndexDelta]:
    """Yields one delta for each holder of a row of nodes that follow one another and have the same holders."""
    hashes = index.tree.hashes_of(start, end)
    parent = int(index.tree.hashes_of(front, front + 1)[0])
    for worker, level in index.holders.members(int(index.tree.sets[start])):
        yield IndexDelta("stored", worker, hashes, parent, level)


def encode_deltas(deltas: Iterable[IndexDelta], chain: BlockHasher) -> bytes:
    """As bytes. Workers are text, or pairs of text.

    Raises:
        TypeError: a worker has a name that JSON does not have.
    """
    parts = [_mark(chain)]
    for kind, worker, hashes, parent, level in deltas:
        name = json.dumps(worker).encode()
        parts += _HEAD.pack(_KINDS.index(kind), level, len(name), len(hashes), parent), name
        parts.append(hashes.astype("<u8").tobytes())
    return b"".join(parts)


def decode_deltas(data: bytes, chain: BlockHasher) -> Iterator[IndexDelta]:
    """Decodes the output of `encode_deltas`.

    Raises:
        ValueError: it is of another chain, or is cut off or damaged there.
    """
    mark = _mark(chain)
    if data[: len(mark)] != mark:
        raise ValueError("no deltas of this chain: another seed, or blocks of another size")
    at = len(mark)
    while at < len(data):
        try:
            kind, level, name, count, parent = _HEAD.unpack_from(data, at)
            start = at + _HEAD.size + name
            worker: Any = json.loads(data[at + _HEAD.size : start])
            hashes = np.frombuffer(data, "<u8", count, start).astype(np.uint64)
            at = start + 8 * count
            named: Hashable = tuple(cast("list[str]", worker)) if isinstance(worker, list) else worker
            hash(named)
            delta = IndexDelta(_KINDS[kind], named, hashes, parent, level)
        except (struct.error, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"deltas are damaged: {error}") from error
        if level >= LEVELS:
            raise ValueError("deltas are damaged: there is no such level")
        yield delta


def _mark(chain: BlockHasher) -> bytes:
    """Tells chains apart: the hash of a block of zeros."""
    return _DOMAIN + chain.hashes(bytes(4 * chain.block_size), 0).tobytes()
