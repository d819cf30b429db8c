"""Tests streams with messages made by hand: what is kept of a request, and what ends a stream."""

import argparse
import asyncio
import gc
import json
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from kvparams_proxy.cli.picker_command import COMMAND
from kvparams_proxy.cli.proxy_command import load_configuration
from kvparams_proxy.ext_proc.message_types import ProcessingRequest
from kvparams_proxy.ext_proc.messages import MalformedGatewayMessage
from kvparams_proxy.picker.app import create_picker_app
from kvparams_proxy.picker.context import PickerContext
from kvparams_proxy.picker.settings import PickerSettings
from kvparams_proxy.picker.stream import PickerStream
from tests.support.recording_engine import RecordingEngine
from tests.support.waiting import until

BODY = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 1}).encode()
DUPLEX = 4


class Wire:
    """The messages of one stream: an asynchronous iterator that ends as gRPC's does."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: list[Any] = []

    def __aiter__(self) -> "Wire":
        return self

    async def __anext__(self) -> Any:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        return message

    def put(self, *messages: Any) -> None:
        """Sends messages; None ends the stream."""
        for message in messages:
            self._queue.put_nowait(message)

    async def write(self, message: Any) -> None:
        """Receives an answer."""
        self.answers.append(message)


def head(
    path: str = "/v1/completions",
    content_type: str = "application/json",
    response_mode: int = 0,
    method: str = "POST",
) -> Any:
    message = ProcessingRequest()
    headers = {":authority": "x", ":path": path, ":method": method, ":scheme": "http", "content-type": content_type}
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = DUPLEX
    message.protocol_config.response_body_mode = response_mode
    return message


def request_body(data: bytes, *, last: bool = True) -> Any:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = data, last
    return message


def response_head(status: bytes = b"200", details: str = "via_upstream") -> Any:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status)
    message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": details})
    return message


def response_body(data: bytes, *, last: bool = True) -> Any:
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = data, last
    return message


def outcomes(context: PickerContext) -> dict[str, float]:
    """Returns how many requests have ended in each way, without those that are none."""
    context.resources.record_dispatcher.flush()
    found: dict[str, float] = {}
    for metric in context.resources.metrics.collect():
        for sample in metric.samples:
            if sample.name == "kvparams_proxy_requests_total" and sample.value:
                found[sample.labels["outcome"]] = sample.value
    return found


@pytest.fixture
async def context() -> AsyncIterator[PickerContext]:
    """The picker's, in front of one engine."""
    engine = RecordingEngine()
    await engine.listen()
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    flags = ["--mode", "aggregated", "--probe", "0.1", "--log-requests", "off", "--aggregated", engine.url]
    asked = load_configuration("picker", parser.parse_args(flags))
    assert asked is not None
    app = create_picker_app(asked.settings, PickerSettings(port=0))
    async with app.router.lifespan_context(app) as state:
        found = cast("PickerContext", cast("Any", state)["picker"])
        await until(lambda: all(member.ready for member in found.resources.fleet.members))
        yield found
    await engine.close()


def load(context: PickerContext) -> int:
    return sum(member.in_flight for member in context.resources.fleet.members)


@pytest.mark.parametrize(
    "messages",
    [
        lambda: [head(), request_body(BODY), response_head(), response_body(b"{}")],
        lambda: [head(content_type="text/plain"), request_body(BODY)],
        lambda: [head(), request_body(b"{")],
        lambda: [head("/other")],
        lambda: [head(), request_body(BODY, last=False)],
    ],
    ids=["whole", "wrong type", "no JSON", "not served", "left"],
)
async def test_a_stream_that_has_ended_is_gone_without_the_collector(
    context: PickerContext, messages: Callable[[], list[Any]]
) -> None:
    gc.collect()
    gc.disable()
    try:
        wire = Wire()
        stream = PickerStream(context, wire, wire.write)
        gone = weakref.ref(stream)
        wire.put(*messages(), None)
        await stream.run()
        del stream, wire
        await until(lambda: gone() is None)
    finally:
        gc.enable()
    assert load(context) == 0


async def test_a_client_that_leaves_in_its_body_is_no_fault(context: PickerContext) -> None:
    wire = Wire()
    wire.put(head(), request_body(BODY[:10], last=False), None)
    await PickerStream(context, wire, wire.write).run()  # raises nothing
    assert context.metrics.picks == {"left": 1}
    assert load(context) == 0


async def test_usage_that_cannot_be_read_gives_the_load_back(context: PickerContext) -> None:
    wire = Wire()
    stream = asyncio.ensure_future(PickerStream(context, wire, wire.write).run())
    wire.put(head(response_mode=DUPLEX), request_body(BODY))
    await until(lambda: load(context) == 1)
    wire.put(response_head(), response_body(b'"usage":' + b"[" * 4000), None)
    await stream
    assert load(context) == 0


async def test_no_body_is_kept_while_its_response_runs(context: PickerContext) -> None:
    count, size = 20, 200_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        running: list[tuple[Wire, asyncio.Future[None]]] = []
        for number in range(count):
            wire = Wire()
            running.append((wire, asyncio.ensure_future(PickerStream(context, wire, wire.write).run())))
            body = json.dumps({"model": "m", "prompt": f"{number} ".ljust(size, "x"), "max_tokens": 1}).encode()
            wire.put(head(), request_body(body), response_head())
            del body
            await until(lambda wire=wire: len(wire.answers) > 1 and "response_headers" in str(wire.answers[-1])[:30])
            wire.answers.clear()
        kept = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    assert load(context) == count
    assert kept < size / 4
    for wire, stream in running:
        wire.put(None)
        await stream
    assert load(context) == 0


@pytest.mark.parametrize(("last", "outcome"), [(True, "ok"), (False, "gone")])
async def test_a_response_that_breaks_off_is_no_success(context: PickerContext, last: bool, outcome: str) -> None:
    wire = Wire()
    wire.put(head(response_mode=DUPLEX), request_body(BODY), response_head(), response_body(b"{}", last=last), None)
    await PickerStream(context, wire, wire.write).run()
    assert outcomes(context) == {outcome: 1}
    assert load(context) == 0


@pytest.mark.parametrize(
    ("status", "details", "is_blamed"),
    [
        (b"503", "upstream_reset_before_response_started{connection_failure}", True),
        (b"504", "upstream_response_timeout", True),
        (b"503", "via_upstream", True),
        (b"408", "stream_idle_timeout", False),
        (b"413", "request_payload_too_large", False),
    ],
)
async def test_an_engine_is_blamed_for_what_it_did(
    context: PickerContext, status: bytes, details: str, is_blamed: bool
) -> None:
    blamed: list[object] = []
    fleet, record = context.resources.fleet, context.resources.fleet.record_failure

    def watch(*arguments: Any, **more: Any) -> None:
        blamed.append(arguments)
        record(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "record_failure", watch)
        wire = Wire()
        wire.put(head(), request_body(BODY), response_head(status, details), None)
        await PickerStream(context, wire, wire.write).run()
    assert bool(blamed) is is_blamed
    assert outcomes(context) in ({"failed": 1}, {"refused": 1})


async def test_a_request_without_a_use_for_its_body_is_answered_with_it(context: PickerContext) -> None:
    wire = Wire()
    first = head("/v1/models", method="GET")
    wire.put(first, request_body(b"a", last=False), request_body(b"b"), response_head(), None)
    await PickerStream(context, wire, wire.write).run()
    _, *chunks, _ = wire.answers
    streamed = [each.request_body.response.body_mutation.streamed_response for each in chunks]
    assert [(each.body, each.end_of_stream) for each in streamed] == [(b"a", False), (b"b", True)]


@pytest.mark.parametrize("messages", [[ProcessingRequest()], [head(), request_body(BODY), response_head(b"x")]])
async def test_what_is_malformed_is_said_to_be(context: PickerContext, messages: list[Any]) -> None:
    wire = Wire()
    wire.put(*messages, None)
    with pytest.raises(MalformedGatewayMessage):
        await PickerStream(context, wire, wire.write).run()
    assert load(context) == 0
