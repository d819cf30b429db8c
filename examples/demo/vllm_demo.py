"""The demo with real vLLM engines: KV that one computed is used by another, and the tokens are those of one alone.

The engines are unpatched releases of vLLM, and all counts are vLLM's own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from demo.client import JSON
from demo.control import damage_unchecked, damage_verified, not_handed_over
from demo.conversations import Fleet
from demo.counts import VLLM
from demo.display import Display
from demo.processes import ProcessError, Processes, Server
from demo.stores import KINDS, start_store
from demo.vllm_engines import (
    ENGINE_BYTES,
    MODEL,
    Transfer,
    free_bytes,
    make_model,
    nixl_transfer,
    start_vllm,
    store_transfer,
)
from kvparams_connectors.store_url import redact_url

__all__ = ["NIXL", "Started", "run_controls", "start_vllm_fleet"]

NIXL: Final = "nixl"
"""In the place of a store: the engines move KV between them, with vLLM's own NixlConnector."""
_GREEDY: Final[JSON] = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 32, "min_tokens": 0}
_MORE: Final[JSON] = {**_GREEDY, "return_token_ids": True}
"""Answers are compared by their token ids."""
_ROOMY_BYTES: Final = 8 << 30
"""For five engines, and what else a machine does."""
_READY_S: Final = 600.0
"""On two cores five engines take a minute to start, on a busy machine several."""
_PATIENCE_S: Final = 15.0


class Started(NamedTuple):
    """A `Started` holds the processes that were started."""

    fleet: Fleet
    store: str | None
    """The URL of the store; None: the engines move KV between them."""
    careless: Server | None
    """A decode engine that uses what the store gives as it is. It stores nothing, so it harms nobody."""


def start_vllm_fleet(
    processes: Processes,
    directory: Path,
    wanted: str,
    port: int | None,
    display: Display,
    each: int | None = None,
    *,
    controls: bool = True,
    proxy_flags: Sequence[str] = (),
) -> Started:
    """Make the model, start everything and wait until it is ready.

    Args:
        processes: what is started belongs to it.
        directory: takes files.
        wanted: `NIXL`, one of `KINDS`, or the URL of a store.
        port: the proxy's; None is a free one.
        display: shows how it goes.
        each: engines of each role; None is as many as memory allows, one or two.
        controls: start what `run_controls` needs, too.
        proxy_flags: further flags of the proxy.

    Raises:
        ProcessError: something is not installed, does not fit, ended, or was not ready in time.
    """
    display.step("making a tiny model with random weights: answers mean nothing, but depend on every token")
    model = make_model(directory / "model")
    free = free_bytes()
    moving = wanted == NIXL
    least = 3 if moving or not controls else 4
    if free < least * ENGINE_BYTES:
        raise ProcessError(
            f"{free >> 20} MiB of memory are free; {least} vLLM engines need {least * ENGINE_BYTES >> 20}"
        )
    each = each or (2 if free >= _ROOMY_BYTES else 1)
    store = wanted if wanted not in KINDS else start_store(wanted, processes, directory)
    display.step(
        f"starting {each} prefill and {each} decode vLLM engines and 1 that does all the work; "
        f"KV by {redact_url(store)}"
    )

    def transfer(name: str, role: str) -> Transfer:
        return nixl_transfer(name, role) if moving else store_transfer(name, role, store)

    prefill = tuple(
        start_vllm(processes, f"p{at}", model, transfer(f"p{at}", "kv_producer"), core=0) for at in range(each)
    )
    decode = tuple(
        start_vllm(processes, f"d{at}", model, transfer(f"d{at}", "kv_consumer"), core=1) for at in range(each)
    )
    single = start_vllm(processes, "single", model, core=1)
    careless = None
    if controls and not moving:
        unchecked = store_transfer("careless", "kv_consumer", store, verify=False)
        careless = start_vllm(processes, "careless", model, unchecked, core=0)
    _wait(processes, (*prefill, *decode, single, *([careless] if careless else [])), display)
    proxy = processes.proxy(prefill, decode, *proxy_flags, connector=NIXL if moving else "store", port=port)
    processes.wait_ready(proxy)
    display.step(f"{proxy.name} is ready at {proxy.url}")
    fleet = Fleet(prefill, decode, single, proxy, VLLM, _MORE)
    return Started(fleet, None if moving else store, careless)


async def run_controls(client: httpx.AsyncClient, started: Started, display: Display) -> None:
    """Show that what was proved can be disproved: a prompt that nobody hands over, and stored KV that is damaged."""
    fleet, store, careless = started
    prefill, decode = fleet.prefill[0], fleet.decode[-1]
    display.step("negative control: decode is asked without a prefill engine")
    await not_handed_over(client, decode, display, counts=VLLM, more=_MORE)
    if store is None or careless is None:
        return
    display.step("negative control: one stored byte is flipped between prefill and decode")
    await damage_verified(client, prefill, decode, fleet.single, store, display, counts=VLLM, more=_MORE)
    await damage_unchecked(client, prefill, careless, fleet.single, store, display, counts=VLLM, more=_MORE)


def _wait(processes: Processes, servers: tuple[Server, ...], display: Display) -> None:
    """Until all are ready, saying now and then who is not."""
    waiting = list(servers)
    until_s = display.elapsed_s + _READY_S
    while waiting:
        server = waiting[0]
        try:
            processes.wait_ready(server, within_s=_PATIENCE_S)
        except ProcessError:
            if server.process.poll() is not None or display.elapsed_s > until_s:
                raise
            display.step(f"still starting: {', '.join(one.name for one in waiting)}")
            continue
        waiting.remove(server)
        display.step(f"{server.name} is ready at {server.url}")
