"""The three fields of vLLM #12957: `prefix_prompt_ids`, `kvcache_load_keys`, `kvcache_store_keys`; no version, no ids.

A request for one prompt carries flat lists, a request for several carries one list (or null) for each prompt. Members
that were read can be written back unchanged:
`write_legacy_params(t.to_params(r, i), batched=t.batched, native=t.native) == x` for every `t = read_legacy_params(x)`.

Source: vLLM pull request #12957, vllm/distributed/kv_transfer/kv_transfer_params.py (February 2025, never merged).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from pydantic import ValidationError

from kvparams.errors import InvalidParams, Problem
from kvparams.field_types import DocumentModel, StoreKeys
from kvparams.params import PROTOCOL_VERSION, KVTransferParams
from kvparams.tokens import TokenIds, TokenPrefix
from kvparams.validation import parse_json_object, to_invalid_params

__all__ = [
    "MAX_PROMPTS",
    "LegacyParams",
    "LegacyPrompt",
    "has_legacy_members",
    "legacy_members",
    "read_legacy_params",
    "write_legacy_params",
]

MAX_PROMPTS: Final = 1_024
"""Prompts in one request."""

_MEMBERS: Final = {
    "prefix_prompt_ids": "prefix",
    "kvcache_load_keys": "load_keys",
    "kvcache_store_keys": "store_keys",
}
"""The trio's members, and what the document calls them."""
_NAMES: Final = frozenset(_MEMBERS)


class LegacyPrompt(DocumentModel, frozen=True):
    """A `LegacyPrompt` holds the legacy members for one prompt."""

    prefix_prompt_ids: TokenIds | None = None
    kvcache_load_keys: StoreKeys | None = None
    kvcache_store_keys: StoreKeys | None = None


@dataclass(frozen=True, slots=True)
class LegacyParams:
    """A trio that was read."""

    prompts: tuple[LegacyPrompt, ...]
    """One for each prompt; exactly one where it is not batched."""
    batched: bool
    """Whether the lists were lists of lists."""
    native: Mapping[str, object]
    """Members that stood beside the trio: not ours, kept as they came."""

    def to_params(self, request_id: str, transfer_id: str) -> tuple[KVTransferParams, ...]:
        """Returns a document for each prompt, which moves KV by way of a store.

        The trio has no identity and no phase. The first is given here; of several prompts, number i is the transfer
        `transfer_id-i`. A prompt with load keys and no store keys is a decode leg, any other a prefill leg.

        Raises:
            InvalidParams: an id is not one that a document can carry.
        """
        try:
            return tuple(
                _to_params(prompt, request_id, f"{transfer_id}-{index}" if self.batched else transfer_id)
                for index, prompt in enumerate(self.prompts)
            )
        except ValidationError as error:
            raise to_invalid_params(error) from None


def has_legacy_members(native: Mapping[str, object]) -> bool:
    """Returns True if any of the three legacy members is present."""
    return not _NAMES.isdisjoint(native)


def legacy_members(native: Mapping[str, object]) -> dict[str, object]:
    """Returns the three legacy members, as far as they are there."""
    return {name: native[name] for name in _MEMBERS if name in native}


def read_legacy_params(value: Mapping[str, object] | str) -> LegacyParams:
    """Read the trio from an object or from its JSON text.

    Raises:
        InvalidParams: not JSON, not an object, none of the three members, wrong types, or lists for one prompt mixed
            with lists for several.
    """
    value = parse_json_object(value) if isinstance(value, str) else _object(value)
    members = legacy_members(value)
    if not members:
        raise InvalidParams((Problem((), "missing", f"none of {', '.join(_MEMBERS)} is there"),))
    native = {name: member for name, member in value.items() if name not in _MEMBERS}
    if not any(_is_batch(member) for member in members.values()):
        prompt, problems = _prompt(members, None)
        prompts = [prompt]
        batched = False
    else:
        prompts, problems = _batch(members)
        batched = True
    if problems:
        raise InvalidParams(tuple(problems))
    return LegacyParams(tuple(prompt for prompt in prompts if prompt is not None), batched, native)


def write_legacy_params(
    params: Sequence[KVTransferParams],
    *,
    batched: bool = False,
    native: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The trio for these documents, beside the `native` members.

    Only token ids and keys are written: the trio cannot say more. In a batch, a member that only some documents have is
    null for the others.

    Raises:
        InvalidParams: a document knows its token ids by digest only; the path starts with its number.
        ValueError: not exactly one document, although `batched` is false.
    """
    if not batched and len(params) != 1:
        raise ValueError(f"{len(params)} documents make a batch; pass batched=True")
    prompts = [_from_params(one, index) for index, one in enumerate(params)]
    if not batched:
        return {**(native or {}), **prompts[0]}
    names = [name for name in _MEMBERS if any(name in prompt for prompt in prompts)]
    return {**(native or {}), **{name: [prompt.get(name) for prompt in prompts] for name in names}}


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidParams((Problem((), "type", "Input should be an object"),))
    return cast("Mapping[str, object]", value)


def _is_batch(member: object) -> bool:
    """Lists of lists are for several prompts, and so are lists of nothing but nulls."""
    if not isinstance(member, list):
        return False
    entries = cast("list[object]", member)
    return any(isinstance(entry, list) for entry in entries) or (bool(entries) and all(e is None for e in entries))


def _prompt(members: Mapping[str, object], index: int | None) -> tuple[LegacyPrompt | None, list[Problem]]:
    try:
        return LegacyPrompt.model_validate(members), []
    except ValidationError as error:
        found = to_invalid_params(error).problems
    if index is None:
        return None, list(found)
    return None, [Problem((one.path[0], index, *one.path[1:]), one.kind, one.message) for one in found]


def _batch(members: Mapping[str, object]) -> tuple[list[LegacyPrompt | None], list[Problem]]:
    problems: list[Problem] = []
    lists: dict[str, list[object]] = {}
    for name, member in members.items():
        if isinstance(member, list):
            lists[name] = cast("list[object]", member)
        else:
            problems.append(Problem((name,), "conflict", "in a batch this is a list with one entry for each prompt"))
    size = max(len(entries) for entries in lists.values())
    if size > MAX_PROMPTS:
        return [], [Problem((), "length", f"a request has at most {MAX_PROMPTS} prompts")]
    problems += [
        Problem((name,), "conflict", f"has {len(entries)} entries, another member has {size}")
        for name, entries in lists.items()
        if len(entries) != size
    ]
    if problems:
        return [], problems
    prompts: list[LegacyPrompt | None] = []
    for index in range(size):
        prompt, found = _prompt({name: entries[index] for name, entries in lists.items()}, index)
        prompts.append(prompt)
        problems += found
    return prompts, problems


def _to_params(prompt: LegacyPrompt, request_id: str, transfer_id: str) -> KVTransferParams:
    document: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "request_id": request_id,
        "transfer": {"id": transfer_id, "attempt": 1},
        "phase": "decode" if prompt.kvcache_load_keys and not prompt.kvcache_store_keys else "prefill",
        "mode": "store",
    }
    for name in prompt.model_fields_set:
        member: object = getattr(prompt, name)
        if name == "prefix_prompt_ids" and member is not None:
            member = TokenPrefix.pack(cast("tuple[int, ...]", member))
        document[_MEMBERS[name]] = member
    return KVTransferParams.model_validate(document)


def _from_params(params: KVTransferParams, index: int) -> dict[str, object]:
    written: dict[str, object] = {}
    for name, known in _MEMBERS.items():
        if known not in params.model_fields_set:
            continue
        member: object = getattr(params, known)
        if isinstance(member, TokenPrefix):
            ids = member.token_ids()
            if ids is None:
                message = "the trio carries token ids, and this document has only their digest"
                raise InvalidParams((Problem((index, known), "conflict", message),))
            written[name] = ids.tolist()
        else:
            written[name] = list(cast("tuple[str, ...]", member)) if member is not None else None
    return written
