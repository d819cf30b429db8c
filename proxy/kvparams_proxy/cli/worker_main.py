"""A worker process of `kvparams proxy --workers`, started by the supervisor.

It reads the configuration itself, so that secrets stand in no message and no command line, and a successor reads what
has changed.
"""

import argparse
import os
import socket
import sys
import traceback
from typing import Final

from kvparams.errors import KVParamsError
from kvparams_proxy.cli.configuration import build_configuration, share_limits
from kvparams_proxy.cli.proxy_command import prepare_process
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.worker_server import serve_worker
from kvparams_proxy.workers.channel import FrameKind, receive_frame
from kvparams_proxy.workers.parent_death import end_with_parent
from kvparams_proxy.workers.worker_link import WorkerLink
from kvparams_proxy.workers.worker_start import StartFailure, WorkerStart

__all__ = ["main"]

_COMMAND: Final = "proxy"


def main(descriptor: int) -> int:
    """Serves until the supervisor says otherwise; returns the exit status.

    Args:
        descriptor: the worker's end of the channel to the supervisor.
    """
    end_with_parent()
    channel = socket.socket(fileno=descriptor)
    frame = receive_frame(channel)
    if frame is None or frame.kind is not FrameKind.START:
        return 1
    start = WorkerStart.decode(frame.payload)
    for inherited in (descriptor, start.listener):
        os.set_inheritable(inherited, False)
    prepare_process(f"worker {start.identity.number}")
    link = WorkerLink(channel, start.identity)
    try:
        asked = share_limits(build_configuration(argparse.Namespace(**start.arguments)), start.identity.count)
        app = create_app(asked.settings, worker=link)
        serve_worker(app, socket.socket(fileno=start.listener), asked.server, link)
    except ConfigError as error:
        return link.fail(StartFailure(2, "\n".join(f"kvparams {_COMMAND}: {each}" for each in error.problems)))
    except KVParamsError as error:
        return link.fail(StartFailure(2, f"kvparams: {error}"))
    except Exception:  # noqa: BLE001  the supervisor shows it, once for all workers that fail alike
        return link.fail(StartFailure(1, traceback.format_exc()))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
