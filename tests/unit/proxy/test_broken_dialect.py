"""Tests that the proxy starts without a third party's dialect that cannot be imported, and says so."""

import asyncio
import os
import re
import sys
from pathlib import Path

import httpx
import pytest

from kvparams.instances import Role
from tests.support.stub_engine import StubEngines

SOURCES = {
    "raises.py": "raise RuntimeError('built for another kvparams')\n",
    "words.py": "DIALECT = 'no table'\n",
}
POINTS = "[kvparams.dialects]\nacme = raises:DIALECT\nacme-words = words:DIALECT\nacme-gone = nowhere:DIALECT\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with three broken dialects, as a package manager leaves it."""
    for name, source in SOURCES.items():
        (tmp_path / name).write_text(source)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return tmp_path


async def command(installed: Path, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvparams", "proxy", "--port", "0", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(installed)},
    )


def engines(stub: StubEngines) -> list[str]:
    first = {role: next(engine.url for engine in stub.engines if engine.role == role) for role in ("prefill", "decode")}
    return [word for role, url in first.items() for word in (f"--{role}", url)]


@pytest.mark.slow
async def test_the_proxy_serves_without_it_and_names_it(stub: StubEngines, installed: Path) -> None:
    process = await command(installed, *engines(stub))
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            said = [(await process.stderr.readline()).decode() for _ in range(3)]
            line = (await process.stdout.readline()).decode()
        assert [re.findall("left out: '(acme[a-z-]*)'", one) for one in said] == [
            ["acme"],
            ["acme-gone"],
            ["acme-words"],
        ]
        assert "built for another kvparams" in said[0]
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        async with httpx.AsyncClient(base_url=found[0], timeout=10) as client:
            answered = await client.post("/v1/completions", json={"model": "stub", "prompt": "x", "max_tokens": 2})
        assert answered.status_code == 200
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connector", "why"),
    [
        ("acme", "acme cannot be used: 'acme' (raises:DIALECT) cannot be loaded: built for another kvparams"),
        ("acme-words", "neither a Table nor a Dialect"),
        ("llm-d", "llm-d cannot be used: its messages can be translated, but no proxy routes with it yet"),
        ("no-such", "must be one of content, legacy, mooncake, nixl, sglang, store, store-drop, store-meet\n"),
    ],
)
async def test_an_instance_that_declares_it_is_refused_in_words(
    stub: StubEngines, installed: Path, tmp_path: Path, connector: str, why: str
) -> None:
    (fleet := tmp_path / "fleet.yaml").write_text(
        f"instances:\n- {{id: a, url: '{stub.engines[0].url}', role: {Role.PREFILL}, connector: {connector}}}\n"
    )
    for words in (["--config", str(fleet)], [*engines(stub), "--connector", connector]):
        process = await command(installed, *words)
        async with asyncio.timeout(30):
            _, said = await process.communicate()
        assert process.returncode == 2
        assert why in said.decode()
        assert ("cannot be used" in said.decode()) is (connector != "no-such")
