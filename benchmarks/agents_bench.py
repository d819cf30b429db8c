"""CPU of the proxy per request of `/v1/messages` and `/v1/responses`, over that of a chat with the same tokens.

    python -m benchmarks.agents_bench [--rounds N] [--requests N] [--tokens N] [--prompt BYTES]

Two engines that answer at once stand behind a real proxy, which splits every request (NIXL). Each round sends the same
traffic to the three endpoints, in an order drawn anew; ratios are those of a round. Measure on a machine that does
nothing else.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.ratios import median_interval
from demo.processes import Processes, Server, free_port
from tests.support.processes import tree_usage

__all__ = ["main"]

_AT_ONCE: Final = 16
_WARM: Final = 200
_LIMIT_S: Final = 300.0
_WORD: Final = " token"
_PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
_NIXL: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _usage(api: str, tokens: int, cached: int) -> dict[str, Any]:
    """Returns how each API says that so many tokens of a prompt of 100 were cached."""
    if api == "chat":
        counts = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
    if api == "messages":
        counts = {"input_tokens": 100 - cached, "output_tokens": tokens}
        return {**counts, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    details: dict[str, Any] = {"cached_tokens": cached, "input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    counts = {"input_tokens": 100, "output_tokens": tokens, "total_tokens": 100 + tokens}
    return {**counts, "input_tokens_details": details, "output_tokens_details": {"reasoning_tokens": 0}}


def _whole(api: str, tokens: int, cached: int) -> dict[str, Any]:
    """Returns a whole answer, as vLLM 0.32.0 writes it."""
    text, usage = _WORD * tokens, _usage(api, tokens, cached)
    if api == "chat":
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
        return {**head, "choices": [choice], "usage": usage}
    if api == "messages":
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "max_tokens"}
        return {**head, "content": [{"type": "text", "text": text}], "stop_sequence": None, "usage": usage}
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    said: dict[str, Any] = {"tools": [], "tool_choice": "auto", "temperature": 0.0, "top_p": 1.0, "background": False}
    more = {"parallel_tool_calls": True, "truncation": "disabled", "instructions": None, "metadata": None}
    return {**head, **said, **more, "output": [item], "usage": usage, "kv_transfer_params": None}


def _events(api: str, tokens: int) -> list[bytes]:
    """Returns a stream, an event for each token."""
    whole = _whole(api, tokens, 99)
    if api == "chat":
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        deltas = [{"role": "assistant", "content": ""}, *[{"content": _WORD}] * tokens]
        choices = ([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}] for delta in deltas)
        chunks: list[dict[str, Any]] = [{**head, "choices": choice} for choice in choices]
        chunks.append({**head, "choices": [], "usage": whole["usage"]})
        return [*(b"data: %b\n\n" % _json(chunk) for chunk in chunks), b"data: [DONE]\n\n"]
    begun: dict[str, Any]
    if api == "messages":
        begun = {**whole, "content": [], "stop_reason": None, "usage": {"input_tokens": 100, "output_tokens": 0}}
        named: list[tuple[str, dict[str, Any]]] = [
            ("message_start", {"message": begun}),
            ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
            *[("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": _WORD}})] * tokens,
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": {"stop_reason": "max_tokens"}, "usage": whole["usage"]}),
            ("message_stop", {}),
        ]
    else:
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        item, part = whole["output"][0], whole["output"][0]["content"][0]
        named = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            ("response.output_item.added", {"output_index": 0, "item": {**item, "content": []}}),
            ("response.content_part.added", {**where, "part": {**part, "text": ""}}),
            *[("response.output_text.delta", {**where, "delta": _WORD, "logprobs": []})] * tokens,
            ("response.output_text.done", {**where, "text": part["text"], "logprobs": []}),
            ("response.content_part.done", {**where, "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": item}),
            ("response.completed", {"response": whole}),
        ]
        named = [(name, {"sequence_number": number, **members}) for number, (name, members) in enumerate(named)]
    return [b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **more})) for name, more in named]


async def _serve_engine(role: str, port: int, tokens: int) -> None:
    """Answers legs at once; a stream leaves in pieces of one event."""
    params: dict[str, Any] = {"kv_transfer_params": _NIXL} if role == "prefill" else {}
    models = {"object": "list", "data": [{"id": "m"}]}
    answers = {path: _json(_whole(api, tokens, 64) | params) for api, path in _PATHS.items()}
    streams = {path: _events(api, tokens) for api, path in _PATHS.items()}
    plain = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                if head.startswith(b"GET"):
                    writer.write(plain % (len(_json(models)), _json(models)))
                    continue
                body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                if b'"stream":true' in body:
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    )
                    for event in streams[path]:
                        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                        await asyncio.sleep(0)
                    writer.write(b"0\r\n\r\n")
                else:
                    writer.write(plain % (len(answers[path]), answers[path]))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()


async def _send(port: int, api: str, count: int, prompt: str, tokens: int, *, stream: bool) -> None:
    """Sends so many requests, some at once. A wrong answer ends the run."""
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if api == "chat" and stream else {}
    said = {"input": prompt} if api == "responses" else {"messages": [{"role": "user", "content": prompt}]}
    body = _json({"model": "m", limit: tokens, "stream": stream, **more, **said})
    head = f"POST {_PATHS[api]} HTTP/1.1\r\nhost: p\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    raw = head.encode() + b"\r\n\r\n" + body
    last = {"chat": b"[DONE]", "messages": b"message_stop", "responses": b"response.completed"}[api]

    async def lane(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(number):
            writer.write(raw)
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in answered:
                raise RuntimeError(f"{api}: {answered!r}")
            if stream:
                await reader.readuntil(last)
                await reader.readuntil(b"0\r\n\r\n")
            else:
                await reader.readexactly(int(answered.split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()

    async with asyncio.timeout(_LIMIT_S):
        await asyncio.gather(*(lane(count // _AT_ONCE) for _ in range(_AT_ONCE)))


def _measure(options: argparse.Namespace) -> None:
    prompt = ("It was the best of times. " * (options.prompt // 26 + 1))[: options.prompt]
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        engines: list[Server] = []
        for role in ("prefill", "decode"):
            port = free_port()
            command = (sys.executable, "-m", "benchmarks.agents_bench", "--engine", role, "--port", str(port))
            engines.append(processes.start(role, *command, "--tokens", str(options.tokens), port=port))
        proxy = processes.proxy(engines[:1], engines[1:], "--log-requests", "off", connector="nixl")
        processes.wait_ready(*engines, proxy)
        port = int(proxy.url.rpartition(":")[2])
        for stream in (False, True):
            spent: dict[str, list[float]] = {api: [] for api in _PATHS}
            for turn in range(options.rounds + 1):
                for api in draw.sample(list(_PATHS), len(_PATHS)):
                    count = options.requests if turn else _WARM
                    before = tree_usage(proxy.process.pid).cpu_s
                    asyncio.run(_send(port, api, count, prompt, options.tokens, stream=stream))
                    if turn:
                        spent[api].append((tree_usage(proxy.process.pid).cpu_s - before) / count)
            said = [f"chat {1e6 * median_interval(spent['chat']).median:.0f} us"]
            for api in ("messages", "responses"):
                ratios = [one / chat for one, chat in zip(spent[api], spent["chat"], strict=True)]
                said.append(f"{api} {median_interval(ratios)}")
            print(f"{'stream' if stream else 'whole'}, {options.tokens} tokens: {', '.join(said)}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark, or one of its engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=1600, help="to each endpoint in a round")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--prompt", type=int, default=800, help="bytes")
    parser.add_argument("--engine", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        asyncio.run(_serve_engine(options.engine, options.port, options.tokens))
    else:
        _measure(options)


if __name__ == "__main__":
    main(sys.argv[1:])
