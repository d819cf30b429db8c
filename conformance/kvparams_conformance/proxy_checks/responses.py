"""Checks what a client sees: the answer of decode, and nothing of the engines."""

import json
import re
from collections.abc import Callable
from typing import Any, Final

from kvparams_conformance.answers import CACHED_TOKENS, completion, stream
from kvparams_conformance.checks import Checks, NotJudged, expect
from kvparams_conformance.conversation import Reply, ScriptedAnswer, SeenLeg
from kvparams_conformance.proxy_checks.helpers import AGGREGATED, CONTENT, EVERY, STORE, WITH_RESULT, expect_answered
from kvparams_conformance.raw_json import dig, dump
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_SECRET: Final = "10.9.8.7"
_PARAMS: Final = {"remote_host": _SECRET, "kvparams": {"producer": {"id": "secret-engine", "address": f"{_SECRET}:1"}}}
_TEXTS: Final = ["äö", "\u2028", "€x", "last"]


def _with_params(leg: SeenLeg) -> ScriptedAnswer:
    return ScriptedAnswer(body=dump(completion(leg, "answer", kv_transfer_params=_PARAMS)))


def _expect_private(reply: Reply) -> None:
    text = reply.body.decode("utf-8", "replace") + str(reply.headers)
    for secret in (_SECRET, "secret-engine", "remote_host"):
        expect(secret not in text, f"the client was sent {secret!r}")


@CHECKS.add(
    "12.2",
    "json",
    sends="a decode answer in JSON with `kv_transfer_params`",
    expects="the client gets the answer without it",
    profiles=(*WITH_RESULT, CONTENT, AGGREGATED),
)
async def check_json(trial: Trial) -> None:
    """Answers with a `decode_result`."""
    talk = trial.talk(decode=_with_params)
    reply = await trial.ask(talk)
    expect_answered(talk, reply)
    _expect_private(reply)
    expect(not reply.json.get("kv_transfer_params"), "the client was sent `kv_transfer_params`")
    expect("answer" in reply.body.decode(), "the client was not sent the answer")


@CHECKS.add(
    "12.2",
    "stream",
    sends="a stream whose events have `kv_transfer_params`",
    expects="the client gets the events without it",
    profiles=(*WITH_RESULT, CONTENT, AGGREGATED),
)
async def check_stream(trial: Trial) -> None:
    """Streams events with KV parameters, whole and cut into small parts."""
    cuts: tuple[Callable[[bytes], tuple[bytes | float, ...]], ...] = (lambda text: (text,), _pieces(7), _pieces(1))
    for cut in cuts:
        talk = trial.talk(
            decode=lambda leg, cut=cut: stream(leg, _TEXTS, cut=cut, members={"kv_transfer_params": _PARAMS})
        )
        reply = await trial.ask(talk, stream=True)
        expect_answered(talk, reply)
        _expect_private(reply)


def _pieces(size: int) -> Callable[[bytes], tuple[bytes | float, ...]]:
    return lambda text: tuple(text[at : at + size] for at in range(0, len(text), size))


@CHECKS.add(
    "17.18",
    "relay",
    sends="a stream that is cut at every byte",
    expects="the client gets the same texts in the same order, and `[DONE]`",
    profiles=EVERY,
)
async def check_relay(trial: Trial) -> None:
    """Streams whole, in two parts at odd places, and byte by byte."""
    cuts: list[Callable[[bytes], tuple[bytes | float, ...]]] = [lambda text: (text,), _pieces(1)]
    cuts += map(_two_parts, (1, 2, 15, 16))
    for cut in cuts:
        talk = trial.talk(decode=lambda leg, cut=cut: stream(leg, _TEXTS, cut=cut))
        reply = await trial.ask(talk, stream=True)
        expect_answered(talk, reply)
        expect(_texts(reply) == _TEXTS, f"the client was sent the texts {_texts(reply)!r} instead of {_TEXTS!r}")
        expect(reply.events[-1:] == ["[DONE]"], "the client was not sent `[DONE]` last")


def _two_parts(at: int) -> Callable[[bytes], tuple[bytes | float, ...]]:
    return lambda text: (text[:-at], 0.01, text[-at:])


def _texts(reply: Reply) -> list[str]:
    events: list[dict[str, Any]] = [json.loads(event) for event in reply.events if event.startswith("{")]
    return [event["choices"][0]["text"] for event in events if event.get("choices")]


@CHECKS.add(
    "17.18",
    "pace",
    sends="a stream that pauses for a second after its first event",
    expects="the client gets the first event within half a second",
    profiles=EVERY,
)
async def check_pace(trial: Trial) -> None:
    """Looks whether a stream is held back."""
    talk = trial.talk(decode=lambda leg: stream(leg, ["first", "second"], cut=_after_first_event))
    seen: list[float] = []

    def watch(reply: Reply) -> bool:
        if b"first" in reply.body and b"second" not in reply.body:
            seen.append(1.0)
            return True
        return False

    await trial.ask(talk, stream=True, leave_when=watch, timeout_s=4.0)
    expect(seen, "the client was not sent the first event before the second was there")


def _after_first_event(text: bytes) -> tuple[bytes | float, ...]:
    at = text.index(b"\n\n") + 2
    return text[:at], 1.0, text[at:]


@CHECKS.add(
    "17.19",
    "cut-stream",
    sends="a decode stream that ends without `[DONE]`, with its connection closed or not",
    expects="the client's stream does not end with `[DONE]` alone: it is cut, or has an error event",
    profiles=EVERY,
    isolated=True,
)
async def check_cut_stream(trial: Trial) -> None:
    """Ends a stream early, in two ways."""
    for end in ("cut", "whole"):
        talk = trial.talk(decode=lambda leg, end=end: stream(leg, ["one", "two"], done=False, end=end))
        reply = await trial.ask(talk, stream=True)
        tells = reply.ended != "whole" or any('"error"' in event for event in reply.events)
        expect(tells or "[DONE]" not in reply.events, "the client was told `[DONE]` for a stream that was cut off")
        if end == "cut":
            expect(tells or reply.status >= 500, "the client was not told that the stream was cut off")


@CHECKS.add(
    "17.20",
    "cached-tokens",
    sends="a completion and a stream; prefill has counted cached tokens",
    expects="`usage.prompt_tokens_details` of the client is prefill's",
    profiles=(STORE,),
)
async def check_cached_tokens(trial: Trial) -> None:
    """Reads the client's usage."""
    talk = trial.talk()
    reply = await trial.ask(talk)
    expect_answered(talk, reply)
    usage: dict[str, Any] = reply.json.get("usage") or {}
    told = dig(usage, "prompt_tokens_details", "cached_tokens")
    expect(told == CACHED_TOKENS, f"the client was told {told!r} cached tokens instead of {CACHED_TOKENS}")
    expect(
        usage.get("completion_tokens") == 8,
        f"the client was told {usage.get('completion_tokens')!r} tokens instead of 8",
    )


@CHECKS.add(
    "17.21",
    "client-id",
    sends="a request with `X-Request-Id`",
    expects="the answer has the same `X-Request-Id`",
    profiles=(STORE,),
    choice=True,
)
async def check_client_id(trial: Trial) -> None:
    """Reads the id of the answer."""
    talk = trial.talk()
    reply = await trial.ask(talk, headers=[("x-request-id", "req-4711")])
    expect_answered(talk, reply)
    expect(reply.get("x-request-id") == "req-4711", f"the client was sent X-Request-Id {reply.get('x-request-id')!r}")


@CHECKS.add(
    "12.5",
    "logs",
    sends="a request with a salt; prefill answers with keys",
    expects="the proxy's output has neither the salt, nor a key, nor the KV's producer",
    profiles=(STORE,),
    isolated=True,
)
async def check_logs(trial: Trial) -> None:
    """Reads what the proxy has written to its standard output and error."""
    if not trial.site.can_read_logs:
        raise NotJudged("the kit sees the proxy's log only where it has started the proxy")
    talk = trial.talk()
    salt = f"salt-{talk.tag[3:13]}"
    prefill, _ = expect_answered(talk, await trial.ask(talk, cache_salt=salt))
    failing = trial.talk(lambda leg: ScriptedAnswer(500, b'{"error":{"message":"failed"}}'))
    await trial.ask(failing, cache_salt=salt)
    await talk.wait_for(lambda: False, 0.3)
    log = trial.site.program.output
    if not trial.site.program.is_output_whole:
        raise NotJudged("the proxy has written more than the kit keeps")
    for what, secret in (
        ("the salt", salt),
        ("a key", f"agreed.{talk.tag}"),
        ("an instance", f"{prefill.engine}-{talk.tag}"),
    ):
        expect(secret not in log, f"{what} stands in the log: {_line(log, secret)}")


def _line(log: str, text: str) -> str:
    found = re.search(rf"^.*{re.escape(text)}.*$", log, re.MULTILINE)
    return found[0][:300] if found else ""
