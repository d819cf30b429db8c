"""A worker process of `kvparams proxy --workers`, started by the supervisor.

It reads the configuration itself. So no secret is sent between processes, and a successor reads the current files.
"""

import argparse
import os
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import replace

from kvparams.errors import KVParamsError
from kvparams_proxy.cli.configuration import build_configuration
from kvparams_proxy.cli.worker_limits import share_limits
from kvparams_proxy.config.sharing import share_directory
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.file_descriptors import raise_descriptor_limit
from kvparams_proxy.server.worker_server import serve_worker
from kvparams_proxy.telemetry.logging_setup import set_up_logging
from kvparams_proxy.workers.channel import FrameKind, encode_frame, receive_frame
from kvparams_proxy.workers.parent_death import end_with_parent
from kvparams_proxy.workers.worker_link import WorkerLink
from kvparams_proxy.workers.worker_start import StartFailure, WorkerStart

__all__ = ["main"]


def main(descriptor: int) -> int:
    """Serves until the supervisor ends this worker. Returns the exit status.

    Args:
        descriptor: the worker's end of the channel to the supervisor.
    """
    end_with_parent()
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    frame = receive_frame(channel)
    if frame is None or frame.kind is not FrameKind.START:
        return 1
    start = WorkerStart.decode(frame.payload)
    with channel.dup() as reports:  # stays open when the link is closed
        failure = _serve(start, channel)
        if failure is None:
            return 0
        with suppress(OSError):  # the supervisor has exited
            reports.setblocking(True)
            reports.sendall(encode_frame(FrameKind.FAILED, failure.encode()))
        return failure.status


def _serve(start: WorkerStart, channel: socket.socket) -> StartFailure | None:
    """Serves. Returns the reason if that fails."""
    origin = f"worker {start.identity.number}"
    set_up_logging(origin=origin)
    raise_descriptor_limit()
    link = WorkerLink(channel, start.identity)
    try:
        asked = share_limits(build_configuration(argparse.Namespace(**start.arguments)), start.identity.count)
        set_up_logging(asked.options.log_level, asked.options.log_format, origin)
        settings = asked.settings
        if settings.sharing is None:  # workers that share through a server need nothing else
            settings = replace(settings, sharing=share_directory(start.identity.directory))
        app = create_app(settings, worker=link)
        os.set_inheritable(start.listener, False)
        serve_worker(app, socket.socket(fileno=start.listener), asked.server, link)
    except ConfigError as error:
        return StartFailure(2, "\n".join(f"kvparams proxy: {each}" for each in error.problems))
    except KVParamsError as error:
        return StartFailure(2, f"kvparams: {error}")
    except Exception:  # noqa: BLE001  the supervisor reports it, once for all workers
        return StartFailure(1, traceback.format_exc())
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
