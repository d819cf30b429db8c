"""Measures the CPU that following a Kubernetes API costs: many pods, and many changes each second.

    python -m benchmarks.discovery_bench            1,000 pods, 100 changes a second, 20 seconds

The API server is a process of its own; what is measured is the provider, the registry and the fleet.
The exit status is 1 if they take more than 5 % of a core.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from kvparams.instances import Role, RoundRobin
from kvparams_proxy.config.discovery_url import KubernetesSource
from kvparams_proxy.discovery.kubernetes_api import KubernetesAPI
from kvparams_proxy.discovery.kubernetes_provider import KubernetesProvider
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.fleet.registry.registry import Registry
from tests.support.kubernetes.api_server import FakeAPIServer

__all__ = ["main"]

_BAR: Final = 0.05
_WARM_UP_S: Final = 3.0
_SPARES: Final = 16
"""Labels and annotations that pods have besides, as real ones do."""


def _put(api: FakeAPIServer, number: int, is_ready: bool) -> None:
    labels = {"app": "vllm", "kvparams.io/role": "prefill" if number % 2 else "decode"}
    labels |= {f"example.com/label-{spare}": "some-value" for spare in range(_SPARES)}
    annotations = {f"example.com/annotation-{spare}": "x" * 100 for spare in range(_SPARES)}
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    status = {"podIP": address, "phase": "Running", "conditions": [ready]}
    api.pods.put(f"pod-{number}", labels, metadata={"annotations": annotations}, status=status)


async def _serve(pods: int, changes: int, parent: Connection) -> None:
    api = FakeAPIServer()
    for number in range(pods):
        _put(api, number, is_ready=True)
    async with api.running():
        parent.send(api.port)
        started_s, done = time.monotonic(), 0
        while not parent.poll():
            due = int((time.monotonic() - started_s) * changes)
            while done < due:
                _put(api, done % pods, is_ready=bool(done // pods % 2))
                done += 1
            await asyncio.sleep(0.01)


def _server(pods: int, changes: int, parent: Connection) -> None:
    asyncio.run(_serve(pods, changes, parent))


async def _follow(pods: int, seconds: float) -> float:
    """Returns the share of a core that following takes."""
    loop = asyncio.get_running_loop()
    rules = SpecRules(frozenset(("nixl",)))
    registry = Registry(Fleet((), {role: RoundRobin() for role in Role}, loop.time, loop.call_later), rules)
    source = KubernetesSource("app=vllm")
    provider = KubernetesProvider(source, KubernetesAPI(source.resource, source.selector), rules)
    task = asyncio.create_task(provider.watch(registry))
    await asyncio.sleep(_WARM_UP_S)
    assert len(registry.owned) == pods, len(registry.owned)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
    task.cancel()
    await asyncio.wait([task])
    return share


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.discovery_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=100, help="a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # a thousand lines, each of a change
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_server, args=(given.pods, given.changes, theirs))
    server.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            api = FakeAPIServer()
            api.port = ours.recv()
            os.environ["KUBECONFIG"] = str(api.write_kubeconfig(Path(folder) / "kubeconfig"))
            share = asyncio.run(_follow(given.pods, given.seconds))
    finally:
        ours.send("end")
        server.join(5.0)
        server.terminate()
    print(json.dumps({"pods": given.pods, "changes_per_s": given.changes, "core": round(share, 4), "bar": _BAR}))
    return 1 if share > _BAR else 0


if __name__ == "__main__":
    sys.exit(main())
