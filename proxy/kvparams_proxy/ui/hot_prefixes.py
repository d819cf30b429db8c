"""Finds the prefixes that many of the last prompts had in common, without the prompts.

A prefix is known by the hash of its last block, which is made with a secret. A hash of that hash is shown, so that
nobody finds a prompt by guessing it.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from kvparams_proxy.telemetry.recent_requests import PREFIX_BLOCKS

__all__ = ["HotPrefix", "PromptBlocks", "find_hot_prefixes"]

_MOST: Final = 48
_FEWEST_REQUESTS: Final = 2

_Prefix = tuple[int, int]
"""The number of blocks, and the hash of the last one."""


class PromptBlocks(NamedTuple):
    """A prompt, as the prefix index sees it."""

    hashes: Sequence[int]
    """Those of its prefixes that have as many blocks as `PREFIX_BLOCKS` says."""
    cached_blocks: int
    """The blocks from the beginning that were cached where the prompt was computed."""


class HotPrefix(NamedTuple):
    """A prefix that several of the last prompts began with."""

    label: str
    """Opaque."""
    parent: str
    """The label of a shorter prefix that it begins with; empty without one."""
    blocks: int
    """Its length."""
    requests: int
    """Prompts that began with it."""
    hits: int
    """Of these, those for which all of it was cached."""


def find_hot_prefixes(prompts: Iterable[PromptBlocks], most: int = _MOST) -> list[HotPrefix]:
    """Returns the prefixes that most of these prompts have in common, the most common first, parents before children.

    A prefix that all its prompts continue alike is left out: a longer one says the same.
    """
    requests: dict[_Prefix, int] = {}
    hits: dict[_Prefix, int] = {}
    parents: dict[_Prefix, _Prefix | None] = {}
    for hashes, cached in prompts:
        before: _Prefix | None = None
        for key in zip(PREFIX_BLOCKS, hashes, strict=False):
            requests[key] = requests.get(key, 0) + 1
            parents[key] = before
            if key[0] <= cached:
                hits[key] = hits.get(key, 0) + 1
            before = key
    continued: dict[_Prefix, int] = {}
    for key, parent in parents.items():
        if parent is not None:
            continued[parent] = max(continued.get(parent, 0), requests[key])
    kept = [key for key, n in requests.items() if n >= _FEWEST_REQUESTS and continued.get(key, 0) < n]
    chosen = sorted(kept, key=lambda key: (-requests[key], key))[:most]
    named = dict.fromkeys(chosen)
    return [
        HotPrefix(_label(key), _label(_shown_parent(key, parents, named)), key[0], requests[key], hits.get(key, 0))
        for key in chosen
    ]


def _shown_parent(
    key: _Prefix, parents: Mapping[_Prefix, _Prefix | None], shown: Mapping[_Prefix, None]
) -> _Prefix | None:
    parent = parents[key]
    while parent is not None and parent not in shown:
        parent = parents[parent]
    return parent


def _label(key: _Prefix | None) -> str:
    if key is None:
        return ""
    return blake2b(key[1].to_bytes(8, "little"), digest_size=4, person=b"kvparams ui").hexdigest()
