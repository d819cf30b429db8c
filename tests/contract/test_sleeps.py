"""Checks that tests wait for conditions, with `tests.support.waiting`, and that each sleep elsewhere has its reason.

A sleep is too short on a slow machine and too long on a fast one. What is left models the time that something takes:
the work of a scripted engine, the pause of a client, the length of a fault, the pace of a load.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[1]
HELPERS: Final = "support/waiting.py"
MODULES: Final = ("anyio", "asyncio", "time", "trio")
IN_TEXT: Final = re.compile(rf"\b(?:{'|'.join(MODULES)})\.sleep\((?!0\))")
"""In the source of a child process."""

ENGINE: Final = "a scripted engine takes this time, or sends its pieces this far apart"
CLIENT: Final = "a client or its network is slow"
FAULT: Final = "the length of a fault, or of a fault-free time between two"
MOMENT: Final = "a random or given moment, in whatever state the code under test is then"
PACE: Final = "the pace of a load or of a sampler"
BLOCKS: Final = "the event loop is blocked on purpose: that is the fault under test"
CHILD: Final = "a child process that only waits to be ended; the bound ends it when its test was killed"
VIRTUAL: Final = "it runs on the virtual clock and takes no time"

ALLOWED: Final[dict[str, tuple[int, str]]] = {
    "interop/connectors/lmcache_mp_faults.py": (1, MOMENT),
    "interop/connectors/test_mooncake_faults.py": (1, PACE),
    "interop/connectors/test_peer_mooncake.py": (1, MOMENT),
    "interop/vllm/calm_ranks/sitecustomize.py": (1, "it replaces `sched_yield` in an engine's processes"),
    "system/conformance/test_bad_proxies.py": (5, "programs that do nothing for ever, as proxies under test"),
    "system/conformance/test_killed_runs.py": (2, "a store and its process that do nothing for ever"),
    "system/conformance/test_readers.py": (3, "programs that do nothing for ever, as readers under test"),
    "support/connectors/stopping.py": (1, PACE),
    "support/connectors/valkey_relay.py": (2, CLIENT),
    "support/kubernetes/api_server.py": (3, PACE),
    "support/kubernetes/simulated_api.py": (2, VIRTUAL),
    "support/proxy/acting.py": (2, ENGINE),
    "support/proxy/lively_load.py": (1, PACE),
    "support/proxy/load.py": (1, PACE),
    "system/adversary/background.py": (1, PACE),
    "system/adversary/clients.py": (1, CLIENT),
    "system/adversary/lifecycle_cases.py": (2, CLIENT),
    "system/adversary/test_adversary.py": (1, PACE),
    "system/benchmarks/test_load_generator.py": (2, f"{MOMENT}; {FAULT}"),
    "system/chaos/backings.py": (3, FAULT),
    "system/chaos/cluster.py": (1, FAULT),
    "system/chaos/cutting.py": (1, "what was written must be read before the reset that follows; no event tells of it"),
    "system/chaos/holder.py": (1, CHILD),
    "system/chaos/test_abort_latency.py": (1, MOMENT),
    "system/chaos/test_aborts.py": (1, MOMENT),
    "system/chaos/test_chaos.py": (4, f"{FAULT}; {PACE}"),
    "system/proxy/config/test_continued_streams.py": (1, ENGINE),
    "system/proxy/config/test_shutdown.py": (1, ENGINE),
    "system/proxy/execution/test_long_answers.py": (1, MOMENT),
    "system/proxy/execution/test_privacy.py": (1, ENGINE),
    "system/proxy/fleet/test_kv_events.py": (1, BLOCKS),
    "system/proxy/requests/test_long_bodies.py": (1, MOMENT),
    "system/proxy/server/test_leaving.py": (2, f"{ENGINE}; {MOMENT}"),
    "system/proxy/test_stream_deadlines.py": (4, f"{ENGINE}; {CLIENT}"),
    "system/proxy/test_stream_end.py": (1, ENGINE),
    "system/proxy/upstream/test_loop_clock.py": (4, f"{BLOCKS}; {ENGINE}"),
    "system/proxy/upstream/test_probes.py": (1, ENGINE),
    "system/proxy/workers/test_rolling_restart.py": (1, PACE),
    "system/proxy/workers/test_workers.py": (1, PACE),
    "system/queue/test_lost.py": (2, ENGINE),
    "system/reference_engine/test_processes.py": (3, CHILD),
    "system/sidecar/test_inprocess.py": (2, ENGINE),
    "system/simulation/test_virtual_loop.py": (1, VIRTUAL),
    "system/simulation/wire.py": (1, VIRTUAL),
    "unit/proxy/discovery/test_random_histories.py": (1, VIRTUAL),
    "unit/proxy/ui/test_snapshot_feed.py": (9, VIRTUAL),
    "unit/proxy/workers/test_part_coordinator.py": (1, VIRTUAL),
}
"""How many sleeps a file has, and why. A sleep of 0 seconds is a turn of the event loop, and is not counted."""


def sleeps(source: str) -> Iterator[int]:
    """Yields the line of each sleep: called, passed on, by another name, or in the source of a child process."""
    tree = ast.parse(source)
    modules, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name for each in node.names if each.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names |= {each.asname or each.name for each in node.names if each.name == "sleep"}

    def is_sleep(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "sleep" and isinstance(node.value, ast.Name) and node.value.id in modules
        return isinstance(node, ast.Name) and node.id in names

    turns = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and [ast.unparse(each) for each in node.args] == ["0"]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and is_sleep(node) and id(node) not in turns:
            yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for _ in IN_TEXT.finditer(node.value):
                yield node.lineno


def test_every_sleep_has_its_reason() -> None:
    found: dict[str, list[int]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        name, source = str(path.relative_to(TESTS)), path.read_text()
        if name in (HELPERS, "contract/test_sleeps.py") or "sleep" not in source:
            continue
        if lines := list(sleeps(source)):
            found[name] = lines
    assert len(found) > 20, "the check reads no files"
    wrong = [
        f"tests/{name} sleeps in lines {lines}, and {allowed} are allowed: wait for a condition with tests/{HELPERS}"
        for name, lines in found.items()
        if len(lines) > (allowed := ALLOWED.get(name, (0, ""))[0])
    ]
    wrong += [
        f"tests/{name} has {len(found.get(name, ()))} sleeps, and {count} are allowed: lower the count in ALLOWED"
        for name, (count, _) in ALLOWED.items()
        if len(found.get(name, ())) < count
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import asyncio\nasync def f() -> None:\n    await asyncio.sleep(0.01)",
        "import asyncio as loop\nasync def f() -> None:\n    await loop.sleep(1)",
        "from time import sleep\nsleep(PAUSE_S)",
        "from asyncio import sleep as pause\nasync def f() -> None:\n    await pause(1)",
        "import time\nloop.call_soon(time.sleep, 1)",
        "import time\ntime.sleep(0.0)",
        "code = 'import time; time.sleep(600)'",
        "code = f'import time; time.sleep({seconds})'",
    ],
)
def test_the_check_sees_a_sleep_however_it_is_written(source: str) -> None:
    """The control."""
    assert len(list(sleeps(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def f() -> None:\n    await asyncio.sleep(0)",
        "from time import monotonic\nmonotonic()",
        "engine.sleep(1)",
        "from engine import sleep\nsleep(1)",
        "'''It does not sleep.'''",
    ],
)
def test_the_check_takes_nothing_else_for_a_sleep(source: str) -> None:
    assert list(sleeps(source)) == []
