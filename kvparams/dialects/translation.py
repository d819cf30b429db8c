"""Between the one document and what engines really read and write.

Two laws, for every dialect: `encode_message(decode_message(x)) == x` as JSON for every valid message `x`, unknown keys,
nulls and 63-bit integers included; and `decode_message(encode_message(p)) == p`, or `encode_message` raises
`LossyTranslation` that names what would be lost. `encode_message` reads back the message that it has written before it
returns, so that no member is lost silently.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Final, NamedTuple, cast

from kvparams.codec import dump, parse
from kvparams.dialects.member_conversion import derived_transfer, from_member, to_member
from kvparams.dialects.message import (
    ABSENT,
    DialectMessage,
    JSONObject,
    MessagePath,
    get_at,
    parse_path,
    pop_at,
    set_at,
    unpack_message,
)
from kvparams.dialects.table import LEGS, DialectTable, LegCode, NativeKey, is_required, validate_message
from kvparams.errors import InvalidParams, KVParamsError, Problem
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Phase

__all__ = [
    "EncodedMessage",
    "LossyTranslation",
    "TranslatedMessage",
    "adapt_to_release",
    "customary_members",
    "decode_message",
    "encode_as_routed",
    "encode_lossy",
    "encode_message",
    "translate_params",
]

_BODY: Final = "@body"
_HEADERS: Final = "@headers"
_PARTS: Final = frozenset({"transfer", "producer", "consumer", "lease", "isolation", "usage"})


class LossyTranslation(KVParamsError):
    """The dialect has no words for a part of the document. `fields` names it, dotted."""

    def __init__(self, dialect: str, fields: tuple[str, ...]) -> None:
        super().__init__(dialect, fields)
        self.dialect = dialect
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.dialect} cannot say: {', '.join(self.fields)}"


class EncodedMessage(NamedTuple):
    """An `EncodedMessage` is a message with the list of members that it could not express."""

    message: DialectMessage
    lost: tuple[str, ...]
    """Members of the document, dotted; empty where nothing is lost."""


class TranslatedMessage(NamedTuple):
    """A message in another dialect."""

    message: DialectMessage
    params: KVTransferParams
    """What it says, as our document."""
    lost: tuple[str, ...]
    """What the other dialect has no words for: our members and native keys, dotted. Where KV lies is never carried
    over: it is of use only to the connector that put it there."""


def decode_message(
    table: DialectTable, message: DialectMessage, phase: Phase, engine: str | None = None
) -> KVTransferParams:
    """Decodes a message into a KV parameters document.

    The request id is the message's. Where the dialect names no transfer, its id follows from the request's
    (`kvparams.dialects.member_conversion.derived_transfer`); the attempt is 1: no dialect counts them.

    Args:
        table: the dialect.
        message: never modified, and nothing of it is shared with the result. Where its `kv_transfer_params` is JSON
            text, the document is that of the object, and so `encode_message` writes it.
        phase: which leg it is.
        engine: the release of the engine (`0.32.0`), where it matters for what is valid; None accepts any.

    Raises:
        InvalidParams: it is not a valid message of this dialect on this leg; paths are those of the message.
    """
    leg = _leg(table, phase)
    message = unpack_message(message)
    problems = validate_message(table, message, leg, engine)
    if problems:
        raise InvalidParams(tuple(problems))
    document: JSONObject = {
        "version": PROTOCOL_VERSION,
        "request_id": message.request_id,
        "phase": phase,
        "mode": table.mode,
    }
    document["transfer"] = transfer = JSONObject()
    rest: JSONObject = {"body": deepcopy(dict(message.body)), "headers": dict(message.headers)}
    for row in table.known(engine):
        path = table.path(row, leg)
        if leg in row.marker_values:
            pop_at(rest, path)
            _keep(rest)
        elif row.is_member(leg) and (value := get_at(rest, path)) is not ABSENT:
            member = cast("str", row.member)
            said = to_member(member, value)
            if (
                said is not ABSENT
                and not _implied(row, leg, engine, said, message.request_id)
                and set_at(document, parse_path(member), said)
            ):
                pop_at(rest, path)
                _keep(rest)
    transfer.setdefault("id", derived_transfer(message.request_id))
    transfer["attempt"] = 1
    extension = _fold(rest, table.home(leg))
    if extension:
        document["extensions"] = {table.extension: extension}
    return parse(document)


def encode_message(table: DialectTable, params: KVTransferParams, engine: str | None = None) -> DialectMessage:
    """The message that says what the document says, in the dialect.

    Raises:
        LossyTranslation: the dialect has no words for a part of it.
        InvalidParams: the dialect wants more than the document says; paths are those of the message.
    """
    written = encode_lossy(table, params, engine)
    if written.lost:
        raise LossyTranslation(table.name, written.lost)
    return written.message


def encode_lossy(table: DialectTable, params: KVTransferParams, engine: str | None = None) -> EncodedMessage:
    """As `encode_message`, for those who can do without what the dialect cannot say.

    Raises:
        LossyTranslation: the phase is not one of the dialect's legs.
        InvalidParams: as for `encode_message`.
    """
    document = dump(params)
    leg = _leg(table, params.phase, LossyTranslation(table.name, ("phase",)))
    extension = get_at(document, ("extensions", table.extension))
    tree = _unfold(cast("JSONObject", extension) if isinstance(extension, dict) else {}, table.home(leg))
    said: set[str | None] = set()  # where a key had another name once, today's is written
    for row in table.known(engine):
        path = table.path(row, leg)
        if leg in row.marker_values:
            set_at(tree, path, row.marker_values[leg])
        elif row.is_member(leg) and row.member not in said:
            said.add(row.member)
            value = get_at(document, parse_path(cast("str", row.member)))
            if value is ABSENT or _implied(row, leg, engine, value, params.request_id):
                continue
            native = from_member(cast("str", row.member), value, row.value_type)
            if native is not ABSENT:
                set_at(tree, path, native)
    body = _in_order(table, leg, tree)
    message = DialectMessage(params.request_id, body, cast("dict[str, str]", tree["headers"]))
    again = dump(decode_message(table, message, params.phase, engine))
    return EncodedMessage(message, tuple(_differences(document, again)))


def customary_members(table: DialectTable, phase: Phase) -> JSONObject:
    """Returns the members that routers write beside the document, as the table's member of `extensions`."""
    leg = _leg(table, phase, LossyTranslation(table.name, ("phase",)))
    tree: JSONObject = {"body": JSONObject(), "headers": JSONObject()}
    for row in table.known():
        if leg in row.default_values and not (row.name.endswith("*") or leg in row.marker_values):
            set_at(tree, table.path(row, leg), deepcopy(row.default_values[leg]))
    return _fold(tree, table.home(leg))


def adapt_to_release(table: DialectTable, params: KVTransferParams, engine: str) -> KVTransferParams:
    """The same, for an engine of another release: native values in the forms that it knows.

    Lists of lists of block ids become one list where there is one group, and the other way round.

    Raises:
        LossyTranslation: a value has no form that this release knows.
    """
    document = dump(params)
    leg = _leg(table, params.phase, LossyTranslation(table.name, ("phase",)))
    found = get_at(document, ("extensions", table.extension))
    if not isinstance(found, dict):
        return params
    tree = _unfold(cast("JSONObject", found), table.home(leg))
    names: dict[MessagePath, list[NativeKey]] = {}
    for row in table.native_keys:
        names.setdefault(table.path(row, leg), []).append(row)
    lost: list[str] = []
    for path, rows in names.items():
        value, now = get_at(tree, path), [row for row in rows if row.fits(engine)]
        if value is ABSENT or value is None or not now or _fits(now, value):
            continue
        other = next((each for each in _reshaped(value) if _fits(now, each)), ABSENT)
        if other is ABSENT:
            lost.append(f"extensions.{table.extension}.{rows[0].name}")
        else:
            cast("JSONObject", get_at(tree, path[:-1]))[cast("str", path[-1])] = other
    if lost:
        raise LossyTranslation(table.name, tuple(lost))
    cast("JSONObject", document["extensions"])[table.extension] = _fold(tree, table.home(leg))
    return parse(document)


def translate_params(
    source: DialectTable, target: DialectTable, params: KVTransferParams, engine: str | None = None
) -> TranslatedMessage:
    """Translates a document of one dialect into a message of another.

    The message has the members that both dialects can express, and those that the target always writes.

    Args:
        source: from which `params` were decoded.
        target: the other one; may be the same, for another release of the engine.
        params: the document.
        engine: the release of the engine that shall read it.

    Raises:
        LossyTranslation: the phase is not one of the other dialect's legs, or `engine` has no form for a value.
        InvalidParams: the other dialect wants more than is known.
    """
    if source is target:
        params = params if engine is None else adapt_to_release(source, params, engine)
        written = encode_lossy(target, params, engine)
        return TranslatedMessage(written.message, params, written.lost)
    document = dump(params)
    extensions = cast("dict[str, JSONObject]", document.pop("extensions", None) or {})
    before = extensions.pop(source.extension, {})
    ours = customary_members(target, params.phase)
    lost: list[str] = []
    if source.family is not None and source.family == target.family:
        ours = {**ours, **before}
    else:
        legs = {row.name for row in source.native_keys if row.marker_values}  # which the phase says
        names = [name for name, value in before.items() if value is not None and name not in legs]
        lost = [f"extensions.{source.extension}.{name}" for name in names]
    document.pop("extensions", None)
    if extensions:
        document["extensions"] = extensions
    written = encode_as_routed(target, parse(document), engine, ours)
    return written._replace(lost=(*lost, *written.lost))


def encode_as_routed(
    target: DialectTable,
    params: KVTransferParams,
    engine: str | None = None,
    native: Mapping[str, object] | None = None,
) -> TranslatedMessage:
    """A document that was never in that dialect, said in it: its mode, and what routers write there besides.

    Args:
        target: the dialect.
        params: the document; what it says under the dialect's own name in `extensions` stands.
        engine: the release of the engine that shall read it.
        native: native members beside those; what routers write (`customary_members`) if not given.

    Raises:
        LossyTranslation: the phase is not one of the dialect's legs.
        InvalidParams: the dialect wants more than is known.
    """
    document = dump(params)
    document["mode"] = target.mode
    extensions = cast("dict[str, JSONObject]", document.get("extensions") or {})
    ours = {
        **(customary_members(target, params.phase) if native is None else native),
        **extensions.get(target.extension, {}),
    }
    ours = _named(target, params, engine, ours)
    if ours:
        document["extensions"] = {**extensions, target.extension: ours}
    written = encode_lossy(target, parse(document), engine)
    said = decode_message(target, written.message, params.phase, engine)
    own = f"extensions.{target.extension}"
    lost = [name for name in written.lost if name != own or target.extension in extensions]
    return TranslatedMessage(written.message, said, tuple(lost))


def _named(table: DialectTable, params: KVTransferParams, engine: str | None, native: JSONObject) -> JSONObject:
    """With the transfer's id, also where it says nothing new: engines that meet by it must be told."""
    leg = _leg(table, params.phase)
    row = next((one for one in table.known(engine) if one.member == "transfer.id" and one.is_member(leg)), None)
    if row is None or not _implied(row, leg, engine, params.transfer.id, params.request_id):
        return native
    tree = _unfold(native, table.home(leg))
    named = from_member("transfer.id", params.transfer.id, row.value_type)
    if named is not ABSENT:
        set_at(tree, table.path(row, leg), named)
    return _fold(tree, table.home(leg))


def _implied(row: NativeKey, leg: LegCode, engine: str | None, value: object, request_id: str) -> bool:
    """Returns True if a transfer id is derived from the request id, in a key that is optional."""
    return row.member == "transfer.id" and not is_required(row, leg, engine) and value == derived_transfer(request_id)


def _leg(table: DialectTable, phase: Phase, error: KVParamsError | None = None) -> LegCode:
    leg = LEGS.get(phase)
    if leg is None or leg not in table.container_paths:
        raise error or InvalidParams((Problem(("phase",), "value", f"{table.name} has no message for this phase"),))
    return leg


def _keep(rest: JSONObject) -> None:
    rest.setdefault("body", JSONObject())
    rest.setdefault("headers", JSONObject())


def _fold(rest: JSONObject, home: MessagePath) -> JSONObject:
    """Returns the rest of a message as a member of `extensions`: keys at home by name, others by path."""
    body = cast("JSONObject", rest["body"])
    native = get_at(body, home)
    folded: JSONObject = {}
    if home and isinstance(native, dict) and native:
        folded = {_escaped(name): value for name, value in cast("JSONObject", native).items()}
        pop_at(body, home)
    elif not home:
        folded = {_escaped(name): value for name, value in body.items()}
        body = JSONObject()
    if body:
        folded[_BODY] = body
    if rest["headers"]:
        folded[_HEADERS] = rest["headers"]
    return folded


def _unfold(folded: Mapping[str, object], home: MessagePath) -> JSONObject:
    body, headers = folded.get(_BODY), folded.get(_HEADERS)
    tree: JSONObject = {
        "body": deepcopy(cast("JSONObject", body)) if isinstance(body, dict) else JSONObject(),
        "headers": dict(cast("JSONObject", headers)) if isinstance(headers, dict) else JSONObject(),
    }
    for name, value in folded.items():
        if name not in (_BODY, _HEADERS):
            set_at(tree, ("body", *home, name[1:] if name.startswith("@@") else name), deepcopy(value))
    return tree


def _escaped(name: str) -> str:
    return f"@{name}" if name.startswith("@") else name


def _in_order(table: DialectTable, leg: LegCode, tree: JSONObject) -> JSONObject:
    """The body, its native keys in the order of the table, as engines and routers write them."""
    body = cast("JSONObject", tree["body"])
    native = get_at(body, table.home(leg))
    if isinstance(native, dict):
        members = cast("JSONObject", native)
        names = [row.name for row in table.native_keys if row.name in members]
        for name in dict.fromkeys((*names, *members)):
            members[name] = members.pop(name)  # behind those that came before
    return body


def _fits(rows: list[NativeKey], value: object) -> bool:
    return any(row.value_type.find_problem(value, ()) is None for row in reversed(rows))


def _reshaped(value: object) -> list[object]:
    if not isinstance(value, list):
        return []
    entries = cast("list[object]", value)
    return [[entries], entries[0]] if len(entries) == 1 else [[entries]]


def _differences(one: JSONObject, other: JSONObject, before: str = "") -> list[str]:
    """The members that differ, dotted, down to those that the protocol names."""
    found: list[str] = []
    for name in dict.fromkeys((*one, *other)):
        mine, theirs = one.get(name, ABSENT), other.get(name, ABSENT)
        if _same(mine, theirs):
            continue
        inner = [cast("JSONObject", value) if isinstance(value, dict) else {} for value in (mine, theirs)]
        if not before and (name in _PARTS or name == "extensions") and any(inner):
            found += _differences(inner[0], inner[1], f"{name}.")
        else:
            found.append(before + name)
    return found


def _same(one: object, other: object) -> bool:
    if one is ABSENT or other is ABSENT:
        return one is other
    return one is other or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
