"""Tests that engines' internals do not reach clients, and that clients' own and the model's data do."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Role, RoundRobin
from kvparams.jsontext.document import find_members
from kvparams.jsontext.editing import edit
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_errors import PublicError, public_error
from kvparams_proxy.execution.response_document import embedded_error
from kvparams_proxy.execution.response_privacy import privacy_changes, strip_private_members
from kvparams_proxy.fleet.fleet import Fleet
from tests.support.proxy.fixtures import Scripted, answer, instance

HOST, NAME = "10.9.8.7", "ip-10-9-8-7.ec2.internal"
KNOWN = EngineAddresses(
    ["http://10.9.8.7:8000", "https://vllm-d0.prod:8000", "http://decode:8000", "http://[fd00::7]:8000"]
)
NIXL = {"remote_engine_id": f"{NAME}_dp0", "remote_block_ids": [[1]], "remote_host": HOST, "remote_port": 5600}
KV = {"kv_transfer_params": NIXL}
TRT = {"disaggregated_params": {"request_type": "context_only", "ctx_info_endpoint": f"http://{HOST}:8001"}}
GOOD: dict[str, Any] = {
    "id": "cmpl-r-1",
    "object": "text_completion",
    "created": 1,
    "model": "stub",
    "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}],
    "usage": {"prompt_tokens": 1},
}


# addresses

SECRET = [
    "10.9.8.7",
    "no connection to 10.1.2.3",
    "tcp://10.1.2.3:5600",
    "addr_10.1.2.3_",
    "___prefill_addr_10.1.2.3:1",
    "[fd00:1:2:3::9]:80",
    "fd00::7",
    "from vllm-d0",
    "VLLM-D0.PROD is down",
    "cmpl-vllm-d0-1",
    "decode:8000 has left",
    "node-3.rack-1:8000",
    "localhost",
    "ip-10-1-2-3",
    "engine.default.svc.cluster.local",
    "Traceback (most recent call last): ...",
    "nixl_connector.py, line 7",
]
HARMLESS = [
    "",
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
    "the decode engine refused the request",
    "temperature must be 0.0 to 2.0, top_p 1.0",
    "at most 16:9, at 12:30:45",
    "vLLM 0.32.0",
    "max_tokens:32768",
    "messages[0].content.1.text",
    "std::length_error",
    "5610.91",
]


@pytest.mark.parametrize("text", SECRET)
def test_what_is_or_looks_like_an_address_is_one(text: str) -> None:
    assert KNOWN.occur_in(text)
    assert KNOWN.occur_in(f"a {text}, b")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_engines_say_of_requests_is_no_address(text: str) -> None:
    assert not KNOWN.occur_in(text)
    assert not EngineAddresses([]).occur_in(text)


def test_what_the_client_has_sent_is_no_secret() -> None:
    sent = b'{"image":"http://192.0.2.1:8080/x.png"}'
    assert not KNOWN.occur_in("cannot fetch http://192.0.2.1:8080/x.png", sent)
    assert KNOWN.occur_in("cannot fetch http://192.0.2.1:8080/x.png")
    assert KNOWN.occur_in("cannot fetch http://192.0.2.1:8080/x.png from 10.9.8.7", sent)


async def test_who_comes_and_goes_is_known() -> None:
    """Two engines may be on one machine."""
    loop = asyncio.get_running_loop()
    fleet = Fleet((), {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
    addresses = EngineAddresses()
    fleet.add_listener(addresses)

    def known() -> list[bool]:
        return [addresses.occur_in(f"gpu-{n} is full") for n in (1, 2)]

    assert known() == [False, False]
    for number, place in enumerate((1, 1, 2)):
        fleet.add(instance(Role.DECODE, f"http://gpu-{place}:80{number}0", "nixl", number))
    assert known() == [True, True]
    fleet.remove("decode-0")
    assert known() == [True, True]
    fleet.remove("decode-1")
    assert known() == [True, True]  # its last answer may be on the way
    for _ in range(64):
        fleet.add(instance(Role.DECODE, "http://gpu-3:8000", "nixl", 9))
        fleet.remove("decode-9")
    assert known() == [False, True]


def test_a_host_whose_name_could_be_random_is_found_in_an_id_that_looks_random() -> None:
    """Containers are called so. The control: the same id, where nobody is."""
    for url, stays in (("http://0123456789ab:8000", False), ("http://elsewhere:8000", True)):
        document: dict[str, Any] = GOOD | {"id": "cmpl-0123456789ab"}
        changes = privacy_changes(document, json.dumps(document).encode(), "r-1", EngineAddresses([url]))
        assert ("id" not in changes) is stays


@given(st.text(max_size=300), st.sampled_from(SECRET))
def test_an_address_is_found_whatever_stands_around_it(text: str, secret: str) -> None:
    assert KNOWN.occur_in(f"{text} {secret} {text}")


# answers


def changed(document: dict[str, Any], request_id: str = "r-1") -> dict[str, Any]:
    raw = json.dumps(document).encode()
    changes = privacy_changes(document, raw, request_id, KNOWN)
    return json.loads(edit(raw, find_members(raw), changes))


@pytest.mark.parametrize(
    "id",
    [
        "cmpl-r-1",
        "chatcmpl-r-1",
        "generate-tokens-r-1-0",
        "r-1",
        "cmpl-9f86d081884c7d659a2feaa0c55ad015",
        "9f86d081884c7d659a2feaa0c55ad015",
        "chatcmpl-c9bf9e57-1685-4c89-bafb-ff5af830be8a",
    ],
)
def test_an_opaque_id_stays(id: str) -> None:
    assert changed(GOOD | {"id": id}) == GOOD | {"id": id}


@pytest.mark.parametrize(
    "id",
    [
        "cmpl-r-1-10.9.8.7",
        "cmpl-10.1.2.3:8000-r-1",
        "cmpl-___prefill_addr_10.9.8.7:1___decode_addr_10.9.8.8:2_r-1",
        "cmpl-vllm-d0-r-1",
        "cmpl-ip-10-1-2-3",
        "http://x/1",
        "x" * 200,
        7,
        ["r-1"],
        {"host": HOST},
    ],
)
@pytest.mark.parametrize(("object", "prefix"), [("text_completion", "cmpl"), ("chat.completion.chunk", "chatcmpl")])
def test_an_id_that_says_more_becomes_the_requests(id: object, object: str, prefix: str) -> None:
    got = changed(GOOD | {"id": id, "object": object})
    assert got == GOOD | {"id": f"{prefix}-r-1", "object": object}


def test_an_address_in_the_clients_own_request_id_is_the_clients() -> None:
    assert changed(GOOD | {"id": "cmpl-job.192.0.2.1"}, "job.192.0.2.1")["id"] == "cmpl-job.192.0.2.1"


@pytest.mark.parametrize(
    ("member", "left"),
    [
        (KV, {"kv_transfer_params": None}),
        ({"kv_transfer_params": None}, {"kv_transfer_params": None}),
        ({"ec_transfer_params": None}, {"ec_transfer_params": None}),
        ({"ec_transfer_params": {"peer_host": "x"}}, {}),
        (TRT, {}),
        ({"remote_host": "x"}, {}),
        ({"system_fingerprint": "vllm-0.32.0-tp4+1a2b"}, {"system_fingerprint": "vllm-0.32.0-tp4+1a2b"}),
        ({"system_fingerprint": f"vllm@{NAME}"}, {"system_fingerprint": None}),
        ({"system_fingerprint": 5}, {"system_fingerprint": None}),
        ({"served_by": f"{HOST}:8000"}, {}),
        ({"metadata": {"weight_version": "default"}}, {"metadata": {"weight_version": "default"}}),
        ({"nvext": {"worker_id": {"prefill_worker_id": 3}, "t": 1.5}}, {"nvext": {"worker_id": {}, "t": 1.5}}),
        ({"nvext": {"endpoint": HOST}}, {}),
        ({"service_tier": None, "prompt_token_ids": [1]}, {"service_tier": None, "prompt_token_ids": [1]}),
    ],
)
def test_members_that_say_where_engines_are_go_and_no_others(member: dict[str, Any], left: dict[str, Any]) -> None:
    assert changed(GOOD | member) == GOOD | left
    assert changed(member | GOOD) == GOOD | left


def test_members_of_choices_go_too() -> None:
    """Spec-mandated, 1.0#12.2: TensorRT-LLM has its own there."""
    choices = [
        {"index": 0, "text": f"I am {HOST}", **TRT, **KV},
        {**TRT, "index": 1, "text": '"disaggregated_params": 1'},
    ]
    got = changed(GOOD | {"choices": choices} | KV)
    assert got == GOOD | {
        "kv_transfer_params": None,
        "choices": [{"index": 0, "text": f"I am {HOST}"}, {"index": 1, "text": '"disaggregated_params": 1'}],
    }


def test_generated_text_is_never_touched() -> None:
    text = f'ping {HOST}, "id":"x", {{"kv_transfer_params":{{"remote_host":"{HOST}"}}}}, \\"remote_port\\": 1,'
    for choice in ({"text": text}, {"message": {"role": "assistant", "content": text}}, {"delta": {"content": text}}):
        assert changed(GOOD | {"choices": [choice]}) == GOOD | {"choices": [choice]}
        assert changed(GOOD | {"choices": [choice]} | KV) == GOOD | {"choices": [choice], "kv_transfer_params": None}


NAMES = st.sampled_from(["a", "b", "remote_host", "kv_transfer_params", 'x"remote_host'])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just('"remote_host":1, "remote_port":{'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


def pruned(value: Any) -> Any:
    if isinstance(value, list):
        return [pruned(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {  # pyright: ignore[reportUnknownVariableType]
            name: pruned(item)
            for name, item in value.items()  # pyright: ignore[reportUnknownVariableType]
            if name not in ("remote_host", "kv_transfer_params")
        }
    return value


@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_private_members_go_at_any_depth_and_nothing_else(value: Any, indent: int | None, ascii: bool) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    cut = strip_private_members(raw)
    assert json.loads(cut.decode("utf-8", "surrogatepass")) == pruned(value)
    assert strip_private_members(cut) is cut


# errors


def test_of_an_error_only_what_is_plain_is_told() -> None:
    plain = {"message": "prompt is too long", "type": "BadRequestError", "param": "messages[0].content", "code": 400}
    assert public_error(plain, KNOWN, b"") == PublicError(
        "prompt is too long", "BadRequestError", "messages[0].content", 400
    )
    leaky = {"message": f"no connection to {HOST}", "type": f"at {HOST}", "param": HOST, "code": NAME}
    assert public_error(leaky, KNOWN, b"") == PublicError(None, None, None, None)
    assert public_error({"message": {}, "type": 1, "param": [], "code": True}, KNOWN, b"") == PublicError(
        None, None, None, None
    )
    assert (
        public_error({"message": "", "code": "context_length_exceeded"}, KNOWN, b"").code == "context_length_exceeded"
    )
    assert len(public_error({"message": "x" * 100_000}, KNOWN, b"").message or "") == 4096


def test_an_error_is_told_from_an_answer() -> None:
    error = {"message": "x", "code": 500}
    assert embedded_error({"error": error}) == error
    assert embedded_error({"object": "error"} | error) == {"object": "error"} | error
    assert embedded_error({"error": "x"}) == {"message": "x"}
    for document in (GOOD, GOOD | {"error": None}, {}):
        assert embedded_error(document) is None


# through the proxy: every place that an engine has for saying where it is

ROLES = ("prefill", "decode")
BODY: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 4}
BAD = {
    "id": GOOD | {"id": f"cmpl-{HOST}:8000-1"},
    "fingerprint": GOOD | {"system_fingerprint": NAME},
    "member": GOOD | {"served_by": f"http://{HOST}:8000"},
    "choice": GOOD | {"choices": [{"index": 0, "text": "x", **TRT}]},
    "first member": KV | GOOD,
    "last member": GOOD | KV,
}
ERROR = {"message": f"{NAME} lost {HOST}:5600", "type": f"Error {HOST}", "param": HOST, "code": NAME}
REFUSALS = {
    "400": (b"400 Bad Request", {"error": ERROR}),
    "400 of old": (b"400 Bad Request", {"object": "error"} | ERROR),
    "422": (b"422 Unprocessable", {"detail": [{"loc": [HOST], "msg": NAME}]}),
    "429": (b"429 Too Many Requests", {"error": ERROR}),
    "no object": (b"400 Bad Request", f"at {HOST}"),
}
HEADERS = (
    f"server: {NAME}\r\nvia: 1.1 {NAME}\r\nx-served-by: {HOST}:8000\r\nset-cookie: node={HOST}\r\n"
    f"location: http://{HOST}/\r\nretry-after: 7\r\nx-request-id: {HOST}\r\n"
).encode()
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; host=%b\r\n%bconnection: close\r\n\r\n" % (
    HOST.encode(),
    HEADERS,
)


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def whole(document: object, status: bytes = b"200 OK") -> Any:
    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(json.dumps(document).encode(), status=status, extra=HEADERS))

    return script


def streaming(*events: bytes) -> Any:
    """Each event in a packet of its own; the first goes ahead, so that a stream has begun when the others come."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        for piece in events:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        raise ConnectionResetError

    return script


def say_nothing(got: Any, *engines: Scripted) -> None:
    """Nothing in an answer, body or headers, says where an engine is."""
    seen = got.content + b"\n".join(b"%b: %b" % pair for pair in got.headers.raw)
    for secret in (HOST, "ip-10-9", "127.0.0.1", ":5600", *(f":{engine.port}" for engine in engines)):
        assert secret.encode() not in seen, seen


def by_prompt(scripts: dict[str, Any]) -> Any:
    """The script that the request's prompt names."""

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await scripts[json.loads(body)["prompt"]](body, reader, writer)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_nothing_of_engines(scripted: Any, proxy: Any, stream: bool) -> None:
    def says(document: dict[str, Any]) -> Any:
        frame = event(document | {"usage": None})
        return streaming(frame, frame, event(document), b"data: [DONE]\n\n") if stream else whole(document)

    prefill = await scripted(by_prompt({case: whole(document | KV) for case, document in BAD.items()}))
    decode = await scripted(by_prompt({case: says(document) for case, document in BAD.items()}))
    running = await proxy([prefill.url], [decode.url], expose_route=False, addresses=(HOST,))
    for case in BAD:
        got = await running.client.post("/v1/completions", json=BODY | {"stream": stream, "prompt": case})
        assert got.status_code == 200, case
        say_nothing(got, prefill, decode)
        if stream:
            chunks = [json.loads(line[6:]) for line in got.text.split("\n\n") if line.startswith("data: {")]
            assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x"] * 3
            assert got.text.endswith("data: [DONE]\n\n")
            assert len({chunk["id"] for chunk in chunks}) == 1
        else:
            assert got.json()["choices"][0]["text"] == "x"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_says_nothing_of_engines(scripted: Any, proxy: Any, role: str, stream: bool) -> None:
    refuse = by_prompt({case: whole(document, status) for case, (status, document) in REFUSALS.items()})
    engines = {r: await scripted(refuse if r == role else whole(GOOD | KV)) for r in ROLES}
    running = await proxy([engines["prefill"].url], [engines["decode"].url], expose_route=False, addresses=(HOST,))
    for case, (status, _) in REFUSALS.items():
        got = await running.client.post("/v1/completions", json=BODY | {"stream": stream, "prompt": case})
        assert got.status_code == int(status[:3])
        assert role in got.json()["error"]["message"]
        say_nothing(got, *engines.values())


@pytest.mark.parametrize("status", [b"500 Internal Server Error", b"200 OK"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_says_nothing_of_engines(
    scripted: Any, proxy: Any, status: bytes, role: str, stream: bool
) -> None:
    """Also one that calls itself 200."""
    fail = whole({"error": ERROR}, status)
    engines = {r: await scripted(fail if r == role else whole(GOOD | KV)) for r in ROLES}
    running = await proxy([engines["prefill"].url], [engines["decode"].url], expose_route=False, addresses=(HOST,))
    got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
    assert got.status_code >= 500
    assert role in got.json()["error"]["message"]
    say_nothing(got, *engines.values())


@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("document", [{"error": ERROR}, {"object": "error"} | ERROR])
async def test_an_error_in_a_stream_says_nothing_of_engines(
    scripted: Any, proxy: Any, begun: int, document: Any
) -> None:
    """Before the first event it is an error like any other; behind it, an event that says only what went wrong."""
    frame = event(GOOD | {"usage": None})
    prefill = await scripted(whole(GOOD | KV))
    decode = await scripted(streaming(*[frame] * begun, event(document), b"data: [DONE]\n\n"))
    running = await proxy([prefill.url], [decode.url], expose_route=False, addresses=(HOST,))
    got = await running.client.post("/v1/completions", json=BODY | {"stream": True})
    say_nothing(got, prefill, decode)
    if not begun:
        assert got.status_code >= 400
        return
    assert got.content.startswith(frame * begun)
    rest = got.text.removeprefix((frame * begun).decode())
    assert json.loads(rest.split("\n\n")[0].removeprefix("data: "))["error"]["message"]


async def test_an_engine_that_cannot_be_reached_says_nothing_of_itself(scripted: Any, proxy: Any) -> None:
    prefill, decode = await scripted(whole(GOOD | KV)), await scripted(whole(GOOD))
    for urls in ((["http://127.0.0.1:1"], [decode.url]), ([prefill.url], ["http://localhost:1"])):
        running = await proxy(*urls, expose_route=False, addresses=(HOST,))
        for path in ("/v1/completions", "/health", "/v1/models", "/nothing"):
            got = await (running.client.post(path, json=BODY) if "comp" in path else running.client.get(path))
            say_nothing(got, prefill, decode)


async def test_the_list_of_models_has_names_and_no_more(proxy: Any, stack: Any) -> None:
    card = {"id": "stub", "root": f"/mnt/{NAME}/weights", "owned_by": NAME, "permission": [{"host": HOST}]}
    models = answer(json.dumps({"object": "list", "data": [card]}).encode(), extra=HEADERS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(models)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stack.callback(server.close)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    running = await proxy([url], [url])
    got = await running.client.get("/v1/models")
    assert [model["id"] for model in got.json()["data"]] == ["stub"]
    say_nothing(got)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_model_writes_of_addresses_reaches_its_client(scripted: Any, proxy: Any, stream: bool) -> None:
    """The control: an address is no secret in generated text, nor in what the client itself has sent."""
    text = f'ping {HOST} from {NAME}: "kv_transfer_params", "error":'
    document = GOOD | {"choices": [{"index": 0, "text": text}]}
    script = streaming(event(document), b"data: [DONE]\n\n") if stream else whole(document)
    prefill, decode = await scripted(whole(GOOD | KV)), await scripted(script)
    running = await proxy([prefill.url], [decode.url], addresses=(HOST,))
    got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
    sent = json.loads(got.text.split("\n\n")[0].removeprefix("data: "))
    assert sent["choices"][0]["text"] == text


async def test_a_refusal_may_repeat_what_the_client_has_sent(scripted: Any, proxy: Any) -> None:
    said = f"cannot fetch http://{HOST}:8000/x.png"
    prefill = await scripted(whole({"error": {"message": said, "type": "BadRequestError"}}, b"400 Bad Request"))
    running = await proxy([prefill.url], [(await scripted(whole(GOOD))).url])
    for prompt, message in ((f"http://{HOST}:8000/x.png", said), ("x", None)):
        got = await running.client.post("/v1/completions", json=BODY | {"prompt": prompt})
        assert got.status_code == 400
        assert (got.json()["error"]["message"] == said) is (message is not None)
