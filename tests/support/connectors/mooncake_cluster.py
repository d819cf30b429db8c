"""Runs a real Mooncake cluster for tests: a master and owners as processes on free ports of the loopback interface."""

import os
import signal
import socket
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

from demo.processes import free_port
from kvparams_connectors.store_url import StoreURL
from kvparams_connectors.stores.mooncake.client import MooncakeClient
from kvparams_connectors.stores.mooncake.store import MooncakeSettings, MooncakeStore
from tests.support.waiting import wait_until

MASTER: Final = Path(sysconfig.get_path("scripts")) / "mooncake_master"
_READY_S: Final = 30.0


class Process:
    """A process of ours; what it says is kept for when it fails."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log: Final = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP; when this returns, none of its threads does anything more."""
        self.send(signal.SIGSTOP)
        wait_until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in self._threads()))

    def _threads(self) -> list[Path]:
        return list(Path("/proc", str(self.pid), "task").glob("*/stat"))

    def running(self) -> bool:
        return self._process.poll() is None

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it if it still runs; its exit status."""
        if self.running():
            self.send(signal.SIGCONT)
            self.send(number)
        return self._process.wait(_READY_S)


class Cluster:
    """One master and its owners."""

    def __init__(self, folder: Path, *owners: str, options: tuple[str, ...] = ()) -> None:
        """Args:
        folder: for logs.
        owners: the size of each owner's segment.
        options: of the master.
        """
        self._folder = folder
        self._options = options
        self.port: Final = free_port()
        self._metrics: Final = free_port()
        self.owners: Final[list[Process]] = []
        self.master = self._start_master()
        try:
            for size in owners:
                self.add_owner(size)
        except BaseException:
            self.end()
            raise

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start_master(self) -> Process:
        command = [
            str(MASTER),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics}",
            "--logtostderr",
            *self._options,
        ]
        master = Process(command, self._folder / "master.log")
        try:
            wait_until(lambda: _accepts(self.port) or not master.running(), _READY_S)
            assert master.running(), master.log.read_text()
        except BaseException:
            master.end()
            raise
        return master

    def restart_master(self) -> None:
        self.master.end()
        self.master = self._start_master()

    def add_owner(self, size: str) -> Process:
        """Start an owner and wait until its memory can be used."""
        log = self._folder / f"owner-{len(self.owners)}.log"
        module = "kvparams_connectors.stores.mooncake.owner"
        owner = Process([sys.executable, "-m", module, "--master", self.address, "--size", size], log)
        try:
            wait_until(lambda: b"ready\n" in log.read_bytes() or not owner.running(), _READY_S)
            assert owner.running(), log.read_text()
        except BaseException:
            owner.end()
            raise
        self.owners.append(owner)
        return owner

    def url(self, **settings: str | int) -> str:
        """A store's URL."""
        return f"mooncake://{self.address}?" + "&".join(f"{name}={value}" for name, value in settings.items())

    def open(
        self,
        client: MooncakeClient | None = None,
        *,
        buffer_bytes: int = 8 << 20,
        threads: int = 1,
        connect_s: float = 1.0,
        max_value_bytes: int = 1 << 30,
        **settings: str | int,
    ) -> MooncakeStore:
        """Opens a store, with little memory unless said otherwise."""
        given = MooncakeSettings.of(StoreURL.parse(self.url(**settings)))
        made = replace(
            given,
            buffer_bytes=buffer_bytes,
            threads=threads,
            connect_s=connect_s,
            max_value_bytes=max_value_bytes,
        )
        return MooncakeStore(made, client)

    def end(self) -> None:
        for process in (*self.owners, self.master):
            process.end()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
