"""The routers that are measured: how each is started, and which requests its engines must see.

Every router gets the same two prefill and two decode engines. Peers come from `.venv-peers` (`make bench-peers`
installs them); their logs are reduced to warnings, while `kvparams proxy` writes a line for each request, its default.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from benchmarks import floor_relay, floor_starlette
from tests.support.processes import StartError, free_ports

__all__ = [
    "FLOORS",
    "OURS",
    "OURS_ALONE",
    "OURS_SGLANG",
    "PEERS",
    "Engines",
    "Legs",
    "Router",
    "everything_on",
    "floor",
    "ours",
    "ours_like_sglang",
    "peer",
    "peer_versions",
    "pinned",
]

OURS: Final = "kvparams"
OURS_SGLANG: Final = "kvparams sglang"
OURS_ALONE: Final = "kvparams one worker"
FLOORS: Final = ("floor", "floor starlette")
PEERS: Final = ("vllm-router", "sglang-router", "smg")
PEERS_ENVIRONMENT: Final = Path(__file__).parents[2] / ".venv-peers"
_BOOTSTRAP_PORTS: Final = (19100, 19101)
_AUDIENCE: Final = "bench"

Legs = Literal["none", "nixl", "bootstrap"]
"""What the engines must see of a request: one request without KV, or a prefill and a decode leg with it."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The ports of the stub engines."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    @property
    def ports(self) -> list[str]:
        """Returns options for programs that take ports."""
        return [*_options("--prefill", self.prefill), *_options("--decode", self.decode)]

    @property
    def urls(self) -> list[str]:
        """Returns options for routers that take URLs."""
        return [*_options("--prefill", map(_url, self.prefill)), *_options("--decode", map(_url, self.decode))]


@dataclass(frozen=True, slots=True)
class Router:
    """A router and the command that starts it."""

    name: str
    port: int
    command: tuple[str, ...]
    ready: tuple[str, ...]
    """URLs of which one answers 200 once it is ready."""
    legs: Legs
    header: str = ""
    """A line that each request's head needs, such as an API key."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    takes_token_ids: bool = True
    """Whether a prompt may be a list of token ids."""


def ours(engines: Engines, *options: str, header: str = "") -> Router:
    """Returns `kvparams proxy` as shipped, with further options."""
    return _ours(OURS, engines, "nixl", options, header)


def ours_with_one_worker(engines: Engines) -> Router:
    """Returns `kvparams proxy` as shipped, beside which more workers are measured."""
    return _ours(OURS_ALONE, engines, "nixl", (), "")


def ours_like_sglang(engines: Engines) -> Router:
    """Returns `kvparams proxy` with SGLang's protocol, in which both legs start at once, as in SGLang's routers."""
    # The stub answers what is asked of a bootstrap server, too.
    servers = [f"prefill-{number}={_url(port)}" for number, port in enumerate(engines.prefill)]
    options = ["--mode", "concurrent_legs", *_options("--bootstrap", servers)]
    return _ours(OURS_SGLANG, engines, "bootstrap", options, "")


def _ours(name: str, engines: Engines, legs: Legs, options: Sequence[str], header: str) -> Router:
    (port,) = free_ports(1)
    connector = "nixl" if legs == "nixl" else "sglang"
    command = (_beside("kvparams"), "proxy", "--port", str(port), *engines.urls, "--connector", connector, *options)
    command += ("--startup-check", "off")  # engines count requests, which are compared with what was sent
    return Router(name, port, command, (f"{_url(port)}/health",), legs, header)


def everything_on(engines: Engines, folder: Path) -> Router:
    """Returns `kvparams proxy` with client keys, limits, request log, continuation, signing and `cache_aware`."""
    keys, signing, token = folder / "client-keys.jsonl", folder / "signing-keys.json", folder / "admin-token"
    made = _kvparams("keys", "create", str(keys), "--tenant", "bench")
    (key,) = (word for word in made.split() if word.startswith("kvp"))
    _kvparams("signing-keys", "create", str(signing))
    token.write_text("bench-" * 8)
    token.chmod(0o600)
    options = [
        *(
            "--client-keys",
            str(keys),
            "--admin-token-file",
            str(token),
            "--log-requests",
            str(folder / "requests.jsonl"),
        ),
        *("--continuation", "--sign-with", str(signing), "--audience", _AUDIENCE),
        *("--prefill-requests", "512", "--decode-requests", "512", "--queue", "1024", "--queue-per-tenant", "512"),
        *("--policy", "cache_aware", "--tokenizer", "bytes"),
    ]
    return ours(engines, *options, header=f"authorization: Bearer {key}")


def floor(name: str, engines: Engines) -> Router:
    """Returns a relay that does nothing but both legs."""
    (port,) = free_ports(1)
    program = floor_relay if name == FLOORS[0] else floor_starlette
    command = (sys.executable, program.__file__, "--port", str(port), *engines.ports)
    return Router(name, port, command, (f"{_url(port)}/health",), "nixl")


def peer(name: str, engines: Engines, *, policy: str = "round_robin", threads: int | None = None) -> Router:
    """Returns another router of the field, from its wheel.

    Raises:
        StartError: it is not installed.
    """
    port, metrics_port = free_ports(2)
    bin_folder = PEERS_ENVIRONMENT / "bin"
    common = [
        *("--host", "127.0.0.1", "--port", str(port), "--policy", policy),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1"),
    ]
    legs: Legs = "bootstrap"
    if name == "vllm-router":
        start = [str(bin_folder / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        options = [*engines.urls, "--log-level", "warning", "--max-concurrent-requests", "2048"]
        legs = "nixl"
    else:
        prefill = zip(engines.prefill, _BOOTSTRAP_PORTS, strict=True)
        urls = [text for port, bootstrap in prefill for text in ("--prefill", _url(port), str(bootstrap))]
        options = [
            "--pd-disaggregation",
            *urls,
            *_options("--decode", map(_url, engines.decode)),
            "--log-level",
            "warn",
        ]
        start = [str(bin_folder / "smg"), "launch"]
        if name == "sglang-router":
            start = [str(bin_folder / "python"), "-m", "sglang_router.launch_router"]
    if not Path(start[0]).exists():
        raise StartError(f"{name} is not installed in {PEERS_ENVIRONMENT}: run `make install-peers`")
    environment = {} if threads is None else {"TOKIO_WORKER_THREADS": str(threads)}
    ready = (f"{_url(port)}/readiness",)
    command = (*start, *common, *options)
    return Router(name, port, command, ready, legs, environment=environment, takes_token_ids=legs == "nixl")


def pinned(router: Router, cores: Sequence[int]) -> Router:
    """Returns the same router, held to these cores."""
    program = f"import os, sys; os.sched_setaffinity(0, {list(cores)}); os.execv(sys.argv[1], sys.argv[1:])"
    command = (sys.executable, "-c", program, *router.command)
    return replace(router, command=command)


def peer_versions(names: Sequence[str]) -> dict[str, str]:
    """Returns the installed version of each peer; those that are not installed are left out."""
    found: dict[str, str] = {}
    for name in names:
        for folder in PEERS_ENVIRONMENT.glob(f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"):
            found[name] = folder.name.removesuffix(".dist-info").rpartition("-")[2]
    return found


def _kvparams(*arguments: str) -> str:
    return subprocess.run([_beside("kvparams"), *arguments], capture_output=True, text=True, check=True).stdout


def _beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _options(name: str, values: "Sequence[object] | map[str]") -> list[str]:
    return [text for value in values for text in (name, str(value))]
