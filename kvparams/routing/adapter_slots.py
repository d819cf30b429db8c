"""Models which LoRA adapters an engine has in its slots, from the legs that are given to it.

An engine serves many adapters by name and keeps a few loaded: vLLM `--max-loras`, SGLang `--max-loras-per-batch`. A
request for another one evicts the least recently used adapter that no running request needs, and waits until its own is
loaded: vLLM 0.32.0 `lora/model_manager.py` (`LRUCacheLoRAModelManager`), SGLang 0.5.23 `srt/lora/mem_pool.py`.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

__all__ = ["DEFAULT_SLOTS", "MAX_SLOTS", "AdapterSlots"]

DEFAULT_SLOTS: Final = 8
"""Slots of an engine that does not say how many it has: the default of SGLang 0.5.23. vLLM's metrics say it."""
MAX_SLOTS: Final = 1024
"""More are not modeled, whatever an engine says."""


class AdapterSlots:
    """An `AdapterSlots` holds the adapters that one engine is believed to have loaded.

    Invariant: never more than `capacity`.
    """

    __slots__ = ("_capacity", "_idle", "_loaded", "_running")

    def __init__(self, capacity: int = DEFAULT_SLOTS) -> None:
        self._capacity = max(1, min(capacity, MAX_SLOTS))
        self._loaded = OrderedDict[str, None]()
        """The least recently used first."""
        self._idle = OrderedDict[str, None]()
        """Those of them without running legs, in the same order."""
        self._running = Counter[str]()
        """Legs that run, by adapter."""

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self._capacity

    @property
    def newest(self) -> str | None:
        """The adapter that was used last; None if none is loaded."""
        return next(reversed(self._loaded), None)

    @property
    def loaded(self) -> list[str]:
        """The adapters that are believed to be loaded, the least recently used first."""
        return list(self._loaded)

    def __contains__(self, adapter: str) -> bool:
        """Returns whether the adapter is believed to be loaded."""
        return adapter in self._loaded

    def has_slot(self, adapter: str) -> bool:
        """Returns whether a leg for this adapter could run now: it is loaded, or a slot has no running legs."""
        return adapter in self._loaded or len(self._loaded) < self._capacity or bool(self._idle)

    def begin(self, adapter: str) -> bool:
        """A leg for this adapter is given to the engine. Returns whether the adapter was loaded already."""
        was_loaded = adapter in self._loaded
        self._running[adapter] += 1
        self._idle.pop(adapter, None)
        self._use(adapter)
        return was_loaded

    def end(self, adapter: str) -> None:
        """A leg has ended: if it was the last one, its adapter was in use until now. Does nothing if none runs."""
        if adapter not in self._running:
            return
        self._running[adapter] -= 1
        if self._running[adapter]:
            return
        del self._running[adapter]
        if adapter in self._loaded:
            self._use(adapter)

    def record_loaded(self, adapters: Sequence[str]) -> None:
        """The engine has loaded these adapters, the last one most recently."""
        for adapter in adapters[-self._capacity :]:  # before these, others have gone already
            self._use(adapter)

    def correct(self, capacity: int, active: Collection[str]) -> None:
        """Corrects the model by what the engine says itself.

        Args:
            capacity: how many slots it has.
            active: adapters for which it has requests. If there are more than slots, some of them only wait, and
                nothing is known of any.
        """
        self._capacity = max(1, min(capacity, MAX_SLOTS))
        if len(active) <= self._capacity:
            for adapter in active:
                if adapter not in self._loaded:
                    self._use(adapter)
        self._evict()

    def forget(self, adapters: Collection[str]) -> None:
        """These adapters are served no longer."""
        for adapter in adapters:
            self._loaded.pop(adapter, None)
            self._idle.pop(adapter, None)

    def _use(self, adapter: str) -> None:
        self._loaded[adapter] = None
        self._loaded.move_to_end(adapter)
        if adapter not in self._running:
            self._idle[adapter] = None
            self._idle.move_to_end(adapter)
        self._evict()

    def _evict(self) -> None:
        """Evicts the least recently used adapters that no leg needs, and others only where all are needed."""
        while len(self._loaded) > self._capacity:
            newest = next(reversed(self._loaded))
            evicted = next(iter(self._idle), newest)
            if evicted == newest:  # no other one is idle
                evicted = next(iter(self._loaded))
            self._idle.pop(evicted, None)
            del self._loaded[evicted]
