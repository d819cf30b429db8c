"""Runs a process with a peer store in it, for tests: it puts, deletes, counts, and states its address.

Whoever starts the process ends it, even if a test fails.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, Self

from kvparams_connectors.store import PutOp, open_store
from kvparams_connectors.stores.peer.store import PeerStore
from tests.support.waiting import wait_until

__all__ = ["PeerProcess", "a_peer", "page"]

_WAIT_S: Final = 30.0
_EMPTY_S: Final = 1.0


def page(seed: int, size: int) -> memoryview:
    """The same bytes for the same seed."""
    return memoryview(bytearray(Random(seed).randbytes(size)))


def a_peer(kept: list["PeerProcess"], url: str) -> "PeerProcess":
    """The process that is kept for the tests of a file, or a new one if a test has harmed it."""
    if kept and not kept[0].as_new():
        kept.pop().kill()
    if not kept:
        kept.append(PeerProcess(url))
    return kept[0]


class PeerProcess:
    """One such process."""

    def __init__(self, url: str) -> None:
        self.url: Final = url
        self._seeds: set[int] = set()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.address: str = self._answer()
        except BaseException:  # whoever starts it has nothing to end
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, seeds: Sequence[int], size: int) -> list[str]:
        """Pages under `key-SEED`; what became of them."""
        self._seeds.update(seeds)
        return self._ask(["put", list(seeds), size])

    def delete(self, seeds: Sequence[int]) -> list[str]:
        return self._ask(["delete", list(seeds), 0])

    def as_new(self) -> bool:
        """Go on, and delete what was put; whether it is as it was when it was started."""
        if self._process.poll() is not None:
            return False
        self.go_on()
        self.delete(sorted(self._seeds))
        self._seeds.clear()
        try:
            wait_until(lambda: not self.pins() and not self.readers(), _EMPTY_S)
        except TimeoutError:
            return False
        return True

    def pins(self) -> int:
        """Values that are pinned at the moment, by whomever."""
        return self._ask(["pins", [], 0])

    def readers(self) -> int:
        return self._ask(["readers", [], 0])

    def stop(self) -> None:
        """SIGSTOP; when this returns, none of its threads does anything more."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = Path("/proc", str(self.pid), "task")
        wait_until(
            lambda: all(stat.read_text().rpartition(")")[2].split()[0] in "Tt" for stat in threads.glob("*/stat")),
            _WAIT_S,
        )

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._process.kill()
        self._process.wait(_WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def restart(self) -> None:
        """Killed and started anew, by the same URL."""
        self.kill()
        self._start()

    def _ask(self, command: list[Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


def main(url: str) -> None:
    """Do what is asked on stdin, a line of JSON each."""
    store = open_store(url)
    sys.stdout.write(json.dumps(store.address) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        what, seeds, size = json.loads(line)
        answer: object
        if what == "put":
            ops = [PutOp(f"key-{seed}", (page(seed, size),)) for seed in seeds]
            answer = [result.code.name for result in store.put(ops, 20.0).result()]
        elif what == "delete":
            answer = [one.code.name for one in store.delete([f"key-{seed}" for seed in seeds], 20.0).result()]
        else:
            assert isinstance(store, PeerStore)
            answer = store.statistics.readers if what == "readers" else store.statistics.values_pinned
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1])
