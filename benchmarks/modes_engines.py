"""The engines for `modes_bench`: reference engines, or real vLLM ones of the tests.

Every way has the same engines, except where a connector does not support it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from demo.processes import Processes, Server

__all__ = ["MODEL", "Engines", "reference", "vllm"]

MODEL: Final = "tiny"
"""What vLLM's is called."""
_READY_S: Final = 600.0


class Engines(NamedTuple):
    """Ready."""

    servers: Mapping[str, Server]
    """`P`, `D` and `A`, which does both; and whoever meets otherwise."""
    meeting: tuple[str, ...]
    """Of the proxy's arguments, those for engines that run both legs at once; `@NAME` is one's URL."""
    meeting_by: str
    """How, where not through the same connector."""
    split: Mapping[str, Server]
    """Engines that split requests themselves, by the name of the way."""


def reference(processes: Processes, store: str, step_ms: int) -> Engines:
    """Reference engines whose steps take at least so long."""
    steps = ("--step-ms", str(step_ms))
    engines = {
        "P": processes.engine("p0", "prefill", store, *steps),
        "D": processes.engine("d0", "decode", store, *steps),
        "A": processes.engine("a0", "both", store, *steps),
    }
    processes.wait_ready(*engines.values())
    split = {
        "middleware on prefill's side": processes.engine("p1", "prefill", store, *steps, "--remote", engines["D"].url),
        "middleware on decode's side": processes.engine("d1", "decode", store, *steps, "--remote", engines["P"].url),
    }
    processes.wait_ready(*split.values())
    return Engines(engines, ("--connector", "store-meet", "--prefill", "@P", "--decode", "@D"), "", split)


def vllm(processes: Processes, folder: Path, store: str) -> Engines:
    """Starts stock vLLM with the connector; ways that run both legs at once have vLLM's MooncakeConnector.

    Prompts are never found in an engine's own cache, and an engine may load another one's saved KV.
    """
    from tests.interop.vllm.engines import start_engine, transfer_config
    from tests.interop.vllm.own_connectors import mooncake
    from tests.interop.vllm.tiny_model import make_model

    model = make_model(folder / "model")
    engines: dict[str, Server] = {}
    for name, role, core in (("P", "kv_producer", 0), ("D", "kv_consumer", 1), ("A", None, 1)):
        transfer = transfer_config(store, role=role, engine_id=name) if role else None
        engines[name] = start_engine(processes, name, model, transfer=transfer, core=core)
    sides = {name: mooncake(name, role) for name, role in (("MP", "kv_producer"), ("MD", "kv_consumer"))}
    for core, (name, own) in enumerate(sides.items()):
        engines[name] = start_engine(
            processes, name, model, transfer=own.transfer, environment=own.environment, core=core
        )
    processes.wait_ready(*engines.values(), within_s=_READY_S)
    meeting = ("--connector", "mooncake", "--prefill", f"MP={engines['MP'].url}", "--decode", f"MD={engines['MD'].url}")
    return Engines(engines, (*meeting, "--bootstrap", f"MP={sides['MP'].bootstrap}"), " (MooncakeConnector)", {})
