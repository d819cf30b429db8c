"""Simulates a device whose streams run in any order that their events allow, as late as they may.

Work on a stream is done only when a test waits for it, or at random before. The order of work that no event orders is
random. So a missing wait in `staging` corrupts data here, without a GPU.
"""

import threading
from collections import deque
from collections.abc import Callable
from random import Random

import torch

from kvparams_connectors.transfer.devices import DeviceEvent, DeviceStream


class SimulatedEvent:
    def __init__(self, device: "SimulatedDevice") -> None:
        self._device = device
        self.reached: bool = False

    def is_done(self) -> bool:
        with self._device.lock:
            return self.reached

    def wait(self) -> None:
        with self._device.lock:
            while not self.reached:
                self._device.step()


class SimulatedStream:
    def __init__(self, device: "SimulatedDevice") -> None:
        self._device = device
        self.queue: deque[Callable[[], None] | SimulatedEvent | tuple[SimulatedEvent]] = deque()
        """Work, a place to reach, or what to wait for."""

    def run(self, work: Callable[[], None]) -> None:
        with self._device.lock:
            self.queue.append(work)

    def record(self) -> DeviceEvent:
        with self._device.lock:
            event = SimulatedEvent(self._device)
            self.queue.append(event)
            return event

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._device.lock:
            if not self._device.forgetful:
                self.queue.append((event,))


class SimulatedDevice:
    def __init__(self, seed: int, *, forgetful: bool = False) -> None:
        """`forgetful`: streams do not wait for events: what a missing wait would do."""
        self.lock = threading.RLock()
        self.forgetful = forgetful
        self.engine = SimulatedStream(self)
        self._streams = [self.engine]
        self._random = Random(seed)
        self.steps = 0

    def step(self) -> None:
        """One thing, on any stream that may go on."""
        ready = [one for one in self._streams if one.queue and not _blocked(one.queue[0])]
        assert ready, "the streams wait for each other"
        stream = self._random.choice(ready)
        item = stream.queue.popleft()
        self.steps += 1
        if isinstance(item, SimulatedEvent):
            item.reached = True
        elif not isinstance(item, tuple):
            item()

    def drain(self) -> None:
        with self.lock:
            while any(stream.queue for stream in self._streams):
                self.step()

    def current_stream(self) -> DeviceStream:
        return self.engine

    def new_stream(self) -> DeviceStream:
        stream = SimulatedStream(self)
        self._streams.append(stream)
        return stream

    def host_memory(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)


def _blocked(item: Callable[[], None] | SimulatedEvent | tuple[SimulatedEvent]) -> bool:
    if callable(item) or isinstance(item, SimulatedEvent):
        return False
    return not item[0].reached
