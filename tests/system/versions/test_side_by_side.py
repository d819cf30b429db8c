"""Tests two builds of this project side by side, as in a rolling upgrade: this one and the next minor version.

The proxies and engines are real processes, with a real store between the engines.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from demo.processes import Processes, Server, free_port
from kvparams.params import PROTOCOL_VERSION
from tests.support.kvparams.next_minor import NEXT, NEXT_DEPRECATED
from tests.support.waiting import wait_until
from tests.system.versions.build import ONCE, PRIORITY, make_build
from tests.system.versions.tap import Tap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

VERSIONS = {"old": PROTOCOL_VERSION, "new": NEXT}
PROMPT = "Two versions of one protocol meet, and neither of them is told anything that it would get wrong. " * 3
BODY: dict[str, Any] = {"model": "reference", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    **{name: BODY[name] for name in BODY if name != "prompt"},
}


class Engine(NamedTuple):
    server: Server
    tap: Tap


class World:
    """Engines of both builds, each behind a tap, and proxies as they are asked for."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.build = make_build(folder / "build")
        self._processes = processes
        self._store = f"file://{folder}/kv?size=256MiB"
        self._proxies: dict[tuple[str, str, str], Server] = {}
        self.engines: dict[tuple[str, str], Engine] = {}
        for age in VERSIONS:
            for role in ("prefill", "decode"):
                port = free_port()
                words = ["reference_engine", "--role", role, "--id", f"{age}-{role}", "--store", self._store]
                server = self._start(age, f"{age}-{role}", *words, port=port)
                self.engines[age, role] = Engine(server, Tap(port))
        processes.wait_ready(*(engine.server for engine in self.engines.values()), within_s=120)

    def _start(self, age: str, name: str, *words: str, port: int) -> Server:
        where = ["env", "-C", str(self.build)] if age == "new" else []
        command = [*where, sys.executable, "-m", *words, "--port", str(port)]
        return self._processes.start(name, *command, port=port)

    def proxy(self, age: str, prefill: str, decode: str) -> Server:
        """One of that build before engines of these."""
        who = age, prefill, decode
        if who not in self._proxies:
            words = ["kvparams", "proxy", "--connector", "store", "--probe", "1", "--retries", "0"]
            for role, of in (("prefill", prefill), ("decode", decode)):
                words += [f"--{role}", f"{role}=http://127.0.0.1:{self.engines[of, role].tap.port}"]
            found = self._proxies[who] = self._start(age, "-".join(who), *words, port=free_port())
            self._processes.wait_ready(found)
        return self._proxies[who]

    def forget(self) -> None:
        """What has gone over the wire so far."""
        for engine in self.engines.values():
            engine.tap.forget()

    def stop(self, server: Server) -> None:
        self._proxies = {who: proxy for who, proxy in self._proxies.items() if proxy is not server}
        self._processes.stop(server)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("versions")
    with Processes(folder) as processes:
        made = World(folder, processes)
        yield made
        for engine in made.engines.values():
            engine.tap.shutdown()
            engine.tap.server_close()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, trust_env=False) as found:
        yield found


def texts(client: httpx.Client, url: str, **more: Any) -> list[str]:
    """A completion whole, the same as a stream, and a chat as a stream."""
    whole = client.post(f"{url}/v1/completions", json=BODY | more)
    assert whole.status_code == 200, whole.text
    found = [whole.json()["choices"][0]["text"]]
    for path, body in (("completions", BODY), ("chat/completions", CHAT)):
        stream = client.post(f"{url}/v1/{path}", json={**body, "stream": True, **more})
        *events, done = [event.removeprefix("data: ") for event in stream.text.split("\n\n") if event]
        assert (stream.status_code, done) == (200, "[DONE]")
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        found.append("".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices))
        assert "kvparams" not in stream.text
    assert found[0] == found[1] != ""
    return found


def loaded(client: httpx.Client, engine: Engine) -> float:
    """Prompt tokens that an engine has had from outside."""
    lines = client.get(f"{engine.server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'source="external_kv"' in line)


def lower(one: str, other: str) -> str:
    return min(VERSIONS[one], VERSIONS[other])


def test_each_engine_says_what_it_speaks(world: World, client: httpx.Client) -> None:
    """Guards the tests below: the two builds are two."""
    for (age, _), engine in world.engines.items():
        said = client.get(f"{engine.server.url}/v1/models").json()
        assert said["kvparams_versions"] == [VERSIONS[age]]


@pytest.mark.parametrize("decode", VERSIONS)
@pytest.mark.parametrize("prefill", VERSIONS)
@pytest.mark.parametrize("proxy", VERSIONS)
def test_every_proxy_works_with_every_engine(
    world: World, client: httpx.Client, proxy: str, prefill: str, decode: str
) -> None:
    """And each is told, and says, what both sides speak."""
    salt = f"{proxy}-{prefill}-{decode}"  # nobody else has stored this
    p, d = world.engines[prefill, "prefill"], world.engines[decode, "decode"]
    expected = texts(client, d.server.url, cache_salt="alone")
    running = world.proxy(proxy, prefill, decode)
    world.forget()
    before = loaded(client, d)
    assert texts(client, running.url, cache_salt=salt) == expected
    assert loaded(client, d) > before

    asked, answered, told = p.tap.documents("asked"), p.tap.documents("answered"), d.tap.documents("asked")
    assert len(asked) == len(answered) == len(told) == 3
    assert {one["version"] for one in (*asked, *answered)} == {lower(proxy, prefill)}
    assert {one["version"] for one in told} == {lower(proxy, decode)}
    assert {one["version"] for one in d.tap.documents("answered")} == {lower(proxy, decode)}
    assert [one.get("priority") for one in asked] == 3 * [PRIORITY if lower(proxy, prefill) == NEXT else None]
    assert [one.get("priority") for one in told] == 3 * [PRIORITY if lower(proxy, decode) == NEXT else None]
    says = lower(proxy, prefill) == NEXT
    assert ["renewable" in one["lease"] for one in answered] == 3 * [says]
    assert ["renewable" in one["lease"] for one in told] == 3 * [says and lower(proxy, decode) == NEXT]


@pytest.mark.parametrize("decode", VERSIONS)
@pytest.mark.parametrize("prefill", VERSIONS)
@pytest.mark.parametrize("proxy", VERSIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_must_be_understood_is_understood_or_refused_in_words(
    world: World, client: httpx.Client, stream: bool, proxy: str, prefill: str, decode: str
) -> None:
    """The old prefill engine says nothing of the kind: with it all goes well."""
    running = world.proxy(proxy, prefill, decode)
    d = world.engines[decode, "decode"]
    world.forget()
    got = client.post(f"{running.url}/v1/completions", json={**BODY, "stream": stream, "cache_salt": ONCE})
    named = "cannot say what must be understood: lease.once"
    told = d.tap.documents("asked")
    if prefill == "old":
        assert got.status_code == 200
        assert "must_understand" not in told[0]
    elif proxy == "old":  # its engine refuses to answer it
        assert (got.status_code, told) == (502, [])
        wait_until(lambda: named in running.log.read_text())
    elif decode == "old":  # it refuses to hand on
        error = got.json()["error"]
        assert (got.status_code, error["code"], told) == (502, "version_too_low", [])
        assert named in error["message"]
    else:
        assert got.status_code == 200
        assert (told[0]["must_understand"], told[0]["lease"]["once"]) == (["lease.once"], True)


@pytest.mark.parametrize("age", VERSIONS)
def test_an_old_engine_refuses_what_it_must_understand_and_a_new_one_does_not(
    world: World, client: httpx.Client, age: str
) -> None:
    document = {"version": NEXT, "request_id": "r", "transfer": {"id": f"t-{age}", "attempt": 1}, "phase": "prefill"}
    document |= {"mode": "store", "lease": {"ttl_ms": 9, "once": True}, "must_understand": ["lease.once"]}
    body = {**BODY, "max_tokens": 1, "stream": False, "kv_transfer_params": {"kvparams": document}}
    got = client.post(f"{world.engines[age, 'prefill'].server.url}/v1/completions", json=body)
    if age == "new":
        assert got.status_code == 200
        assert got.json()["kv_transfer_params"]["kvparams"]["version"] == NEXT
    else:
        assert got.status_code == 400
        assert "must_understand.0: must be understood, but is not known" in got.json()["error"]["message"]


def test_an_engine_that_is_upgraded_and_set_back_is_spoken_to_in_what_it_speaks_now(
    world: World, client: httpx.Client
) -> None:
    """The proxy goes on all the while, and is told nothing."""
    old, new = world.engines["old", "prefill"], world.engines["new", "prefill"]
    port = old.tap.target
    running = world.proxy("new", "old", "new")

    def written() -> str:
        old.tap.forget()
        got = client.post(f"{running.url}/v1/completions", json=BODY)
        asked = old.tap.documents("asked")
        return asked[-1]["version"] if got.status_code == 200 and asked else f"{got.status_code}"

    assert written() == PROTOCOL_VERSION
    try:
        for target, version in ((new.tap.target, NEXT), (port, PROTOCOL_VERSION)):
            old.tap.move(target)
            wait_until(lambda version=version: written() == version, 60.0)
    finally:
        old.tap.move(port)


@pytest.mark.parametrize("command", ["validate", "explain"])
def test_the_tools_say_what_is_deprecated(world: World, tmp_path: Path, command: str) -> None:
    """The control is the old build, which knows of nothing deprecated."""
    document = {"version": "1.0", "request_id": "r", "transfer": {"id": "t", "attempt": 1}, "phase": "prefill"}
    (tmp_path / "document.json").write_text(json.dumps({**document, "mode": "store", "store_keys": ["k"]}))
    words = [sys.executable, "-m", "kvparams", command, str(tmp_path / "document.json")]
    said: list[str] = []
    for where in (world.build, None):
        ran = subprocess.run(words, cwd=where, capture_output=True, text=True, timeout=60, check=True)
        said.append(ran.stdout + ran.stderr)
    (one,) = NEXT_DEPRECATED
    assert str(one) in said[0]
    assert "deprecated" not in said[1]
