"""Defines the device operations that moving KV needs: streams, events, memory.

They are the same for CUDA and for a test.

Work on a stream is done in the order in which it was put there; streams know nothing of each other but by events.
Nothing here decides anything; what must wait for what is `staging`'s matter, so that it can be tested without a GPU
(tests/support/connectors/simulated_device.py runs it in every order that the events allow).
"""

from collections.abc import Callable
from typing import Protocol, cast

import torch

__all__ = ["CudaDevice", "Device", "DeviceEvent", "DeviceStream"]


class DeviceEvent(Protocol):
    """A place in a stream."""

    def is_done(self) -> bool:
        """Returns whether all that was put on the stream before it has been done; never blocks."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it has."""
        ...


class DeviceStream(Protocol):
    """A queue of work on a device."""

    def run(self, work: Callable[[], None]) -> None:
        """Put what `work` launches on this stream."""
        ...

    def record(self) -> DeviceEvent:
        """A place behind everything that was put on this stream so far."""
        ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Makes later work on this stream wait for `event`; the calling thread does not wait."""
        ...


class Device(Protocol):
    """A device with memory of its own."""

    def current_stream(self) -> DeviceStream:
        """The stream on which the calling thread launches its work: an engine's compute stream."""
        ...

    def new_stream(self) -> DeviceStream:
        """A new stream."""
        ...

    def host_memory(self, nbytes: int) -> memoryview:
        """Memory of the host that copies to and from the device may use while the CPU goes on; zero."""
        ...

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Bytes on the device; what they hold is undefined."""
        ...


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> "_CudaEvent":
        event = torch.cuda.Event(blocking=True)  # who waits sleeps, and leaves the core to others
        event.record(self._stream)
        return _CudaEvent(event)

    def wait_event(self, event: DeviceEvent) -> None:
        self._stream.wait_event(cast("_CudaEvent", event).event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """A GPU. Made only where there is one; importing this module needs none."""

    def __init__(self, device: torch.device) -> None:
        """Checks that CUDA is available.

        Args:
            device: the CUDA device.

        Raises:
            RuntimeError: torch has no CUDA here.
        """
        if not torch.cuda.is_available():
            raise RuntimeError(f"tensors lie on {device}, but torch finds no CUDA device here")
        self._device = device

    def current_stream(self) -> DeviceStream:
        """Returns the stream of the calling thread."""
        return _CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> DeviceStream:
        """Makes a stream."""
        return _CudaStream(torch.cuda.Stream(self._device))

    def host_memory(self, nbytes: int) -> memoryview:
        """Allocates pinned memory of the machine."""
        # The view keeps the tensor alive, and with it the registration of its pages.
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Allocates memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
