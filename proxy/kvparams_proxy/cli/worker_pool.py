"""Runs the workers of `kvparams proxy --workers N` under a supervisor in this process."""

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, cast

from kvparams.errors import KVParamsError
from kvparams_proxy.cli.configuration import Configuration, build_configuration
from kvparams_proxy.config.sharing import write_exchange_key
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.listening.handover import SocketHandover
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.file_descriptors import backlog_for, descriptor_limit
from kvparams_proxy.service_notifier import ServiceNotifier
from kvparams_proxy.workers.listeners import WorkerListeners
from kvparams_proxy.workers.supervisor import ShutdownTimes, Supervisor, SupervisorEnd, WorkerPlan

__all__ = ["run_workers"]

_log: Final = logging.getLogger(__name__)
_MODULE: Final = "kvparams_proxy.cli.worker_main"
_SHARED_MEMORY: Final = Path("/dev/shm")
"""The workers' sockets and locks are in memory: they wait for no disk, and a reboot removes them."""


def run_workers(
    asked: Configuration, arguments: argparse.Namespace, handover: SocketHandover, on_serving: Callable[[int], None]
) -> SupervisorEnd:
    """Runs workers until SIGINT or SIGTERM, or until a successor serves.

    Args:
        asked: its configuration.
        arguments: its source, from which each worker builds its own.
        handover: where listening sockets come from and go to.
        on_serving: called with the port once requests are served.

    Raises:
        OSError: the port cannot be used.
        KVParamsError: no app can be made of the configuration.
    """
    create_app(asked.settings)  # errors are reported before any worker starts
    backlog = backlog_for(descriptor_limit())
    notifier = ServiceNotifier.from_environment()
    memory = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None
    with (
        WorkerListeners.open(
            asked.host,
            asked.port,
            asked.workers,
            backlog,
            handover.inherited,
            grow=handover.has_predecessor,
        ) as listeners,
        tempfile.TemporaryDirectory(prefix="kvparams-", dir=memory, ignore_cleanup_errors=True) as directory,
    ):
        port = listeners.port
        write_exchange_key(Path(directory))

        status = f"Serving requests with {asked.workers} workers"

        async def serving() -> None:
            if await handover.complete(listeners.sockets, supervisor.retire):
                on_serving(port)
                notifier.ready(status, is_successor=handover.has_predecessor)
            else:
                supervisor.retire()

        def reloading(begins: bool) -> None:
            if begins:
                notifier.reloading()
            else:
                notifier.reloaded(status)

        plan = WorkerPlan(
            workers=asked.workers,
            command=_worker_command(),
            arguments=_plain_arguments(arguments),
            directory=Path(directory),
            times=_times(asked),
            check=lambda: _check_again(asked, arguments),
            on_serving=serving,
            on_stopping=notifier.stopping,
            on_reload=reloading,
        )
        supervisor = Supervisor(plan, listeners)
        try:
            return asyncio.run(supervisor.run())
        finally:
            notifier.close()


def _worker_command() -> list[str]:
    """Returns the command line of a worker: the same interpreter with the same options.

    A worker searches the working directory for modules only if this process does.
    """
    flags = cast("Callable[[], list[str]]", getattr(subprocess, "_args_from_interpreter_flags"))()  # noqa: B009
    if os.getcwd() not in sys.path and "" not in sys.path and "-P" not in flags:
        flags.append("-P")
    return [sys.executable, *flags, "-m", _MODULE]


def _plain_arguments(arguments: argparse.Namespace) -> Mapping[str, object]:
    """Returns the arguments that come from the command line, without objects of this process."""
    found: dict[str, object] = vars(arguments)
    plain = (type(None), bool, str, list)
    return {name: value for name, value in found.items() if type(value) in plain}


def _times(asked: Configuration) -> ShutdownTimes:
    return ShutdownTimes(asked.server.drain_delay_s, asked.server.grace_s)


def _check_again(before: Configuration, arguments: argparse.Namespace) -> ShutdownTimes | None:
    """Reads the configuration for a reload. Returns None if it is invalid, after logging the reasons."""
    try:
        asked = build_configuration(arguments)
        create_app(asked.settings)
    except ConfigError as error:
        for problem in error.problems:
            _log.error("%s", problem)
        return None
    except (KVParamsError, ValueError) as error:
        _log.error("%s", error)
        return None
    kept = {"host": before.host, "port": before.port, "workers": before.workers}
    for name, value in kept.items():
        if getattr(asked, name) != value:
            _log.warning("%s stays %s: it changes only at a restart of the proxy", name, value)
    return _times(asked)
