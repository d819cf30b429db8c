"""Feeds inputs to a function for a time; an unexpected result ends the campaign, with the input written down.

Inputs are mutations of a corpus, drawn from a seed. An input that ended in a new way joins the corpus, so that the next
ones start from there. The ways in which inputs end (which error, at which members) stand in for coverage.
"""

import random
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

__all__ = ["FOUND", "Campaign", "Make", "bounded", "written_down"]

FOUND = Path(__file__).parent / "found"
"""Inputs that once went wrong: `NAME-DIGEST`. They are tried first, every time."""
CPU_S = 2.0
"""No input may take longer."""
HANG_S = 20.0
"""Then it is ended: of CPU time, which other processes do not use up."""
PEAK_BYTES = 64 << 20
PEAK_PER_BYTE = 1024
"""No input may take more memory than so much, and so much for each of its bytes."""
GROWTH_BYTES = 512 << 20
"""No campaign may."""
LOOKED_AT = 61
"""The memory of one input in so many is looked at: that is slow."""
MOST = 4096
"""Inputs in the corpus."""

Make = Callable[[random.Random, Sequence[bytes]], bytes]


class Campaign:
    """One thing that is fed."""

    def __init__(self, name: str, make: Make, run: Callable[[bytes], Hashable], seeds: Sequence[bytes]) -> None:
        """
        Args:
            name: of the files that are written down.
            make: an input from those of the corpus.
            run: does it, and says in which way it ended; what it raises is a failure.
            seeds: the corpus at the start.
        """
        self.name, self._make, self._run = name, make, run
        self.corpus = list(seeds)
        self.ways: set[int] = set()
        """Hashes of them: what they consist of would be hundreds of MiB in ten minutes."""
        self.inputs = 0
        self.longest_s = 0.0
        self.peak_bytes = 0

    def last(self, seconds: float, seed: int) -> dict[str, object]:
        """Feed for so long; what was seen."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        for path in sorted(FOUND.glob(f"{self.name}-*")):
            self.feed(path.read_bytes())
        for data in list(self.corpus):
            self.feed(data)
        dice = random.Random(seed)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            data = self._make(dice, self.corpus)
            if self.feed(data) and len(data) < 1 << 14:
                if len(self.corpus) < MOST:
                    self.corpus.append(data)
                else:
                    self.corpus[dice.randrange(MOST)] = data
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        assert grown < GROWTH_BYTES, f"the process has grown by {grown >> 20} MiB"
        return {
            "seconds": seconds,
            "seed": seed,
            "inputs": self.inputs,
            "ways": len(self.ways),
            "longest_ms": round(1000 * self.longest_s, 1),
            "peak_mib": round(self.peak_bytes / 2**20, 1),
            "grown_mib": round(grown / 2**20, 1),
        }

    def feed(self, data: bytes) -> bool:
        """One input; whether it ended in a new way."""
        self.inputs += 1
        looked_at = self.inputs % LOOKED_AT == 0
        peak = 0
        began = time.process_time()
        with written_down(self.name, data):
            if looked_at:
                tracemalloc.start()
            try:
                with bounded():
                    way = self._run(data)
            finally:
                if looked_at:
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
            spent_s = time.process_time() - began
            if looked_at:
                self.peak_bytes = max(self.peak_bytes, peak)
                assert peak < PEAK_BYTES + PEAK_PER_BYTE * len(data), f"it took {peak >> 20} MiB"
            else:
                self.longest_s = max(self.longest_s, spent_s)
                assert spent_s < CPU_S, f"it took {spent_s:.1f} s"
        known = len(self.ways)
        self.ways.add(hash(way))
        return len(self.ways) > known


@contextmanager
def written_down(name: str, data: bytes) -> Generator[None]:
    """If this ends badly, the input is written into `FOUND`."""
    try:
        yield
    except Exception as error:
        path = FOUND / f"{name}-{sha256(data).hexdigest()[:12]}"
        FOUND.mkdir(exist_ok=True)
        path.write_bytes(data)
        raise AssertionError(f"{error!r} with what is written into {path}") from error


@contextmanager
def bounded() -> Generator[None]:
    """A hang of Python code ends in an error. Of the main thread only."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it took {HANG_S} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
