"""Runs a supervisor whose workers serve nothing. Tests start it as a program.

    python -m tests.support.proxy.supervised FOLDER WORKERS

FOLDER/behavior says what a worker does that starts: `serve`, `crash`, `fail` (it says why), `stay` (it serves and never
ends before its supervisor), `leave` (likewise, and only the channel tells it of that end), `bound` (only the kernel
does), or `orphan` (nothing does). FOLDER/events gets a line for each thing that workers live to see. FOLDER/check says
whether the configuration is right at a reload.
"""

import asyncio
import logging
import sys
from pathlib import Path

from kvparams_proxy.service_notifier import ServiceNotifier
from kvparams_proxy.workers import supervisor
from kvparams_proxy.workers.listeners import WorkerListeners
from kvparams_proxy.workers.supervisor import ShutdownTimes, Supervisor, WorkerPlan

__all__ = ["main"]

TIMES = ShutdownTimes(0.1, 0.2)


def main(folder: Path, workers: int) -> int:
    """Runs the supervisor, and says on stdout when it serves and why it has ended."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    supervisor._END_S = 0.5  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    async def serving() -> None:
        print("serving", flush=True)

    with WorkerListeners.open("127.0.0.1", 0, workers, 8) as listeners:
        plan = WorkerPlan(
            workers=workers,
            command=[sys.executable, "-m", "tests.support.proxy.supervised_worker"],
            arguments={"folder": str(folder)},
            directory=folder,
            times=TIMES,
            check=lambda: TIMES if (folder / "check").read_text() == "right" else None,
            on_serving=serving,
            on_stopping=ServiceNotifier(None).stopping,
        )
        end = asyncio.run(Supervisor(plan, listeners).run())
    print("told" if end.signal else "gave up", end.signal.name if end.signal else end.message, flush=True)
    return end.status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
