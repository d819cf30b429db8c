"""Holds the steps that the tests of all levels repeat, and the fixtures that they ask for.

A step waits no longer than `DEADLINE_S`, so that a store that hangs fails a test instead of a night.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final

import pytest

from kvparams.keys import Geometry, KVShard, Namespace, Page, chain_pages, page_key
from kvparams.pages import HEADER_BYTES, PageIdentity, page_identity, seal
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results

__all__ = [
    "DEADLINE_S",
    "ConformanceLevel",
    "ConformancePrompt",
    "Floors",
    "Opener",
    "check_lookup",
    "get_one",
    "make_sealed_page",
    "make_value",
    "put_one",
    "result_codes",
]

DEADLINE_S: Final = 20.0

Opener = Callable[[], KVStore]
"""Opens the store under test. Called again within a test, a shared store opens the same values a second time."""


@dataclass(frozen=True, slots=True)
class Floors:
    """A `Floors` declares the least speed of a store, as a share of the speed of memory copies in the same run.

    Memory is copied page by page.

    Be generous: they are there to notice a store that has become ten times slower, on any machine.
    """

    put: float = 0.0
    get: float = 0.0


class ConformanceLevel:
    """The base of every level. The user of the suite says how the store is opened."""

    at_least: ClassVar[Floors] = Floors()
    """What a store says of its own speed; a subclass may declare it."""

    @pytest.fixture
    def opener(self) -> Opener:
        """Overridden by whoever runs the suite."""
        raise NotImplementedError("a subclass of StoreConformance says how its store is opened")

    @pytest.fixture
    def store(self, opener: Opener) -> KVStore:
        """The store under test, empty."""
        return opener()

    @pytest.fixture
    def floors(self) -> Floors:
        """See `at_least`."""
        return self.at_least


def make_value(seed: int | str, size: int) -> memoryview:
    """The same bytes for the same seed."""
    return memoryview(bytearray(Random(f"{seed}").randbytes(size)))


def put_one(store: KVStore, key: str, *buffers: memoryview) -> Result:
    """Put one value."""
    return store.put([PutOp(key, buffers)], DEADLINE_S).result()[0]


def get_one(store: KVStore, key: str, size: int) -> tuple[Result, bytes]:
    """Get one value into a buffer of `size` bytes: the result, and what was read."""
    buffer = memoryview(bytearray(size))
    result = store.get([GetOp(key, (buffer,))], DEADLINE_S).result()[0]
    return result, bytes(buffer[: result.nbytes]) if result.code is ResultCode.OK else b""


def check_lookup(store: KVStore, wanted: Sequence[tuple[str, int | None]]) -> None:
    """Looks keys up and checks that each has its expected size, or is missing where that is None.

    A store that says so may leave a size out; a size that it reports is right.
    """
    found = store.exists([key for key, _ in wanted], DEADLINE_S).result()
    at_once = store.exists_nowait([key for key, _ in wanted])
    assert at_once is None or at_once == found
    always = store.capabilities.reports_sizes
    assert result_codes(found) == [ResultCode.MISS if size is None else ResultCode.OK for _, size in wanted]
    assert [one.nbytes for one in found] == [
        (size or 0) if one.has_size else 0 for one, (_, size) in zip(found, wanted, strict=True)
    ]
    assert all(one.has_size or (one.code is ResultCode.OK and not always) for one in found), "a size is missing"


def result_codes(results: Results) -> list[ResultCode]:
    """The codes alone."""
    return [result.code for result in results]


class ConformancePrompt:
    """A prompt as an engine sees it: pages, their keys, and what their headers must say."""

    def __init__(self, tokens: int, *, page_tokens: int = 16, dim: int = 32, seed: int = 0) -> None:
        shape = Geometry(layers=2, kv_heads=2, k_dim=dim, v_dim=dim)
        namespace = Namespace("model", "revision", "float16", shape, page_tokens=page_tokens)
        part = KVShard.whole(shape)
        random = Random(seed)
        self.pages: Final[tuple[Page, ...]] = chain_pages(namespace, [random.randrange(2**32) for _ in range(tokens)])
        self.keys: Final = [page_key(namespace, page, part) for page in self.pages]
        self.identities: Final = [page_identity(namespace, page, part) for page in self.pages]


def make_sealed_page(identity: PageIdentity, seed: int | str = 0) -> memoryview:
    """A page with a random payload, the same for the same seed."""
    page = memoryview(
        bytearray(HEADER_BYTES) + bytearray(make_value(f"{identity.chain.hex()} {seed}", identity.payload_bytes))
    )
    seal(page, identity)
    return page
