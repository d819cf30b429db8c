"""Tests the prefix index against slow dictionaries and sets with the same meaning."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvparams.index.block_hashes import BlockHasher, BlockHashes
from kvparams.index.holder_sets import LEVELS
from kvparams.index.prefix_index import PrefixIndex

CHAIN = BlockHasher(11, 1)
PROMPTS = st.lists(st.sampled_from([0, 0, 1]), max_size=7)
WORKERS = st.sampled_from(["a", "b", "c"])
LEVEL = st.sampled_from([0, 0, 1, LEVELS - 1])


def chain(*tokens: int, start: int = 0) -> BlockHashes:
    """The hashes of a prompt in blocks of one token, from the block `start` on."""
    return CHAIN.hashes(tokens, 1)[start:]


@dataclass
class Node:
    """A block that the oracle knows."""

    parent: int
    used: int = 0
    holders: set[tuple[Hashable, int]] = field(default_factory=set[tuple[Hashable, int]])


class Oracle:
    """The index, said plainly: nodes in a dictionary, each with a set."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nodes: dict[int, Node] = {}
        self.clock = 0

    def match(self, hashes: Iterable[int], level: int) -> dict[Hashable, int]:
        found: dict[Hashable, int] = {}
        alive: set[Hashable] | None = None
        for depth, one in enumerate(hashes):
            node = self.nodes.get(one)
            here: set[Hashable] = set() if node is None else {worker for worker, at in node.holders if at <= level}
            alive = here if alive is None else alive & here
            found |= dict.fromkeys(alive, depth + 1)
        return found

    def leaves(self) -> set[int]:
        return self.nodes.keys() - {node.parent for node in self.nodes.values()}

    def stored(self, worker: Hashable, hashes: list[int], parent: int, level: int, forgotten: list[int]) -> None:
        held = [one for one in hashes if one in self.nodes]
        room = self.capacity - len(self.nodes)
        missing = len(hashes) - len(held)
        if missing > room:
            self.check_forgotten(forgotten, missing - room, {*held, parent})
            room = self.capacity - len(self.nodes)
        else:
            assert not forgotten
        front = parent if parent in self.nodes else 0
        self.clock += 1
        for one in hashes:
            if one not in self.nodes:
                if not room:
                    break
                room -= 1
                self.nodes[one] = Node(front)
            self.nodes[one].used = self.clock
            self.nodes[one].holders.add((worker, level))
            front = one

    def check_forgotten(self, forgotten: list[int], wanted: int, pinned: set[int]) -> None:
        """Each was, when it went, a leaf that was used longest ago, or was held by nobody; and there were enough."""
        rest = set(forgotten)
        while rest:
            leaves = self.leaves() - pinned
            ghosts = {one for one in leaves if not self.nodes[one].holders}
            oldest = min(self.nodes[one].used for one in leaves)
            going = ghosts or {one for one in leaves if self.nodes[one].used == oldest and one in rest}
            assert going, "something older was left, or something stands behind it"
            assert going <= rest
            one = going.pop()
            rest.remove(one)
            wanted -= 1
            del self.nodes[one]
        assert wanted <= 0 or not self.leaves() - pinned

    def removed(self, holders: set[tuple[Hashable, int]], hashes: Iterable[int]) -> None:
        emptied: list[int] = []
        for one in hashes:
            node = self.nodes.get(one)
            if node is not None and node.holders & holders:
                node.holders -= holders
                emptied += [] if node.holders else [one]
        while ghosts := {one for one in self.leaves() if not self.nodes[one].holders}:
            for one in ghosts:
                del self.nodes[one]


class Comparison(RuleBasedStateMachine):
    """Whatever is said in whatever order, the index answers as the oracle does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    @initialize(capacity=st.sampled_from([3, 6, 9, 60]))
    def begin(self, capacity: int) -> None:
        self.index = PrefixIndex(capacity)
        self.oracle = Oracle(capacity)

    @rule(worker=WORKERS, tokens=PROMPTS, start=st.integers(0, 6), says_parent=st.booleans(), level=LEVEL)
    def store(self, worker: str, tokens: list[int], start: int, says_parent: bool, level: int) -> None:
        whole = chain(*tokens)
        hashes = whole[start:]
        parent = int(whole[start - 1]) if says_parent and 0 < start <= len(whole) else 0
        self.seen.add(tuple(tokens))
        forgotten = self.index.stored(worker, hashes, parent, level)
        kept = hashes.tolist()[: self.oracle.capacity]
        self.oracle.stored(worker, kept, parent, level, forgotten.tolist())

    @rule(worker=WORKERS, tokens=PROMPTS, start=st.integers(0, 6), level=LEVEL | st.none(), backwards=st.booleans())
    def remove(self, worker: str, tokens: list[int], start: int, level: int | None, backwards: bool) -> None:
        hashes = chain(*tokens, start=start)[:: -1 if backwards else 1]
        self.index.removed(worker, np.concatenate((hashes, hashes)), level)
        levels = range(LEVELS) if level is None else [level]
        self.oracle.removed({(worker, one) for one in levels}, hashes.tolist())

    @rule(worker=WORKERS)
    def clear(self, worker: str) -> None:
        self.index.cleared(worker)
        self.oracle.removed({(worker, level) for level in range(LEVELS)}, list(self.oracle.nodes))

    @rule(tokens=PROMPTS)
    def touch(self, tokens: list[int]) -> None:
        self.index.touch(chain(*tokens))
        self.oracle.clock += 1
        for one in chain(*tokens).tolist():
            if one in self.oracle.nodes:
                self.oracle.nodes[one].used = self.oracle.clock

    @rule(tokens=PROMPTS)
    def match(self, tokens: list[int]) -> None:
        hashes = chain(*tokens)
        found = self.index.match(hashes)
        assert found.blocks == len(tokens)
        assert found.held == tuple(self.oracle.match(hashes.tolist(), level) for level in range(LEVELS))

    @invariant()
    def there_are_as_many_nodes(self) -> None:
        assert len(self.index) == len(self.oracle.nodes) <= self.oracle.capacity

    def teardown(self) -> None:
        for tokens in self.seen:
            self.match(list(tokens))


Comparison.TestCase.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
TestComparison = Comparison.TestCase
