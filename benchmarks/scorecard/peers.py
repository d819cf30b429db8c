"""The proxies of the scorecard: where each comes from, its profile, and the command that starts it."""

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["NOT_SCORED", "ROOT", "Peer", "find_peers"]

ROOT: Final = Path(__file__).parents[2]
_PEERS: Final = ROOT / ".venv-peers"
_SOURCES: Final = _PEERS / "sources"
_LMCACHE: Final = ROOT / ".venv-lmcache"
_VLLM: Final = "0.32.0"
_ENGINES: Final = "--prefill {prefill0} --prefill {prefill1} --decode {decode0} --decode {decode1}"
_ROUTER: Final = (
    "--host 127.0.0.1 --port {port} --policy round_robin --worker-startup-check-interval 1 "
    "--prometheus-host 127.0.0.1 --prometheus-port {spare_port}"
)
_BOOTSTRAP_ENGINES: Final = (
    "--pd-disaggregation --prefill {prefill0} {prefill0_port} --prefill {prefill1} {prefill1_port} "
    "--decode {decode0} --decode {decode1} --log-level warn"
)
_TOY: Final = (
    "--host 127.0.0.1 --port {port} --prefiller-hosts 127.0.0.1 127.0.0.1 --prefiller-ports {prefill0_port} "
    "{prefill1_port} --decoder-hosts 127.0.0.1 127.0.0.1 --decoder-ports {decode0_port} {decode1_port}"
)

NOT_SCORED: Final = (
    (
        "production-stack's router",
        "PyPI does not have it. `production-stack`, `vllm-production-stack` and `vllm-stack-router` were asked for and "
        "do not exist; `vllm-router` there is the Rust router above, from its first release (0.1.9) on",
    ),
    (
        "LMCache's `disagg_prefill/disagg_proxy_server.py`",
        "the source archive of PyPI `lmcache` 0.5.6 has it. It speaks `disagg_spec` of LMCache's PD backend, for which "
        "the kit has no profile, and sends no decode leg before a prefill engine has reported over ZeroMQ, which the "
        "kit's engines do not",
    ),
    ("vLLM's `disagg_proxy_demo.py`", "it needs `uvloop`, which the environment of the scorecard does not have"),
    ("vLLM's MoRIIO and Mooncake example proxies", "they speak dialects for which the kit has no profile"),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One proxy."""

    name: str
    version: str
    origin: str
    profile: str
    command: str
    shown: str
    """The command as the page shows it, without paths of this machine."""


def find_peers() -> list[Peer]:
    """Returns the proxies that are installed, this project's first."""
    makers: Sequence[Callable[[], Peer | None]] = (
        lambda: _ours("nixl-proxy", f"--connector nixl {_ENGINES}"),
        lambda: _ours(
            "bootstrap-proxy",
            "--connector sglang --mode concurrent_legs --bootstrap prefill-0={prefill0} "
            f"--bootstrap prefill-1={{prefill1}} {_ENGINES}",
        ),
        _vllm_router,
        _toy_proxy,
        _mooncake_proxy,
        lambda: _ours("content-proxy", f"--connector content {_ENGINES}"),
        _lmcache_proxy,
        lambda: _bootstrap_router("sglang-router", "python -m sglang_router.launch_router"),
        lambda: _bootstrap_router("smg", "smg launch"),
    )
    return [peer for make in makers if (peer := make()) is not None]


def _ours(profile: str, options: str) -> Peer:
    program = str(Path(sys.executable).with_name("kvparams"))
    command = f"kvparams proxy --port {{port}} --log-requests off {options}"
    version = importlib.metadata.version("kvparams")
    return Peer("kvparams", version, "this repository", profile, command.replace("kvparams", program, 1), command)


def _vllm_router() -> Peer | None:
    command = f"vllm-router --vllm-pd-disaggregation --kv-connector nixl {_ROUTER} {_ENGINES} --log-level warning"
    return _installed("vllm-router", "nixl-proxy", command)


def _bootstrap_router(name: str, start: str) -> Peer | None:
    return _installed(name, "bootstrap-proxy", f"{start} {_ROUTER} {_BOOTSTRAP_ENGINES}")


def _installed(name: str, profile: str, command: str) -> Peer | None:
    found = _version(_PEERS, name)
    return found and Peer(name, found, f"PyPI `{name}`", profile, f"{_PEERS}/bin/{command}", command)  # pyright: ignore[reportReturnType]


def _toy_proxy() -> Peer | None:
    for path in sorted(_SOURCES.rglob("toy_proxy_server.py")):
        if "nixl_integration" in path.parts:
            command = f"python {path.name} {_TOY}"
            started = f"{_PEERS}/bin/python {path} {_TOY}"
            origin = f"PyPI `vllm`, source archive, `tests/v1/kv_connector/nixl_integration/{path.name}`"
            return Peer("vLLM toy_proxy_server", _VLLM, origin, "nixl-proxy", started, command)
    return None


def _mooncake_proxy() -> Peer | None:
    for folder in sorted(ROOT.glob(".venv*/lib/python3*/site-packages/mooncake/vllm_v1_proxy_server.py")):
        environment = folder.parents[4]
        found = _version(environment, "mooncake_transfer_engine_non_cuda")
        if found is not None:
            command = f"python -m mooncake.{folder.stem} {_TOY}".replace("-hosts", "-host").replace("-ports", "-port")
            started = command.replace(f"python -m mooncake.{folder.stem}", f"{_PEERS}/bin/python {folder}")
            origin = "PyPI `mooncake-transfer-engine-non-cuda`"
            return Peer("mooncake vllm_v1_proxy_server", found, origin, "nixl-proxy", started, command)
    return None


def _lmcache_proxy() -> Peer | None:
    """LMCache's proxy for its server of several processes; telemetry_relay.py stands for that server's reports."""
    found = _version(_LMCACHE, "lmcache")
    for path in sorted(_SOURCES.rglob("disagg_prefill_mp/disagg_proxy_server.py")) if found else ():
        ports = "--prefiller-port RELAY0,RELAY1 --decoder-port {decode0_port},{decode1_port} --telemetry-port TELEMETRY"
        options = f"--host 127.0.0.1 --port {{port}} --prefiller-host 127.0.0.1 --decoder-host 127.0.0.1 {ports}"
        relay = "python -m benchmarks.scorecard.telemetry_relay"
        started = f"{sys.executable} {relay.removeprefix('python ')} {_LMCACHE}/bin/python {path} {options}"
        origin = f"PyPI `lmcache`, source archive, `examples/disagg_prefill_mp/{path.name}`"
        shown = f"{relay} python {path.name} {options}"
        return Peer("LMCache disagg_proxy_server", str(found), origin, "content-proxy", started, shown)
    return None


def _version(environment: Path, name: str) -> str | None:
    folders = environment.glob(f"lib/python3*/site-packages/{name.replace('-', '_')}-*.dist-info")
    return next((folder.name.removesuffix(".dist-info").rpartition("-")[2] for folder in folders), None)
