"""An external bench rig: where its parts are and how they are driven.

No part of the rig is copied here. This module relies only on its outside: `bench.py` (`--list`, `--inter` with one JSON
row per line), the `mock` engines with `/set` and `/stats`, the `load` generator with its JSON line, request bodies
under `bodies/`, and `extra/*.json` in its home, by which a router joins.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from benchmarks.load_process import Ask
from tests.support.processes import StartError, http_get

__all__ = [
    "DECODE_PORTS",
    "ENGINE_PORTS",
    "OTHER",
    "OURS",
    "OUR_PORT",
    "PREFILL_PORTS",
    "SCENARIOS",
    "Counted",
    "Rig",
    "RigScenario",
    "Router",
    "name_of",
]

OURS = "ours-pd"
OTHER = "ours-other"
"""This project's proxy once more, with other options."""
OUR_PORT = 18299
PREFILL_PORTS = (18100, 18101)
DECODE_PORTS = (18102, 18103)
ENGINE_PORTS = PREFILL_PORTS + DECODE_PORTS
_STATS_URL = f"http://127.0.0.1:{PREFILL_PORTS[0]}"
_QUIET_S = 0.3
_SETTLE_S = 10.0
_NAMES = {OURS: "kvparams proxy", OTHER: "the same otherwise", "vr-pd-rr": "vllm-router 0.1.17", "direct": "no router"}


def name_of(router: str) -> str:
    """Returns the name of a router of the rig in a report."""
    return _NAMES.get(router, router)


@dataclass(frozen=True, slots=True)
class RigScenario:
    """A scenario of the rig, as its own table has it."""

    body: str
    events: int | None
    itl_us: int = 0


SCENARIOS = {
    "ns-s-64": RigScenario("comp_s_ns_16", None),
    "ns-l-64": RigScenario("comp_l_ns_16", None),
    "ids-l-64": RigScenario("ids_l_ns_16", None),
    "stb-s-64": RigScenario("comp_s_st_64", 65),
    "st-s-64": RigScenario("comp_s_st_64", 65, itl_us=20_000),
}


@dataclass(frozen=True, slots=True)
class Router:
    """A router as the rig starts it."""

    name: str
    command: tuple[str, ...]
    port: int
    ready: tuple[str, ...]
    """URLs of which one answers 200 once it is ready, the surest first."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A `Counted` holds the engines' counts."""

    prefill_requests: int
    decode_requests: int
    prefills: int
    """Of all requests, those that carried what makes a prefill leg."""
    decodes_with_kv: int
    """Of all requests, those that carried what makes a decode leg with KV."""

    def problem(self, answered: int, in_flight: int, *, plain: bool = False) -> str | None:
        """Returns the fault of the counts after `answered` answers and at most `in_flight` cut-off requests, or None.

        `plain` has one leg for each request, without KV params.
        """
        if plain:
            if self.prefills or self.decodes_with_kv:
                return f"{self.prefills + self.decodes_with_kv} legs with KV params"
            legs = self.prefill_requests + self.decode_requests
            return None if answered <= legs <= answered + in_flight else f"{legs} legs for {answered} requests"
        if self.prefill_requests != self.prefills:
            return f"{self.prefill_requests - self.prefills} prefill legs without KV params"
        if self.decode_requests != self.decodes_with_kv:
            return f"{self.decode_requests - self.decodes_with_kv} decode legs without KV params"
        for name, legs in (("prefill", self.prefills), ("decode", self.decodes_with_kv)):
            if not answered <= legs <= answered + in_flight:
                return f"{legs} {name} legs for {answered} requests"
        return None


class _EngineStats(TypedDict):
    reqs: int
    prefill: int
    decode_kv: int


class Rig:
    """The rig in `directory`, set up in `home`."""

    def __init__(self, directory: Path, home: Path) -> None:
        self.directory = directory.resolve()
        self.home = home.resolve()
        self.environment = {"KVBENCH_HOME": str(self.home)}
        for needed in (self.directory / "bench.py", self.directory / "bodies", self.home / "mock", self.home / "load"):
            if not needed.exists():
                raise StartError(f"{needed} is missing: is the rig there, and was its setup run?")

    def bench(self, *options: str) -> list[str]:
        """The command that runs its `bench.py`."""
        return [sys.executable, str(self.directory / "bench.py"), *options]

    @property
    def mock(self) -> list[str]:
        """The command that plays the engines."""
        prefill = [option for port in PREFILL_PORTS for option in ("-p", str(port))]
        return [str(self.home / "mock"), *prefill, *map(str, DECODE_PORTS)]

    @property
    def mock_ready(self) -> str:
        """Answers 200 once the engines listen."""
        return f"{_STATS_URL}/stats"

    @contextmanager
    def with_ours(
        self, options: Sequence[str] = (), other: Sequence[str] | None = None, *, plain: bool = False
    ) -> Generator[None]:
        """Within the block, the rig knows this project's proxy as `ours-pd`, started with these further options.

        Args:
            options: of the command line.
            other: if there are any, those of another proxy before the same engines, `ours-other`.
            plain: all engines are aggregated ones, so that a request has one leg.
        """
        roles = ("--aggregated",) * 4 if plain else ("--prefill", "--prefill", "--decode", "--decode")
        engines = zip(roles, ENGINE_PORTS, strict=True)
        urls = [text for role, port in engines for text in (role, f"http://127.0.0.1:{port}")]
        kvparams = str(Path(sys.executable).with_name("kvparams"))
        start = [*urls, *(["--mode", "aggregated"] if plain else ["--connector", "nixl"])]
        entries: dict[str, object] = {}
        for name, port, more in ((OURS, OUR_PORT, options), (OTHER, OUR_PORT + 1, other)):
            if more is not None:
                command = [kvparams, "proxy", "--port", str(port), *start, *more]
                entries[name] = {"port": port, "ready": "/health", "env": {}, "cmd": command}
        path = self.home / "extra" / "ours.json"
        previous = path.read_text() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(entries))
        try:
            yield
        finally:
            if previous is None:
                path.unlink()
            else:
                path.write_text(previous)

    def router(self, name: str) -> Router:
        """Returns the command by which the rig starts this router, or raises StartError if the rig does not know it."""
        listing = subprocess.run(
            self.bench("--list"), env=self.environment, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        commands = dict(line.split(" ", 1) for line in listing.splitlines() if " " in line)
        if name not in commands:
            raise StartError(f"the rig knows no router {name}; it has {', '.join(commands)}")
        command = tuple(shlex.split(commands[name]))
        port = int(command[command.index("--port") + 1])
        paths = ("/health",) if name in (OURS, OTHER) else ("/readiness", "/health")
        return Router(name, command, port, tuple(f"http://127.0.0.1:{port}{path}" for path in paths))

    def ask(self, scenario: str) -> Ask:
        """Returns the request of a scenario."""
        found = SCENARIOS[scenario]
        return Ask(self.directory / "bodies" / f"{found.body}.json", events=found.events)

    def prepare(self, scenario: str) -> None:
        """Set the engines' pace for a scenario and their counters to zero."""
        http_get(f"{_STATS_URL}/set?itl_us={SCENARIOS[scenario].itl_us}&ttft_us=0&prefill_us=0")

    def counted(self) -> Counted:
        """Returns the engines' counts since then."""
        stats = cast("dict[str, _EngineStats]", json.loads(http_get(f"{_STATS_URL}/stats")[1]))
        engines = {int(port): engine for port, engine in stats.items()}
        return Counted(
            prefill_requests=sum(engines[port]["reqs"] for port in PREFILL_PORTS),
            decode_requests=sum(engines[port]["reqs"] for port in DECODE_PORTS),
            prefills=sum(engine["prefill"] for engine in engines.values()),
            decodes_with_kv=sum(engine["decode_kv"] for engine in engines.values()),
        )

    def settle(self) -> None:
        """Wait until the engines see nothing more of a run that was cut off. Raises StartError if that takes long."""
        deadline_s = time.monotonic() + _SETTLE_S
        before, now = None, self.counted()
        while before != now:
            if time.monotonic() > deadline_s:
                raise StartError(
                    f"requests still reach the engines {_SETTLE_S:.0f} s after a run: is somebody else here?"
                )
            time.sleep(_QUIET_S)
            before, now = now, self.counted()

    def capacity_per_s(self, port: int, scenario: str, *, concurrency: int, limit_s: float) -> float:
        """Answers per second of a closed loop, by the rig's own generator, which cuts it off at `limit_s`."""
        ask = self.ask(scenario)
        stream: Sequence[str] = () if ask.events is None else ("-s", "-e", str(ask.events))
        command = [str(self.home / "load"), str(port), ask.path, str(ask.body), str(concurrency), "1000000"]
        done = subprocess.run(
            [*command, "-t", str(limit_s), *stream], capture_output=True, text=True, check=True, timeout=limit_s + 30
        )
        row = json.loads(done.stdout)
        if row["errors"] or row["bad"]:
            raise StartError(f"port {port}, {scenario}: wrong answers: {row['err']}")
        self.settle()
        return float(row["rps"])
