"""Provides the steps that tests of several stores share; each compares the values that it reads."""

import threading
from collections.abc import Callable
from random import Random
from typing import Final

from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results

__all__ = ["DEADLINE_S", "SIZE", "codes", "found", "get", "in_thread", "page", "put", "value"]

DEADLINE_S: Final = 20.0
SIZE: Final = 400_000


def codes(results: Results) -> list[ResultCode]:
    return [result.code for result in results]


def value(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray((seed + number) % 251 for number in range(997)) * (size // 997 + 1))[:size]


def page(seed: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray(Random(seed).randbytes(size)))


def put(store: KVStore, numbers: range, deadline_s: float = DEADLINE_S) -> list[ResultCode]:
    ops = [PutOp(f"key-{number}", (page(number),)) for number in numbers]
    return codes(store.put(ops, deadline_s).result())


def get(store: KVStore, numbers: range, deadline_s: float = DEADLINE_S) -> list[ResultCode]:
    """The codes; what was read is right, or this fails."""
    targets = [memoryview(bytearray(SIZE)) for _ in numbers]
    ops = [GetOp(f"key-{number}", (target,)) for number, target in zip(numbers, targets, strict=True)]
    job = store.get(ops, deadline_s)
    results = job.result()
    for number, target, result in zip(numbers, targets, results, strict=True):
        if result.code is ResultCode.OK:
            assert (result.nbytes, target) == (SIZE, page(number)), f"key-{number}"
    assert job.wait_settled(DEADLINE_S)
    return codes(results)


def found(store: KVStore, *keys: str) -> list[ResultCode]:
    """What a lookup says."""
    return codes(store.exists(keys, DEADLINE_S).result())


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread
