"""The order in which leaves are given up: by the epoch in which they were last used.

A node is in at most one bucket. It stays in the bucket it was put into when it is used again; whoever takes it out
looks whether it belongs into a later one. So using a thousand nodes costs nothing here.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionBuckets"]


class EvictionBuckets:
    """Node numbers in buckets, one for each epoch that has any."""

    __slots__ = ("_buckets", "_epochs")

    def __init__(self) -> None:
        self._buckets: dict[int, bytearray] = {}
        """By epoch, node numbers as packed u32. The garbage collector does not look at them."""
        self._epochs: list[int] = []  # a heap

    def put(self, numbers: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> None:
        """Puts each node into the bucket of its epoch."""
        if len(numbers) > 1:
            order = epochs.argsort(kind="stable")
            numbers, epochs = numbers.take(order), epochs.take(order)
        begin = 0
        for end in [*((epochs[1:] != epochs[:-1]).nonzero()[0] + 1).tolist(), len(numbers)]:
            if end:
                self._made(epochs.item(begin)).extend(numbers[begin:end].tobytes())
                begin = end

    def oldest(self, until: int) -> int | None:
        """Returns the oldest epoch whose bucket is not empty; None if it is later than `until`."""
        while self._epochs and self._epochs[0] <= until:
            epoch = self._epochs[0]
            if self._buckets[epoch]:
                return epoch
            del self._buckets[heappop(self._epochs)]
        return None

    def bucket(self, epoch: int) -> bytearray:
        """Returns the nodes of an epoch that `oldest` has named, as packed u32; those that go next stand at the end."""
        return self._buckets[epoch]

    def keep(self, epoch: int, count: int) -> None:
        """Keeps the first nodes of a bucket."""
        del self._buckets[epoch][4 * count :]

    def _made(self, epoch: int) -> bytearray:
        bucket = self._buckets.get(epoch)
        if bucket is None:
            bucket = self._buckets[epoch] = bytearray()
            heappush(self._epochs, epoch)
        return bucket
