"""Names that clients give to images, audio and video: kept from engines, which take such a name for the content.

vLLM 0.32.0 takes a client's `uuid` of a medium for the hash of what is in it (multimodal/processing/inputs.py,
`get_mm_hashes`): in its processor and encoder caches, in its prefix cache, and in what it tells KV connectors. Whoever
names a picture by the hash of another one has the other one answered from its own. The same holds of the hashes that
stand in `features` of `/inference/v1/generate`.

So a `uuid` is taken out, and the engine hashes the content itself. Hashes in `features` must be there, so they are
bound to the tenant, in a form that no engine takes for a hash of its own.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from typing import Final, cast

from pydantic_core import from_json, to_json

from kvparams.jsontext.document import MemberSpan, find_members
from kvparams.jsontext.editing import edit, edit_with_spans, remove_ranges, shift_spans
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import tenant_cache_salt
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.forbidden_fields import MEDIA_UUID_MEMBER

__all__ = ["media_uuid_changes", "strip_media_uuids_in_steps"]

_WITH_MESSAGES: Final = ("messages", "input", "query", "queries", "documents", "data_1", "data_2", "text_1", "text_2")
"""Members of endpoints other than chat that hold messages, or what has content as messages have it (vLLM 0.32.0
entrypoints: responses, tokenize, pooling)."""
_SEARCHED: Final[Mapping[EndpointKind, tuple[str, ...]]] = {
    "chat": ("messages",),
    "messages": ("messages",),
    "responses": ("input",),
    "generate": ("content_parts",),
}
_CONTENT: Final = ("content", "output")
"""Where the parts of a message stand; `output`: of a tool, in `/v1/responses`."""
_MIXED: Final = (dict, str)
_NOTHING: Final[Mapping[str, bytes | None]] = {}
_NAMED: Final = re.compile(
    rb'(?<!\\)"(?:u|\\u0075){2}(?:i|\\u0069)(?:d|\\u0064)"[ \t\r\n]*:[ \t\r\n]*'
    rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|null|true|false|-?[0-9][0-9.eE+-]*+)[ \t\r\n]*'
)
"""A member `uuid`, its letters written as they are or as escapes, with a value that is no container. A quote within a
string follows a backslash, so this is never found inside one."""
_WINDOW_BYTES: Final = 64 << 10
_LONGEST_NAME: Final = 4096
"""A name may reach so far from one window into the next."""


def media_uuid_changes(
    kind: EndpointKind, document: Mapping[str, object], body: bytes, spans: Mapping[str, MemberSpan], tenant: str
) -> Mapping[str, bytes | None]:
    """Returns the changes to a body that remove the client's names of media.

    They are as for `kvparams.jsontext.editing.edit`.

    Args:
        kind: of the request.
        document: what the body parses to.
        body: its text.
        spans: where its members stand.
        tenant: who asks; empty where clients have no keys.

    Raises:
        ProxyError: 400, a medium has a name and nothing else.
    """
    if kind in ("chat", "messages"):
        messages = document["messages"]
        for message in cast("list[dict[str, object]]", messages):  # most requests have no list in it
            content = message.get("content")
            if type(content) is list and any(map(_has_name, cast("list[object]", content))):
                return {"messages": to_json(_unnamed(messages, "messages"))}
        return _NOTHING
    if kind == "generate":
        return _generate(document, body, spans, tenant)
    return {
        name: to_json(_unnamed(document[name], name))
        for name in _SEARCHED.get(kind, _WITH_MESSAGES)
        if name in document and _is_named(document[name])
    }


def strip_media_uuids_in_steps(
    kind: EndpointKind,
    body: bytes,
    spans: Mapping[str, MemberSpan],
    tenant: str,
    features: Mapping[str, MemberSpan] | None = None,
) -> Generator[None, None, tuple[bytes, Mapping[str, MemberSpan]]]:
    """Does the same to a long body, whose messages are not parsed: in steps, by cutting the names out of the text.

    Args:
        kind: of the request.
        body: its text.
        spans: where its members stand.
        tenant: who asks.
        features: where the members of `features` stand in its text, if that is long.

    Returns:
        The body and where its members stand, both as they were where there is nothing to change.

    Raises:
        ProxyError: 400, a name is too long, or the hashes of media are.
    """
    cuts: list[tuple[int, int]] = []
    for name in _SEARCHED.get(kind, _WITH_MESSAGES):
        if (field := spans.get(name)) is not None:
            yield from _find_names(body, field, cuts)
    if cuts:
        cuts.sort()
        spans = shift_spans(spans, cuts)
        body = remove_ranges(body, cuts)
        yield
    place = spans.get("features") if kind == "generate" else None
    if place is None or body[place.value] != 0x7B:
        return body, spans
    raw = body[place.value : place.end]
    inside = find_members(raw) if features is None else features
    hashes = inside.get("mm_hashes")
    if hashes is None:
        return body, spans
    if hashes.end - hashes.value > _WINDOW_BYTES:
        raise _refused("features", "`features.mm_hashes` is too long")
    found: object = from_json(raw[hashes.value : hashes.end])
    if type(found) is not dict:
        return body, spans
    bound = {modality: _bound(names, tenant) for modality, names in cast("dict[str, object]", found).items()}
    yield
    raw = edit(raw, inside, {"mm_hashes": to_json(bound)})
    yield
    return edit_with_spans(body, spans, {"features": raw})


def _find_names(body: bytes, field: MemberSpan, cuts: list[tuple[int, int]]) -> Generator[None]:
    """Adds to `cuts` where names stand in a member, with the comma that goes with each, window by window."""
    at = field.value
    while at < field.end:
        end = min(field.end, at + _WINDOW_BYTES)
        stop = min(field.end, end + _LONGEST_NAME)
        if not _may_name(body, at, stop):
            at = end
            yield
            continue
        for found in _NAMED.finditer(body, at, stop):
            if found.start() >= end:
                break
            start, behind = found.span()
            if behind >= stop < field.end:
                raise _refused("messages", f"a `{MEDIA_UUID_MEMBER}` must have at most {_LONGEST_NAME} characters")
            if body[behind] == 0x2C:
                behind += 1
            else:  # it is the last member: the comma before it goes
                before = max(body.rfind(b",", 0, start), body.rfind(b"{", 0, start))
                start = before if body[before] == 0x2C and not (cuts and cuts[-1][1] > before) else before + 1
            cuts.append((start, behind))
            end = max(end, behind)
        at = end
        yield


def _may_name(body: bytes, start: int, end: int) -> bool:
    """Returns whether `body[start:end]` may contain a name. The pattern is slow to find none, as in a long picture."""
    if body.find(b'"', start, end) < 0:
        return False
    if body.find(b'uuid"', start, end) >= 0:
        return True
    return body.find(b"\\", start, end) >= 0 and body.find(b"\\u00", start, end) >= 0


def _refused(name: str, message: str) -> ProxyError:
    return ProxyError(400, "invalid_request_error", message, param=name, code="invalid_value")


def _generate(
    document: Mapping[str, object], body: bytes, spans: Mapping[str, MemberSpan], tenant: str
) -> Mapping[str, bytes | None]:
    changes: dict[str, bytes | None] = {}
    parts = _list(document.get("content_parts"))
    if any(map(_has_name, parts)):
        changes["content_parts"] = to_json([_part(part, "content_parts") for part in parts])
    features = document.get("features")
    hashes = cast("dict[str, object]", features).get("mm_hashes") if type(features) is dict else None
    if type(hashes) is dict:
        bound = {modality: _bound(names, tenant) for modality, names in cast("dict[str, object]", hashes).items()}
        raw = body[spans["features"].value : spans["features"].end]
        changes["features"] = edit(raw, find_members(raw), {"mm_hashes": to_json(bound)})
    return changes


def _bound(names: object, tenant: str) -> object:
    """Returns the hashes of one modality, bound to the tenant. Other values are left for the engine to refuse."""
    if type(names) is not list:
        return names
    return [tenant_cache_salt(tenant, name) if type(name) is str else name for name in cast("list[object]", names)]


def _messages(value: object) -> Iterator[Mapping[str, object]]:
    """Yields the messages of a member: one object, or those in a list of texts and objects. Token ids cost nothing."""
    if type(value) is dict:
        yield cast("dict[str, object]", value)
        return
    items = _list(value)
    if items and type(items[0]) in _MIXED:
        for item in items:
            if type(item) is dict:
                yield cast("dict[str, object]", item)


def _is_named(value: object) -> bool:
    for message in _messages(value):
        for name in _CONTENT:
            if any(map(_has_name, _list(message.get(name)))):
                return True
    return False


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if type(value) is list else []


def _has_name(part: object) -> bool:
    return type(part) is dict and MEDIA_UUID_MEMBER in part


def _unnamed(value: object, where: str) -> object:
    """Returns a member that holds messages, without the names of media in them."""
    if type(value) is list:
        return [_unnamed(item, where) for item in cast("list[object]", value)]
    if type(value) is not dict:
        return value
    message = dict(cast("dict[str, object]", value))
    for name in _CONTENT:
        if parts := _list(message.get(name)):
            message[name] = [_part(part, where) for part in parts]
    return message


def _part(part: object, where: str) -> object:
    """Returns a part of a message without its name."""
    if not _has_name(part):
        return part
    kept = {name: value for name, value in cast("dict[str, object]", part).items() if name != MEDIA_UUID_MEMBER}
    if all(value is None for name, value in kept.items() if name != "type"):
        raise ProxyError(
            400,
            "invalid_request_error",
            f"a part in `{where}` has a `{MEDIA_UUID_MEMBER}` but no content; send the content, because the proxy "
            "does not keep it",
            param=where,
            code="invalid_value",
        )
    return kept
