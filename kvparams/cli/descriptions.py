"""Documents and messages in words, for people.

Values are shown, because the reader has them anyway; a salt and an HMAC are not.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, cast

from kvparams.cli.input_files import RecognizedMessage
from kvparams.codec import dump
from kvparams.dialects.carriers import CARRIERS, DEFAULT_CARRIER, original_path, with_original_path
from kvparams.dialects.message import ABSENT, get_at
from kvparams.dialects.table import LEGS, DialectTable, LegCode, NativeKey, validate_message
from kvparams.dialects.translation import decode_message
from kvparams.errors import printable
from kvparams.params import KNOWN_PATHS, Endpoint, KVTransferParams, Mode, Phase, Signature
from kvparams.versions import find_deprecated

__all__ = ["describe_dialect", "describe_document", "describe_message", "unknown_members"]

_LEGS: Final[dict[LegCode, str]] = {
    "P": "prefill request",
    "R": "prefill answer",
    "D": "decode request",
    "A": "decode answer",
}
_PHASES: Final[dict[Phase, str]] = {
    "prefill": "It asks a prefill engine to compute the KV of a prompt",
    "prefill_result": "A prefill engine says where its KV can be fetched",
    "decode": "It asks a decode engine to use KV that was computed elsewhere, and to answer the client",
    "decode_result": "A decode engine says which KV it has used",
    "release": "It says that the KV of this transfer is no longer needed",
    "cancel": "It says that no client waits for the answer any more",
}
_MODES: Final[dict[Mode, str]] = {
    "store": "the KV goes through a store that both engines use",
    "pull": "the decode engine fetches the KV from the prefill engine",
    "push": "the prefill engine sends the KV to the decode engine",
    "rendezvous": "the two engines meet at a third server",
}
_ORDERS: Final = {
    "prefill first": "the decode request is sent after the prefill answer",
    "together": "both requests are sent at once",
    "either": "the requests are sent one after the other or at once",
}
_SECRET: Final = frozenset({"cache_salt", "x-trtllm-disagg-auth"})
_LONGEST: Final = 60


def describe_message(given: RecognizedMessage, engine: str | None = None) -> tuple[list[str], bool]:
    """Returns lines that explain a message, and True if the message is valid."""
    table, leg = given.table, LEGS[given.phase]
    problems = validate_message(table, given.message, leg, engine)
    lines = [f"{table.title}: {_LEGS[leg]} of request {printable(given.message.request_id)}."]
    lines += [f"({line})" for line in given.guessed]
    lines += [f"{_PHASES[given.phase]}; {_MODES[table.mode]}.", ""]
    said = list(_keys(given, leg, engine))
    lines += [*said, ""] if said else ["It has no native keys in this message.", ""]
    if problems:
        return [
            *lines,
            "What is wrong:",
            *(f"  {with_original_path(problem, given.carrier)}" for problem in problems),
        ], False
    params = decode_message(table, given.message, given.phase, engine)
    lines += ["As our document: " + "; ".join(_members(params)) + "."]
    lines += ["", "Worth knowing:", *(f"  {note}" for note in table.notes)] if table.notes else []
    return lines, True


def describe_dialect(table: DialectTable) -> list[str]:
    """The dialect itself."""
    lines = [
        f"{table.name}: {table.title}",
        f"  spoken by {table.fits}; {_MODES[table.mode]}; {_ORDERS[table.order]}",
        f"  the transfer id comes from {table.transfer_id_source}",
        f"  a kvparams document keeps its keys under extensions.{table.extension}",
        f"  source: {table.source}",
    ]
    for leg in _LEGS:
        path = table.container_paths.get(leg)
        if path is None:
            continue
        rows = [row for row in table.native_keys if leg in row.legs]
        lines.append(f"  {_LEGS[leg]}, in {path or 'the body'}:" + ("" if rows else " nothing"))
        lines += [f"    {_about(row, leg)}" for row in rows]
    if DEFAULT_CARRIER in table.container_paths.values():
        lines += [f"  {DEFAULT_CARRIER} may also be in {one.place}: {one.description}" for one in CARRIERS]
    return [*lines, *(f"  note: {note}" for note in table.notes)]


def describe_document(params: KVTransferParams, extensions: Collection[str]) -> list[str]:
    """Returns lines that explain a document.

    Args:
        params: the document.
        extensions: those that are known.
    """
    head = f"{_PHASES[params.phase]}; {_MODES[params.mode]}."
    lines = [f"This is a kvparams document, version {params.version}.", head]
    document = dump(params)
    notes = [*map(str, find_deprecated(document)), *unknown_members(document, extensions)]
    lines += [f"  {line}" for line in _members(params)]
    return [*lines, "Worth knowing:", *(f"  {note}" for note in notes)] if notes else lines


def unknown_members(document: Mapping[str, object], extensions: Collection[str], parent: str = "") -> Iterator[str]:
    """The members of a document, valid or not, that nobody here knows: a line each."""
    for name, value in document.items():
        path = parent + name
        if path not in KNOWN_PATHS:
            yield f"{printable(path)}: this member is unknown; it is kept unchanged"
        elif isinstance(value, Mapping) and any(known.startswith(f"{path}.") for known in KNOWN_PATHS):
            yield from unknown_members(cast("Mapping[str, object]", value), extensions, f"{path}.")
        elif path == "extensions" and isinstance(value, Mapping):
            for one in cast("Mapping[str, object]", value):
                if one not in extensions:
                    yield f"extensions.{printable(one)}: this extension is unknown; it is kept unchanged"


def _keys(given: RecognizedMessage, leg: LegCode, engine: str | None) -> Iterator[str]:
    tree = {"body": given.message.body, "headers": given.message.headers}
    seen: set[tuple[str | int, ...]] = set()
    for row in given.table.known(engine):
        path = given.table.path(row, leg)
        value = get_at(tree, path)
        if value is ABSENT or path in seen:
            continue
        seen.add(path)
        shown = original_path(path[1:], given.carrier) if path[0] == "body" else path
        where = ".".join(printable(str(part)) for part in shown)
        place = f" (our {row.member})" if row.is_member(leg) else ""
        note = "" if leg in row.legs else " (it has no meaning in this message)"
        off = ", so not" if value is False else ", nothing said" if value is None else ""
        meaning = row.description or row.value_type.description
        yield f"  {where} = {_shown(row.name, value)}{off}: {meaning}{place}{note}"
    way = given.table.home(leg)
    home = get_at(given.message.body, way)
    if way and isinstance(home, dict):
        inside = (path for path in seen if len(path) > len(way) + 1 and path[: len(way) + 1] == ("body", *way))
        firsts = {path[len(way) + 1] for path in inside}
        for name in cast("dict[str, object]", home):
            known = any(row.name.endswith("*") and name.startswith(row.name[:-1]) for row in given.table.native_keys)
            if name not in firsts and not known:
                release = f" of release {engine}" if engine else ""
                yield f"  {printable(name)}: this dialect{release} has no such key; it is kept unchanged"


def _members(params: KVTransferParams) -> Iterator[str]:
    yield f"request {params.request_id}, transfer {params.transfer.id}, attempt {params.transfer.attempt}"
    if params.prefix is not None:
        yield f"it covers {params.prefix.count} tokens"
    for name, keys in (("stored under", params.store_keys), ("found under", params.load_keys)):
        if keys is not None:
            yield f"KV is {name} {len(keys)} {'key' if len(keys) == 1 else 'keys'}"
    for name, endpoint in (("computed by", params.producer), ("used by", params.consumer)):
        if endpoint is not None:
            yield f"{name} {_instance(endpoint)}"
    if params.lease is not None:
        yield f"kept for {params.lease.ttl_ms / 1000:g} s after it arrives"
    if params.on_load_failure is not None:
        yield f"if the KV is missing: {params.on_load_failure}"
    if params.isolation is not None and params.isolation.cache_salt is not None:
        yield "shared only with requests of the same cache salt"
    if params.usage is not None:
        counted = params.usage.model_dump(exclude_none=True)
        yield "counted: " + ", ".join(f"{name} {value}" for name, value in counted.items())
    if params.must_understand:
        yield f"a reader that does not know {', '.join(params.must_understand)} must refuse it"
    for name, extension in (params.extensions or {}).items():
        yield f"the extension {name} has {', '.join(map(printable, extension)) or 'no members'}"
    if params.signature is not None:
        yield _signed(params.signature)


def _signed(signature: Signature) -> str:
    times = (datetime.fromtimestamp(moment, UTC) for moment in (signature.iat, signature.exp))
    made, ends = (f"{time:%Y-%m-%d %H:%M:%S}" for time in times)
    return f"signed with key {signature.kid} for {signature.aud}, from {made} until {ends} UTC; not verified here"


def _instance(endpoint: Endpoint) -> str:
    run = f", run {endpoint.incarnation}" if endpoint.incarnation is not None else ""
    at = f", readable at {endpoint.address}" if endpoint.address is not None else ""
    return f"{endpoint.id}{run}{at}"


def _about(row: NativeKey, leg: LegCode) -> str:
    name = ".".join(str(part) for part in (*row.parents, row.name))
    since = f", from {row.since}" if row.since else ""
    until = f", before {row.until}" if row.until else ""
    where = {"home": "", "body": " (in the body)", "headers": " (header)"}[row.location]
    needed = "; needed" if leg in row.required_legs or leg in row.marker_values else ""
    member = f"; our {row.member}" if row.is_member(leg) else ""
    value_type = row.value_type.description
    return f"{name}{where}: {row.description or value_type}; {value_type}{since}{until}{needed}{member}"


def _shown(name: str, value: object) -> str:
    if name in _SECRET and value is not None:
        return "(not shown)"
    text = json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
