"""The order in which leaves are given up: by the epoch in which they were last used.

A node is in at most one bucket. It stays in the bucket it was put into when it is used again; whoever takes it out
looks whether it belongs into a later one. So using a thousand nodes costs nothing here.
"""

from array import array
from heapq import heappop, heappush

__all__ = ["EvictionBuckets"]


class EvictionBuckets:
    """Node numbers in buckets, one for each epoch that has any."""

    __slots__ = ("_buckets", "_epochs")

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._epochs: list[int] = []  # a heap

    def put(self, node: int, epoch: int) -> None:
        """Into the bucket of this epoch."""
        bucket = self._buckets.get(epoch)
        if bucket is None:
            bucket = self._buckets[epoch] = array("I")
            heappush(self._epochs, epoch)
        bucket.append(node)

    def take(self, until: int) -> tuple[int, int] | None:
        """Removes one of the oldest nodes and returns it with its epoch; None if all are younger than `until`."""
        while self._epochs and self._epochs[0] <= until:
            epoch = self._epochs[0]
            bucket = self._buckets[epoch]
            if bucket:
                return bucket.pop(), epoch
            del self._buckets[heappop(self._epochs)]
        return None
