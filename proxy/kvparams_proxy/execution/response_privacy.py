"""Removal of what engines say of themselves from responses: addresses, KV params, names of workers.

An engine is no enemy here: one that wanted to tell a client something could generate it as text. What is removed is
what engines say by accident: response ids, fingerprints, members of their own. Generated text is never examined.

Invariant: text that the client itself has sent is not removed. Every other address of an engine is, and everything that
looks like an address or a place in its code, also in later events and of engines that have left.
"""

import re
from collections.abc import Collection, Mapping
from json import JSONDecoder
from typing import Final

from pydantic_core import to_json

from kvparams.jsontext.document import MemberSpan, find_member, find_members
from kvparams_proxy.execution.answer_forms import CHOICES_FORM, AnswerForm
from kvparams_proxy.execution.engine_addresses import RANDOM_ID, EngineAddresses
from kvparams_proxy.execution.sse import MAX_EVENTS_PER_TURN
from kvparams_proxy.upstream.types import UpstreamError

__all__ = [
    "PRIVATE_MEMBERS",
    "Allowance",
    "locate_members",
    "privacy_changes",
    "strip_private_members",
]

PRIVATE_MEMBERS: Final = frozenset(
    (
        "kv_transfer_params",
        "ec_transfer_params",
        "disaggregated_params",
        "disagg_prefill_resp",
        "remote_host",
        "remote_port",
        "remote_engine_id",
        "remote_block_ids",
        "remote_bootstrap_addr",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "backend_instance_id",
        "prefill_worker_id",
        "decode_worker_id",
        "prefill_dp_rank",
        "decode_dp_rank",
    )
)
"""Members that say where KV or engines are. Sources: vLLM 0.32.0 (at the top of an answer), TensorRT-LLM 1.3
openai_protocol.py (in each choice), Dynamo 1.2 (`nvext.worker_id`), SGLang 0.5.23 (its bootstrap)."""

_FIRST: Final = rf'[ \t\r\n]*"(?:{"|".join(sorted(PRIVATE_MEMBERS))})"[ \t\r\n]*:[ \t\r\n]*'
_TEXT_FIRST: Final = re.compile(_FIRST)
_TEXT_MEMBER: Final = re.compile(f"([{{,]){_FIRST}")
"""A quote in a JSON string is escaped, so this is never found in one."""
_MEMBER: Final = re.compile(_TEXT_MEMBER.pattern.encode())
_HINTS: Final = (b'_params"', b'"remote_', b'"bootstrap_', b'_id"', b'_resp"', b'_rank"')
"""What such members have in them, to be looked for first: that is ten times as fast."""
_TEXT_COMMA: Final = re.compile(r"[ \t\r\n]*,")
_VALUE: Final = JSONDecoder()

_OPAQUE: Final = re.compile(r"[A-Za-z0-9_-]{0,160}")
_VERSION: Final = re.compile(r"[A-Za-z0-9._+-]{1,160}")
_LONGEST: Final = 4096
"""Characters of an engine's own member that are searched."""
_SEARCHED: Final = 8 * _LONGEST
"""Bytes of an answer's own members that are searched in all; what goes beyond is kept back."""
_FEW: Final = 4
"""Members that are looked for one by one."""
_SEARCHED_PER_UNIT: Final = 64
"""Bytes of a member that are searched for addresses in a unit of `Allowance`."""
_MEMBERS_PER_UNIT: Final = 4
_WALK_UNITS: Final = 10
"""What it may take to find a member that is not written as we would write it."""
_BEHIND: Final = (b",", b"}")
"""What follows the value of a member."""


class Allowance:
    """Counts the work on the events of one read in units of about 20 µs, and refuses what would hold the event loop."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_EVENTS_PER_TURN

    def renew(self) -> None:
        """Allows the work on another read."""
        self._left = MAX_EVENTS_PER_TURN

    def spend(self, units: int) -> None:
        """Counts work that is about to be done.

        Raises:
            UpstreamError: it is too much for one turn.
        """
        self._left -= units
        if self._left < 0:
            raise UpstreamError("too many events came at once that must be examined")


def privacy_changes(
    document: Mapping[str, object],
    raw: bytes,
    request_id: str,
    addresses: EngineAddresses,
    allowance: Allowance | None = None,
    form: AnswerForm = CHOICES_FORM,
) -> dict[str, bytes | None]:
    """Computes the changes to a response, or to one event of a stream, as for `kvparams.jsontext.editing.edit`.

    Args:
        document: what `raw` parses to.
        raw: the text of a JSON object.
        request_id: the proxy's, which it gave to the engine.
        addresses: of the engines.
        allowance: what may be spent on it, where `raw` is one of many events.
        form: of the API's answers.

    Raises:
        UpstreamError: the allowance is used up.
    """
    public = form.public_members
    changes: dict[str, bytes | None] = {}
    id = document.get("id")
    if id is not None and not _opaque(id, request_id, addresses):
        changes["id"] = to_json(f"{_id_prefix(document)}{request_id}")
    fingerprint = document.get("system_fingerprint")
    if fingerprint is not None and not _version(fingerprint, addresses):
        changes["system_fingerprint"] = b"null"
    if document.get("kv_transfer_params") is not None:  # null where there are none, as one engine alone would say
        changes["kv_transfer_params"] = None if form.omits_params else b"null"
    if document.get("ec_transfer_params") is not None:
        changes["ec_transfer_params"] = None
    if not public.issuperset(document):
        changes.update(_own_member_changes(document, raw, addresses, allowance, public))
    params = raw.count(b'_params"') - ("kv_transfer_params" in document) - ("ec_transfer_params" in document)
    if params:
        params -= sum(name.endswith("_params") for name in document if name not in public)
    if (params > 0 or raw.find(b'"remote_') >= 0 or raw.find(b'"bootstrap_') >= 0) and "choices" in document:
        value = to_json(document["choices"])
        if strip_private_members(value) is not value:
            span = place(raw, document, "choices", allowance)
            changes["choices"] = strip_private_members(raw[span.value : span.end])
    return changes


def _own_member_changes(
    document: Mapping[str, object],
    raw: bytes,
    addresses: EngineAddresses,
    allowance: Allowance | None,
    public: frozenset[str],
) -> dict[str, bytes | None]:
    """Returns the changes to members that are not of the API: private ones go, and so do those that hold an address.

    Raises:
        UpstreamError: the allowance is used up.
    """
    changes: dict[str, bytes | None] = {}
    names = [name for name in document if name not in public]
    left_bytes = _SEARCHED
    spans: Mapping[str, MemberSpan] | None = None
    if allowance is not None:
        allowance.spend(len(names) // _MEMBERS_PER_UNIT)
    for name in names:
        if name in PRIVATE_MEMBERS:
            if document[name] is not None:  # null says nothing, and one engine alone would say it
                changes[name] = None
            continue
        value = to_json(document[name])
        inside = strip_private_members(value)
        looked_at = inside[: 4 * _LONGEST]
        left_bytes -= len(looked_at)
        if allowance is not None and left_bytes >= 0:
            allowance.spend(len(looked_at) // _SEARCHED_PER_UNIT)
        if left_bytes < 0 or addresses.occur_in(looked_at.decode("utf-8", "replace")):
            changes[name] = None
        elif inside is not value:  # a walk to the member is only for what changes
            if spans is None:
                spans = locate_members(raw, document, names, allowance)
            changes[name] = strip_private_members(raw[spans[name].value : spans[name].end])
    return changes


def strip_private_members(raw: bytes) -> bytes:
    """Returns JSON text without members, at any depth, that reveal KV or engines.

    Every other byte stays. The result is the same object where there are none.
    """
    if max(map(raw.find, _HINTS)) < 0:
        return raw
    member = _MEMBER.search(raw)
    if member is None:
        return raw
    text = raw.decode()
    pieces: list[str] = []
    at = 0
    found = _TEXT_MEMBER.search(text)
    while found is not None:
        start, (_, end) = found.start(), _VALUE.raw_decode(text, found.end())
        if found[1] == "{":
            start += 1
            while (comma := _TEXT_COMMA.match(text, end)) is not None:  # what follows may be such a member, too
                end = comma.end()
                if (found := _TEXT_FIRST.match(text, end)) is None:
                    break
                _, end = _VALUE.raw_decode(text, found.end())
        pieces.append(text[at:start])
        at = end
        found = _TEXT_MEMBER.search(text, end)
    pieces.append(text[at:])
    return "".join(pieces).encode()


def _id_prefix(document: Mapping[str, object]) -> str:
    """Returns the prefix of response ids of an API, as its answers show."""
    kind = document.get("object")
    if kind == "response":
        return "resp_"
    if kind is None and document.get("type") == "message":
        return "msg_"
    return "chatcmpl-" if isinstance(kind, str) and kind.startswith("chat.") else "cmpl-"


def _opaque(id: object, request_id: str, addresses: EngineAddresses) -> bool:
    """Returns whether a response id identifies the request and reveals nothing else."""
    if type(id) is not str:
        return False
    rest = id.replace(request_id, "", 1)
    if rest == "cmpl-" or rest == "chatcmpl-":  # vLLM's, nearly always
        return True
    if RANDOM_ID.fullmatch(id) is not None and not addresses.has_random_looking_host:
        return True
    return _OPAQUE.fullmatch(rest) is not None and not addresses.occur_in(rest)


def _version(fingerprint: object, addresses: EngineAddresses) -> bool:
    """Returns whether a fingerprint has the form of a version, and no address in it."""
    return (
        type(fingerprint) is str and _VERSION.fullmatch(fingerprint) is not None and not addresses.occur_in(fingerprint)
    )


def locate_members(
    raw: bytes, document: Mapping[str, object], names: Collection[str], allowance: Allowance | None = None
) -> Mapping[str, MemberSpan]:
    """Returns where members of the object `raw` stand: of many, in one walk through all of it.

    Raises:
        UpstreamError: the allowance is used up.
    """
    if len(names) > _FEW:
        if allowance is not None:
            allowance.spend(_WALK_UNITS)
        return find_members(raw)
    return {name: place(raw, document, name, allowance) for name in names}


def place(raw: bytes, document: Mapping[str, object], name: str, allowance: Allowance | None = None) -> MemberSpan:
    """Returns the span of the member `name` of the object `raw`.

    It needs no walk where the member is written as we would write it. `document` is what `raw` parses to, and has that
    member.

    Raises:
        UpstreamError: the allowance is used up.
    """
    needle = b'"%b":' % name.encode()
    start = raw.find(needle)
    if start > 0 and raw[start - 1] != 0x5C:
        at = start + len(needle)
        value = to_json(document[name])
        end = at + len(value)
        plain = raw.startswith(value, at) and raw[end : end + 1] in _BEHIND
        # no other member may have this name, or may be this one, written with escapes
        if plain and raw.find(needle[:-1], at) < 0 and raw.find(b"\\u00") < 0:
            return MemberSpan(start, at, end)
    if allowance is not None:
        allowance.spend(_WALK_UNITS)
    return find_member(raw, document, name)
