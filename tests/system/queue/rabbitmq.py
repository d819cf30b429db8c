"""Runs a real RabbitMQ for tests: on free loopback ports, with folders, a name and a port mapper of its own.

It shares nothing with a broker that the machine may run, and ends only the processes that it started.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from demo.processes import bound_to_parent
from tests.support.processes import free_ports
from tests.support.waiting import wait_until

__all__ = ["RabbitMQ"]

_START_S: Final = 240.0
"""A machine that is full takes minutes."""
_STOP_S: Final = 60.0
_HEADER: Final = b"AMQP\x00\x00\x09\x01"


class RabbitMQ:
    """One broker; a context manager that ends it. Its durable queues outlive `stop` and `kill`."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        """`folder` takes its data and what it says; `settings` are further lines of its rabbitmq.conf."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder: Final = folder
        """See `__init__`."""
        self.port, distribution, self._mapper_port = free_ports(3)
        self._log = folder / "log"
        self._environment = _environment(folder, self.port, distribution, self._mapper_port, settings)
        self._mapper: subprocess.Popen[bytes] | None = None
        self._broker: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._mapper = _end(self._mapper, signal.SIGKILL)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        try:
            if self._mapper is None:
                self._mapper = self._run("epmd", "-address", "127.0.0.1", "-port", str(self._mapper_port))
                self._await(self._mapper, self._mapped)
            self._broker = self._run(str(_server()))
            self._await(self._broker, self._answers)
        except BaseException:  # whoever starts it has nothing to end
            self.__exit__()
            raise

    def stop(self) -> None:
        """As an operator would, in good order."""
        self._broker = _end(self._broker, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._broker = _end(self._broker, signal.SIGKILL)

    def has_recorded_queues(self) -> bool:
        """Whether the broker has written to disk which quorum queues it has.

        RabbitMQ 3.10 does that up to ten seconds after a queue is declared, in the tables of its Raft library. A broker
        that is killed before it does has lost the queue.
        """
        (folder,) = (self.folder / "data").glob("*/quorum/*")
        tables = [(folder / name).read_bytes() for name in ("names.dets", "meta.dets")]
        queues = [each.name.encode() for each in folder.iterdir() if each.is_dir()]
        return bool(queues) and all(queue in table for queue in queues for table in tables)

    def _run(self, *command: str) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                bound_to_parent(*command),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await(self, process: "subprocess.Popen[bytes]", ready: Callable[[], bool]) -> None:
        def log() -> str:
            return self._log.read_text("utf-8", "replace")[-4000:]

        wait_until(lambda: ready() or process.poll() is not None, _START_S, pause_s=0.05, seen=log)
        assert process.poll() is None, f"the broker did not start:\n{log()}"

    def _mapped(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self._mapper_port)) == 0

    def _answers(self) -> bool:
        """Whether it begins to speak AMQP: its listener is opened last."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
                sock.sendall(_HEADER)
                return bool(sock.recv(1))
        except OSError:
            return False


def _server() -> Path:
    """The broker's own script: Debian's wrapper would change the user and write into the system's folders."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    assert found, "there is no rabbitmq-server: run tests/install_servers.sh"
    return found[-1]


def _environment(folder: Path, port: int, distribution: int, mapper: int, more: str) -> dict[str, str]:
    settings = folder / "rabbitmq.conf"
    settings.write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\nlog.console.level = warning\nlog.file = false\n"
        "vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n"
        f"{more}"
    )
    plugins = folder / "plugins"
    plugins.write_text("[].\n")
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(folder),  # for the cookie
        "ERL_EPMD_PORT": str(mapper),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_ALLOW_INPUT": "1",  # one process, which takes its signals itself
        "RABBITMQ_SERVER_START_ARGS": "-noshell -noinput -kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        "RABBITMQ_NODENAME": f"kvparams-{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_CONFIG_FILE": str(settings),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
    }


def _end(process: "subprocess.Popen[bytes] | None", how: signal.Signals) -> None:
    if process is not None:
        process.send_signal(how)
        process.wait(_STOP_S)
