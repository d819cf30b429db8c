"""Tests that a snapshot of a million blocks is told and loaded soon, and that no step of it holds up either proxy."""

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvparams.instances import Instance, Role
from kvparams.replication.entries import Entry
from kvparams.replication.entry_codec import decode_entries, encode_entry
from kvparams.replication.siblings import Sibling
from kvparams_proxy.coordination.load_sync import EngineNames
from kvparams_proxy.coordination.prefix_sync import PrefixSync
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from tests.support.processor import is_within
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy
from tests.support.virtual_loop import VirtualLoop

_ENGINES = 4
_PROMPT = 500
"""Blocks."""
_BLOCKS = 1_000_000


class _Told:
    """A cache model of some engines, and what tells it."""

    def __init__(self, number: int) -> None:
        engines = [Instance(f"e{n}", "1", Role.PREFILL, f"http://e{n}", "nixl") for n in range(_ENGINES)]
        proxy = SharedProxy(MemoryNetwork(VirtualLoop()), number, engines, is_alone=True)
        self.engines = [member.instance for member in proxy.fleet.members]
        names = EngineNames()
        for member in proxy.fleet.members:
            names.joined(member)
        self.model: PrefixCacheModel = proxy.prefixes
        self.sync = PrefixSync(self.model, names, lambda _: None, lambda: 0.0)


@pytest.mark.slow
@pytest.mark.alone
def test_a_million_blocks_are_told_and_loaded_in_short_steps(record: Callable[[dict[str, object]], None]) -> None:
    a, b = _Told(0), _Told(1)
    prompts = np.random.default_rng(1).integers(1, 2**64, (_BLOCKS // _PROMPT, _PROMPT), dtype=np.uint64)
    for number, prompt in enumerate(prompts):
        parents = np.concatenate((np.zeros(1, np.uint64), prompt[:-1]))
        a.model.record_contents(a.engines[number % _ENGINES], _BLOCKS // _ENGINES, prompt, parents)
    assert a.model.blocks == _BLOCKS
    gc.collect()
    gc.freeze()  # what the tests have made is not looked at
    steps: list[list[float]] = [[], []]
    snapshot = a.sync.snapshot()
    messages: list[bytes] = []
    entry: Entry | None = None
    while True:
        began = time.thread_time()
        try:
            entry = next(snapshot)
        except StopIteration:
            break
        encoded = b"" if entry is None else encode_entry(entry)
        steps[0].append(time.thread_time() - began)
        messages += [encoded] if encoded else []
    sibling = Sibling(7, 0.0, 0.0)
    for message in messages:
        began = time.thread_time()
        for each in decode_entries(message):
            b.sync.apply(sibling, each)
        steps[1].append(time.thread_time() - began)
    gc.unfreeze()
    assert b.model.blocks == _BLOCKS
    last = int(prompts[-1, -1])
    assert b.model.chain_to(last, _PROMPT).tolist() == prompts[-1].tolist()
    seen: dict[str, object] = {
        "made, s": sum(steps[0]),
        "loaded, s": sum(steps[1]),
        "longest, ms": [1e3 * max(each) for each in steps],
    }
    record(seen)
    assert is_within(sum(steps[1]), 1.0)
    assert is_within(max(map(max, steps)), 0.005)
