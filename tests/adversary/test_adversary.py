"""A proxy among engines and clients that do not behave: every case ends as it must, and nothing of it is left."""

from collections import Counter
from pathlib import Path

import pytest

from .cases import Case
from .engines import HOLD, Pause, whole
from .lifecycle_cases import LIFECYCLE
from .runner import Arena
from .upstream_cases import DECODE, UPSTREAM

CASES: tuple[Case, ...] = (*UPSTREAM, *LIFECYCLE)
GROWTH_KIB = 24 << 10
"""What the process may have grown by when nothing runs any more: what its allocator keeps."""
DESCRIPTORS = 150
"""Beyond those at the start: connections to four engines that wait for further requests."""


def test_every_case_has_a_name_of_its_own_and_an_outcome() -> None:
    names = Counter(case.name for case in CASES)
    assert names.most_common(1)[0][1] == 1
    assert len(UPSTREAM) >= 500
    assert len(LIFECYCLE) >= 90
    for case in CASES:
        assert case.expect.statuses or case.expect.answers in (0, None), case.name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), ("--plain-asgi",)], ids=["direct", "plain"])
async def test_every_case_ends_as_it_must(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with Arena.running(tmp_path, flags=flags) as arena:
        before = arena.usage()
        for _ in range(2):
            results = await arena.run(CASES)
            assert [str(result) for result in results if result.problems] == []
            assert await arena.settled() == {}
            assert arena.unknown() == 0
            after = arena.usage()
            assert after.descriptors <= before.descriptors + DESCRIPTORS
            assert after.rss_kib <= before.rss_kib + GROWTH_KIB
        assert "Traceback" not in arena.server.log.read_text().replace("('Traceback')", "")


async def test_the_runner_sees_what_is_wrong(tmp_path: Path) -> None:
    """The control: an engine that misbehaves where the case says that it does not."""
    hanging = next(case for case in UPSTREAM if case.name == "prefill: HTTP/1.0")
    wrong = [
        Case("hangs", "upstream", hanging.act, hanging.expect, prefill=(HOLD,)),
        Case("reaches", "upstream", hanging.act, hanging.expect, reaches="nobody"),
        Case("late", "upstream", hanging.act, hanging.expect, prefill=(HOLD,), within_s=0.5),
        Case(
            "goes on", "lifecycle", hanging.act, hanging.expect, decode=(whole(DECODE), Pause(5.0)), aborts_within_s=0.1
        ),
    ]
    async with Arena.running(tmp_path) as arena:
        results = {result.case.name: result.problems for result in await arena.run([hanging, *wrong])}
    assert results[hanging.name] == []
    assert results["hangs"] == ["not one of [200]"]
    assert results["reaches"] == ["it reached ['decode', 'prefill']"]
    assert "it took longer than 0.5 s" in results["late"]
    assert "an engine goes on for nobody" in results["goes on"]
