"""Tests engines of an earlier or a later protocol version: what the proxy learns, writes and refuses.

The engines here are scripted; tests/system/versions has real builds of both.
"""

import asyncio
import json
from typing import Any

import pytest

from kvparams import parse
from kvparams.instances import Role
from tests.system.proxy.test_legs import ANSWER, CLIENT, answering
from tests.system.proxy.upstream.test_broken_engines import DONE, SSE, chunk, sending
from tests.system.proxy.upstream.test_probes import probed
from tests.unit.proxy.fleet.test_fleet import fleet, take

RESULT: dict[str, Any] = {
    "version": "1.7",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["k1"],
    "lease": {"ttl_ms": 60000, "renewable": True},
    "new_in_that_minor": [{"x": 1}],
}
LATER = [b'["1.0"]', b'["1.7"]', b'["2.1", "1.0"]', b'["x", 1.0, "1.2"]', b"null", b'"1.7"']
NONE = [b"[]", b'["2.0"]', b'["1.01", "0.9"]', b"[1.0]"]


async def serving(stack: Any, versions: bytes) -> str:
    """An engine that says these are the versions that it speaks."""
    body = b'{"object":"list","data":[{"id":"m"}],"kvparams_versions":%b}' % versions

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stack.callback(server.close)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_engine_with_which_no_version_is_common_is_given_no_work(
    stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the proxies, 1.0#6.5, 1.0#6.6; the control is the engines that speak 1.y beside others, or say nothing."""
    good = [await serving(stack, versions) for versions in LATER]
    bad = [await serving(stack, versions) for versions in NONE]
    async with probed(*good, *bad) as proxied:
        assert proxied.ready == [True] * len(good) + [False] * len(bad)
        assert {member.instance.version for member in proxied.fleet.members} == {"1.0"}
        assert proxied.fleet.models() == ["m"]
    said = sorted(record.getMessage() for record in caplog.records if "no version" in record.getMessage())
    assert [line.split(" gets no requests (probe): ")[0] for line in said] == [f"prefill p{n}" for n in range(6, 10)]
    assert said[1].endswith("is spoken by both: here 1.0, there 2.0")


def test_an_engine_that_speaks_another_version_is_another_incarnation() -> None:
    one = fleet(prefill=1, decode=1)
    (member,) = (member for member in one.members if member.instance.role is Role.DECODE)
    one.record_probe(member, True, None)
    before = take(one)
    assert before.version == "1.0"
    one.record_probe(member, True, None, version="1.0")
    assert take(one) is before
    one.record_probe(member, True, None, version="1.1")
    after = take(one)
    assert (after.id, after.version) == (before.id, "1.1")
    assert after.incarnation != before.incarnation
    one.record_probe(member, False, None)
    one.record_probe(member, True, None)
    assert take(one).version == "1.1"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_later_engine_adds_is_handed_on_and_does_no_harm(scripted: Any, proxy: Any, stream: bool) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": {"kvparams": RESULT}}))
    said = ANSWER | {"kv_transfer_params": {"kvparams": RESULT | {"phase": "decode_result"}}}
    event = b"data: %b\n\n" % json.dumps(said).encode()
    streaming = sending(SSE + chunk(event) + chunk(DONE) + b"0\r\n\r\n")
    decode = await scripted(streaming if stream else answering(said))
    running = await proxy([prefill.url], [decode.url], "store")
    got = await running.client.post("/v1/completions", json=CLIENT | {"stream": stream})
    assert got.status_code == 200
    assert "kvparams" not in got.text
    for engine in (prefill, decode):
        assert json.loads(engine.bodies[0])["kv_transfer_params"]["kvparams"]["version"] == "1.0"
    told = parse(json.loads(decode.bodies[0])["kv_transfer_params"]["kvparams"])
    assert told.lease is not None
    assert told.lease.model_extra == {"renewable": True}
    assert "new_in_that_minor" not in (told.model_extra or {})


async def test_what_a_later_engine_wants_understood_is_refused_in_words(
    scripted: Any, proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The control is the test above: the same answer without the name."""
    critical = RESULT | {"must_understand": ["lease.ttl_ms", "lease.renewable"]}
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": {"kvparams": critical}}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], "store")
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "bad_prefill_answer")
    assert decode.bodies == []
    assert "kvparams.must_understand.1: must be understood, but is not known" in caplog.text


async def test_what_must_be_understood_of_what_is_handed_on_is_said_to_decode(scripted: Any, proxy: Any) -> None:
    """Of proxies, 1.0#6.9."""
    critical = RESULT | {"must_understand": ["usage", "lease.ttl_ms"]}
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": {"kvparams": critical}}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], "store")
    assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == 200
    told = json.loads(decode.bodies[0])["kv_transfer_params"]["kvparams"]
    assert told["must_understand"] == ["lease.ttl_ms"]
