"""Compares what a proxy does with a case of spec/draft/vectors/exchanges.json."""

import json
import re
from typing import Any, Final, cast

from kvparams_conformance.conversation import ScriptedAnswer, SeenLeg
from kvparams_conformance.site import Site, Trial

__all__ = ["differences", "replay"]

_TTL: Final = re.compile(r"\$ttl:(\d+)")
_TTL_SLACK_MS: Final = 5000
_FREE: Final = ("$any", "$text", "$absent-or-null")


async def replay(site: Site, case: dict[str, Any]) -> list[str]:
    """Returns what a proxy does otherwise than the case says."""
    bound: dict[str, object] = {}
    found: list[str] = []

    def answer(leg: SeenLeg) -> ScriptedAnswer:
        wanted = case.get(leg.role)
        if wanted is None:
            found.append(f"a {leg.role} leg was sent")
        elif len(talk.of(leg.role)) == 1:  # a further try has other ids
            found.extend(differences(_plain(wanted, talk.tag), leg.json, bound, leg.role))
        made: dict[str, Any] = case.get(f"{leg.role}_answer") or {"status": 500, "body": {}}
        if "stream" in made:
            return ScriptedAnswer(content_type="text/event-stream", parts=(made["stream"].encode(),))
        return ScriptedAnswer(made["status"], json.dumps(_fill(made["body"], bound)).encode())

    trial = Trial(site)
    talk = trial.talk(answer, answer)
    client: Any = case["client"]
    text: str = client if isinstance(client, str) else json.dumps(_plain(client, talk.tag))
    reply = await trial.ask(talk, text.encode(), path=case.get("path", "/v1/completions"), headers=_tagged(talk.tag))
    for role in ("prefill", "decode"):
        if role in case and not talk.of(role):
            found.append(f"no {role} leg was sent")
    wanted: dict[str, Any] = case["answer"]
    if reply.status != wanted["status"]:
        found.append(f"the client got the status {reply.status}")
    if "stream" in wanted:
        told, sent = ([json.loads(one) for one in _events(text)] for text in (wanted["stream"], reply.body.decode()))
        found.extend(differences(told, sent, bound, "stream"))
    else:
        found.extend(differences(wanted["body"], reply.json, bound, "answer"))
    return found


def differences(wanted: Any, told: Any, bound: dict[str, object], path: str) -> list[str]:
    """Returns where a value is not as a vector has it. `bound` keeps what the names of the vector stand for."""
    if isinstance(wanted, str) and wanted.startswith("$"):
        return _named(wanted, told, bound, path)
    if isinstance(wanted, dict) and isinstance(told, dict):
        one, other = cast("dict[str, Any]", wanted), cast("dict[str, Any]", told)
        found: list[str] = []
        for name in sorted(one.keys() | other.keys()):
            if name not in one:
                found.append(f"{path}.{name} is there")
            elif name in other or one[name] not in ("$any", "$absent-or-null"):
                found += differences(one[name], other.get(name, ...), bound, f"{path}.{name}")
        return found
    if isinstance(wanted, list) and isinstance(told, list):
        ours, theirs = cast("list[Any]", wanted), cast("list[Any]", told)
        if len(ours) != len(theirs):
            return [f"{path} has {len(theirs)} entries"]
        return [text for at, one in enumerate(ours) for text in differences(one, theirs[at], bound, f"{path}.{at}")]
    same = wanted == told and isinstance(told, bool) == isinstance(wanted, bool)
    return [] if same else [f"{path} is {told!r}, not {wanted!r}"]


def _named(name: str, told: Any, bound: dict[str, object], path: str) -> list[str]:
    if name == "$absent-or-null":
        return [] if told is None else [f"{path} is {told!r}"]
    if name == "$text":
        return [] if isinstance(told, str) and told else [f"{path} is {told!r}"]
    if name == "$any":
        return []
    if ttl := _TTL.fullmatch(name):
        most = int(ttl[1])
        is_fitting = type(told) is int and most - _TTL_SLACK_MS <= told <= most
        return [] if is_fitting else [f"{path} is {told!r}"]
    if bound.setdefault(name, told) != told or not isinstance(told, str):
        return [f"{path} is {told!r}, and {name} is {bound[name]!r}"]
    return []


def _fill(value: Any, bound: dict[str, object]) -> Any:
    """Returns an engine's answer with the names of the vector replaced by what they stand for."""
    if isinstance(value, str):
        return bound.get(value, value) if value not in _FREE else value
    if isinstance(value, dict):
        return {name: _fill(one, bound) for name, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_fill(one, bound) for one in cast("list[Any]", value)]
    return value


def _plain(body: dict[str, Any], tag: str) -> dict[str, Any]:
    """Returns a body with the tag by which the scripted engines know it, in a member that goes through."""
    return {**body, "user": tag}


def _tagged(tag: str) -> list[tuple[str, str]]:
    return [("x-request-id", f"req-{tag}")]


def _events(stream: str) -> list[str]:
    return [line[6:] for line in stream.split("\n") if line.startswith("data: {")]
