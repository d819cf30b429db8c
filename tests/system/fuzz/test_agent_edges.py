"""Fuzzes what `/v1/messages`, `/v1/responses`, ranks, encode engines and adapters have added.

These are requests, answers and streams of the two APIs, data-parallel ranks as operators and engines say them,
`ec_transfer_params` of encode engines, and metrics that name adapters and ranks. Every input is read or refused with
one of our errors, in bounded time and memory. A soak runs ten minutes for each.
"""

import json
import random
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import pytest

from kvparams.dialects.ec import write_encodings
from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.registry import load_tables
from kvparams.dialects.store import STORE
from kvparams.errors import JSONTextError
from kvparams.instances import DataParallelRank, Instance, Role
from kvparams.jsontext.document import JSONLimits, loads
from kvparams.routing.adapter_metrics import parse_adapter_metrics
from kvparams.routing.engine_metrics import parse_engine_metrics
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier, canonical_host
from kvparams_proxy.config.spec_fields import check_ranks
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.answer_forms import answer_form
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.tokenization.engine_tokenizer import build_tokenize_body
from kvparams_proxy.upstream.types import UpstreamError
from tests.support.proxy.steps import drained, read_all
from tests.system.fuzz.campaign import FOUND, Campaign, Make
from tests.system.fuzz.mutation import EVIL, spoiled_bytes, spoiled_json
from tests.system.fuzz.test_edge import steered
from tests.unit.proxy.execution.test_agent_answers import (
    ADDRESS,
    COUNTED,
    MESSAGES,
    RESPONSES,
    STREAMS,
    TOTALS,
    message,
    relayed,
    response,
)
from tests.unit.proxy.requests.test_forbidden_fields import BODIES, legs

Effort = Callable[[int, int], int]
Record = Callable[[dict[str, object]], None]

FOUND_CACHED: Final[dict[str, dict[str, Any]]] = {
    MESSAGES.path: {"input_tokens": 36, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 0},
    RESPONSES.path: {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64, "cached_tokens_per_turn": []}},
}
"""What prefill found, where decode says that all was cached."""
ADDRESSES: Final = EngineAddresses([ADDRESS])
PINS: Final = HandoffVerifier(load_tables().values())
ENCODER: Final = Instance("e", "b", Role.ENCODE, "http://h:1", "ec")
RANKED: Final = Instance("p", "b", Role.PREFILL, "http://10.0.0.7:8000", "nixl", rank=DataParallelRank(1, 4, 4))
WORDS: Final = re.compile(r"[a-z_]{3,20}")


def requests() -> list[bytes]:
    """Returns requests of both APIs, with turns, tools, media and what only a proxy may say."""
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Who"}, image]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"days": 2}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sun"}]},
    ]
    items: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/png;base64,"}],
        },
        {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"days":2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}}
    bodies: list[dict[str, Any]] = [
        {**BODIES["messages"], "messages": turns, "system": "s", "stream": True},
        {
            **BODIES["messages"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        {**BODIES["responses"], "input": items, "instructions": "i", "stream": True},
        {
            **BODIES["responses"],
            "tools": [{"type": "function", "name": "f", "parameters": schema}],
            "reasoning": {"effort": "low"},
            "previous_response_id": "resp_1",
            "store": True,
            "text": {"format": {"type": "json_schema", "name": "f", "schema": schema}},
        },
    ]
    native = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": EVIL, "remote_port": 1}}
    ranked = {"data_parallel_rank": 3, "ec_transfer_params": {"0" * 64: {"peer_host": EVIL}}}
    carried: tuple[dict[str, Any], ...] = ({}, native, ranked, {"vllm_xargs": native})
    return [json.dumps(body | more).encode() for body in bodies for more in carried]


def prepared(data: bytes) -> Hashable:
    """Reads, as a request of either API, prepares both legs and the request for its token ids."""
    ways: list[Hashable] = []
    for endpoint in (MESSAGES, RESPONSES):
        try:
            inbound = read_all(endpoint.kind, data, "r", "t", JSONLimits(), keep_document=True)
            sent = legs(endpoint, data, STORE)
            asked = build_tokenize_body(endpoint.kind, inbound)
        except ProxyError as error:
            ways.append((error.status, *WORDS.findall(f"{error.param} {error.message}")[:12]))
            continue
        assert not any(steered(leg) for leg in sent)
        if asked is not None:
            loads(asked)
        ways.append((len(sent), inbound.facts.prompt_scored, bool(inbound.facts.media), asked is not None))
    return tuple(ways)


def answers() -> list[bytes]:
    """Returns whole answers of both APIs."""
    blocks: list[Any] = [{"type": "text", "text": "t"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    whole = (message(content=blocks, usage=COUNTED), response(output=[{"content": blocks}], usage=TOTALS))
    mores: tuple[dict[str, Any], ...] = (
        {},
        {"kv_transfer_params": {"remote_host": ADDRESS}, "worker": ADDRESS},
        {"ec_transfer_params": {"0" * 64: {"peer_host": ADDRESS}}, "nvext": {"worker_id": {"decode_worker_id": 1}}},
        {"error": {"type": "api_error", "message": "gone"}},
    )
    return [json.dumps({**one, **more}).encode() for one in whole for more in mores]


def _members(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _told(document: Mapping[str, Any], path: str) -> None:
    """Requires that an answer says nothing of its engine, and of the cache what prefill found."""
    assert document.get("kv_transfer_params") is None
    assert document.get("ec_transfer_params") is None
    assert ADDRESS not in str(document.get("id"))
    usage = _members(document.get("usage"))
    counted = usage.get("input_tokens")
    if path == MESSAGES.path and type(counted) is int and counted >= 0:
        assert usage.get("cache_read_input_tokens") == 64
    elif path == RESPONSES.path and isinstance(document.get("usage"), dict):
        assert isinstance(usage["input_tokens_details"], dict)


def corrected(data: bytes) -> Hashable:
    """Corrects an answer at once and in steps, to the same value."""
    ways: list[Hashable] = []
    for endpoint in (MESSAGES, RESPONSES):
        found: list[bytes | str] = []
        for in_steps in (False, True):
            corrector = ResponseCorrector("r", ADDRESSES, answer_form(endpoint.kind))
            corrector.learn_prefill_usage({"usage": FOUND_CACHED[endpoint.path]})
            try:
                if in_steps:
                    made = EngineResponse(data, answer_form(endpoint.kind))
                    drained(made.parse_in_steps("r", ADDRESSES))
                    found.append(b"".join(map(bytes, corrector.correct_response(made))))
                else:
                    found.append(corrector.correct_document(data))
            except (UpstreamError, JSONTextError) as error:
                found.append(type(error).__name__)
        short, long = found
        if isinstance(short, bytes):
            _told(json.loads(short), endpoint.path)
        if isinstance(long, bytes):
            _told(json.loads(long), endpoint.path)
        ways.append(tuple("whole" if isinstance(one, bytes) else one for one in found))
    return tuple(ways)


def streams() -> list[bytes]:
    """Returns streams of both APIs, whole and with errors."""
    found: list[bytes] = []
    for _, parts in STREAMS.values():
        found += [b"".join(parts), b"".join([*parts[:3], b'event: error\ndata: {"type":"error","message":"x"}\n\n'])]
    return found


def spoiled_stream(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Returns a stream with events that are changed, doubled, left out, or cut in their bytes."""
    events = [each + b"\n\n" for each in dice.choice(corpus).split(b"\n\n") if each]
    datas = [each.partition(b"data: ")[2].strip() for each in events] or [b"{}"]
    for _ in range(dice.choice((1, 1, 2, 4))):
        if not events:
            break
        at = dice.randrange(len(events))
        name, _, data = events[at].partition(b"data: ")
        match dice.randrange(6):
            case 0 | 1 | 2:
                events[at] = b"%bdata: %b\n\n" % (name, spoiled_json(dice, [data.strip(), *datas]))
            case 3:
                events.insert(dice.randrange(len(events)), events[at])
            case 4:
                del events[at]
            case _:
                events[at] = spoiled_bytes(dice, events[at], corpus)
    raw = b"".join(events)
    return raw.replace(b"\n", b"\r\n") if dice.random() < 0.1 else raw


def streamed(data: bytes) -> Hashable:
    """Relays a stream whole and in pieces: what the client gets does not depend on them, unless it ends in an error.

    Where an event has the name of a last one and not its content, it ends the stream or does not: so one begins with
    the other.
    """
    ways: list[Hashable] = []
    dice = random.Random(data)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.choice((1, 3, 20))))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]
    for endpoint in (MESSAGES, RESPONSES):
        got: list[tuple[bytes, str | None, int | None]] = []
        for parts in ([data], pieces):
            corrector = ResponseCorrector("r", ADDRESSES, answer_form(endpoint.kind))
            corrector.learn_prefill_usage({"usage": FOUND_CACHED[endpoint.path]})
            owner, sent = relayed(endpoint, parts, corrector)
            got.append((sent, None if owner.error is None else type(owner.error).__name__, owner.events))
            _nothing_of_the_engine(sent, endpoint.path)
        whole, cut = got
        if whole[1] is None and cut[1] is None:
            assert whole[0].startswith(cut[0]) or cut[0].startswith(whole[0])
        ways.append((whole[1], cut[1], min(whole[2] or 0, 9), bool(whole[0])))
    return tuple(ways)


def _nothing_of_the_engine(sent: bytes, path: str) -> None:
    """Requires that no event of a stream that a client got says where its KV is."""
    for block in re.split(rb"\n\n|\r\n\r\n", sent):
        lines = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
        try:
            event = json.loads(b"\n".join(lines))
        except (ValueError, RecursionError):
            continue
        wrapper = "message" if path == MESSAGES.path else "response"
        for said in (_members(event), _members(_members(event).get(wrapper))):
            assert said.get("kv_transfer_params") is None, block
            assert said.get("ec_transfer_params") is None, block


def encodings() -> list[bytes]:
    """Returns what encode engines say."""
    good: dict[str, Any] = {"item_indices": [0, 2], "peer_host": "h", "peer_port": 5601, "size_bytes": 5, "shape": [2]}
    name = "4d7721c50a37c90758c55ef5441692a3c3e0fd2ed36247bb0381d3fba3c0864d"
    said: tuple[dict[str, Any], ...] = (
        {name: good},
        {name: {**good, "metadata": {"image_grid_thw": [[1, 4, 4]]}}, f"an/adapter:{name}": {"item_indices": [1]}},
        {f"{number:064x}": good for number in range(40)},
        {name: {**good, "peer_host": EVIL}},
    )
    return [json.dumps(one).encode() for one in said]


def handed_on(data: bytes) -> Hashable:
    """Hands encodings on to prefill: only known members, and no address but the engine's."""
    try:
        said = loads(data)
    except JSONTextError:
        return "no JSON"
    if not isinstance(said, dict):
        return "no object"
    try:
        text = write_encodings(cast("dict[str, object]", said), partial(PINS.verify, ENCODER))
    except HandoffRefused as refused:
        return refused.reason
    except HandoffMissing as missing:
        return tuple(WORDS.findall(str(missing)))
    handed = json.loads(text)
    assert len(text) <= 64 << 10
    assert {canonical_host(each.get("peer_host", "h")) for each in handed.values()} <= {"h"}
    return tuple(sorted({tuple(sorted(each)) for each in handed.values()}))


def ranks() -> list[bytes]:
    """Returns ranks as fleet files and flags have them, and as NIXL engines name them."""
    said: tuple[Any, ...] = (4, 1, "4", "4-7", "0-3", "12-11", "0-99999999")
    named: dict[str, Any] = {"remote_host": "10.0.0.7", "remote_port": 5600, "do_remote_prefill": True}
    return [
        *(json.dumps({"ranks": one}).encode() for one in said),
        *(json.dumps({"ranks": 4, **named, "remote_engine_id": f"e_dp{number}"}).encode() for number in (4, 5, 15, 55)),
    ]


def ranked(data: bytes) -> Hashable:
    """Reads a number of ranks, and holds what an engine says against the rank that was asked."""
    try:
        said = loads(data)
    except JSONTextError:
        return "no JSON"
    if not isinstance(said, dict):
        return "no object"
    members = cast("dict[str, Any]", said)
    ways: list[Hashable] = []
    try:
        found = check_ranks(members.pop("ranks", None))
        assert 1 <= found.count <= 1024
        assert found.start >= 0
        ways.append((found.count.bit_length(), found.start.bit_length()))
    except ValueError as error:
        ways.append(len(str(error)))
    try:
        PINS.verify(RANKED, members)
    except HandoffRefused as refused:
        ways.append(refused.reason)
    else:
        id = members.get("remote_engine_id")
        assert not isinstance(id, str) or id.endswith("_dp5"), id
        ways.append((len(members), id is None))
    return tuple(ways)


METRICS: Final = b"""# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="6",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.7e+09
vllm:lora_requests_info{max_lora="6",running_lora_adapters="",waiting_lora_adapters=""} 1.6e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:nixl_bytes_transferred_sum{engine="1",model_name="m"} 4096.0
"""
SGLANG: Final = b"""sglang:lora_pool_slots_total{engine_type="unified",model_name="m",tp_rank="0"} 8.0
sglang:num_running_reqs{dp_rank="2",model_name="m"} 5
sglang:num_queue_reqs{dp_rank="2",model_name="m",priority="1"} 2
sglang:token_usage{dp_rank="2",model_name="m"} 0.5
"""


def spoiled_metrics(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Returns a page of metrics with lines and bytes changed."""
    lines = dice.choice(corpus).splitlines(keepends=True) + dice.choice(corpus).splitlines(keepends=True)
    dice.shuffle(lines)
    raw = b"".join(lines[: dice.randint(1, 40)])
    for number in (b"6", b"1.7e+09", b"3.0", b"0.25"):
        if dice.random() < 0.2:
            raw = raw.replace(number, dice.choice((b"NaN", b"-1", b"1e999", b"+Inf", b"", b"0", b"9" * 40)))
    return spoiled_bytes(dice, raw, corpus) if dice.random() < 0.8 else raw


def believed(data: bytes) -> Hashable:
    """Reads the adapters and the load of each rank."""
    adapters, load = parse_adapter_metrics(data), parse_engine_metrics(data)
    if adapters is not None:
        assert 1 <= adapters.slots <= 1_000_000
        assert "" not in adapters.active
    assert all(0 <= depth <= 1_000_000 for depth in load.queue_depths.values())
    assert all(0 <= usage <= 1 for usage in load.cache_usages.values())
    return (
        None if adapters is None else (adapters.slots, len(adapters.active)),
        len(load.queue_depths),
        len(load.cache_usages),
        load.fault,
    )


EDGES: Final[dict[str, tuple[Make, Callable[[bytes], Hashable], list[bytes], int]]] = {
    "agent-request": (spoiled_json, prepared, requests(), 30),
    "agent-answer": (spoiled_json, corrected, answers(), 5),
    "agent-stream": (spoiled_stream, streamed, streams(), 10),
    "encodings": (spoiled_json, handed_on, encodings(), 8),
    "ranks": (spoiled_json, ranked, ranks(), 8),
    "metrics": (spoiled_metrics, believed, [METRICS, SGLANG], 20),
}
"""How inputs of each edge are made, what reads them, the first ones, and in how many ways they end at least."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("edge", EDGES)
def test_what_comes_is_read_or_refused(edge: str, effort: Effort, record: Record) -> None:
    make, run, seeds, ways = EDGES[edge]
    campaign = Campaign(edge, make, run, seeds)
    seen = campaign.last(effort(3, 600), seed=3)
    assert campaign.inputs > 50
    assert len(campaign.ways) >= ways  # it has not been fed the same again and again
    record({"edge": edge, **seen})


def test_inputs_that_once_went_wrong_go_well() -> None:
    for edge, (_, run, _, _) in EDGES.items():
        for path in sorted(FOUND.glob(f"{edge}-*")):
            run(path.read_bytes())


@pytest.mark.parametrize("edge", EDGES)
def test_what_is_right_is_not_refused(edge: str) -> None:
    """The control: the first input of each edge ends well."""
    _, run, seeds, _ = EDGES[edge]
    right: dict[str, Hashable] = {
        "agent-answer": ("whole", "whole"),
        "encodings": (("item_indices", "peer_host", "peer_port", "shape", "size_bytes"),),
        "ranks": ((3, 0), (0, True)),
        "metrics": ((6, 3), 2, 1, None),
    }
    found = run(seeds[0])
    if edge == "agent-stream":
        assert cast("tuple[Any, ...]", found)[0][:2] == (None, None)
    elif edge == "agent-request":
        assert cast("tuple[Any, ...]", found)[0][0] == 2
    elif edge == "agent-answer":
        assert cast("tuple[Any, ...]", found)[0] == right[edge]
    else:
        assert found == right[edge]
