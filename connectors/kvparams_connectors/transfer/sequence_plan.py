"""Defines what a sequence is to a store: its pages, their parts and the parts' keys.

A part of a page is what it holds of one unit of the grid (`shard_grid.py`); an engine without a grid has one part per
page. Pure: nothing is asked or moved. Keys are derived here, from token ids. A request's statement about keys is a
promise or a limit, never an address.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvparams.keys import ExtraKey, KVShard, Namespace, Page, chain_pages, page_keys
from kvparams.pages import HEADER_BYTES, PageIdentity, page_identity
from kvparams.params import KVTransferParams
from kvparams_connectors.store import ResultCode, Results
from kvparams_connectors.transfer.reports import PrefixHit

__all__ = ["PagePresence", "SequencePlan", "find_presence", "find_stored_prefix", "isolate_namespace", "make_plan"]


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """A `SequencePlan` covers one sequence, and the part of the model that this engine holds."""

    namespace: Namespace
    """The connector's, with the request's cache salt and LoRA."""
    shard: KVShard
    tokens: int
    pages: tuple[Page, ...]
    """In order; the last one may be partial."""
    keys: tuple[str, ...]
    """One per part: all parts of the first page, then all of the second, and so on."""
    promised_tokens: int
    """Up to where the params' load keys promise stored KV; 0 if they promise nothing."""
    foreign_keys: int
    """Load or store keys in the params that are no key of this sequence. They are never used."""
    source: str | None
    """Where the params say that their producer's pages can be read, `host:port`."""
    storable_keys: frozenset[str] | None
    """If the params name store keys: only these are stored."""
    units: tuple[KVShard, ...]
    """Of which each page has a part, in this order."""

    def parts(self, page: int) -> range:
        """The indexes of a page's parts among the keys."""
        return range(page * len(self.units), (page + 1) * len(self.units))

    def sizes(self, tokens: int) -> list[int]:
        """The stored bytes of each part of a page of so many tokens."""
        return [HEADER_BYTES + self.namespace.payload_bytes(tokens, unit) for unit in self.units]

    def identity(self, index: int) -> PageIdentity:
        """Returns what the header of the part `index` must say."""
        page, unit = divmod(index, len(self.units))
        return page_identity(self.namespace, self.pages[page], self.units[unit])


def isolate_namespace(namespace: Namespace, params: KVTransferParams | None) -> Namespace:
    """The namespace with the request's cache salt and LoRA, which come from `params.isolation`."""
    if params is None or params.isolation is None:
        return namespace
    return replace(namespace, lora=params.isolation.lora, cache_salt=params.isolation.cache_salt)


def make_plan(
    namespace: Namespace,
    rectangle: KVShard,
    token_ids: Sequence[int],
    params: KVTransferParams | None,
    extras: Iterable[ExtraKey],
    units: Sequence[KVShard] | None = None,
    known: Sequence[Page] = (),
) -> SequencePlan:
    """The pages of a sequence and the keys of their parts, the partial last page included.

    Load keys in `params` are a promise: one that is not among the derived keys is counted and not used. Store keys, if
    there are any, limit what is stored.

    Args:
        namespace: the engine's, without cache salt and LoRA.
        rectangle: the part of the model that the engine holds.
        token_ids: the whole sequence.
        params: what the request says, if it says anything.
        extras: what the KV depends on besides token ids.
        units: of which each page has a part; None: one, the rectangle.
        known: pages of this sequence, as by `chain_pages`.

    Raises:
        ValueError: a token id is not an integer in [0, 2^32).
    """
    namespace = isolate_namespace(namespace, params)
    pages = chain_pages(namespace, token_ids, extras, known)
    parts = (rectangle,) if units is None else tuple(units)
    keys = page_keys(namespace, pages, parts)
    load_keys = frozenset((params and params.load_keys) or ())
    store_keys = None if params is None or params.store_keys is None else frozenset(params.store_keys)
    promised = max(
        (
            page.end
            for page in (pages if load_keys else ())
            if load_keys.issuperset(keys[page.index * len(parts) : (page.index + 1) * len(parts)])
        ),
        default=0,
    )
    producer = params and params.producer
    source = producer.address if producer is not None else None
    foreign = len((load_keys | (store_keys or frozenset())).difference(keys))
    return SequencePlan(namespace, rectangle, len(token_ids), pages, keys, promised, foreign, source, store_keys, parts)


@dataclass(frozen=True, slots=True)
class PagePresence:
    """Describes which pages of a sequence are there, whole."""

    pages: list[bool]
    nbytes: list[int]
    """Of each page's parts together."""
    failure: ResultCode | None = None
    """Of the first page that is not there because a store failed."""


def find_presence(plan: SequencePlan, results: Results, *, to_gap: bool) -> PagePresence:
    """Returns the presence of pages, from the results of `exists` for `plan.keys`.

    A part of the wrong size counts as not stored, if the store tells sizes; else the load finds it out. `to_gap`: up to
    the first page that is not there; the others count as not there.
    """
    each = len(plan.units)
    expected = plan.sizes(plan.namespace.page_tokens) * len(plan.pages)
    if plan.pages and plan.pages[-1].tokens < plan.namespace.page_tokens:
        expected[-each:] = plan.sizes(plan.pages[-1].tokens)
    there = [result.matches_size(size) for result, size in zip(results, expected, strict=True)]
    if each > 1:
        there = [all(there[at : at + each]) for at in range(0, len(there), each)]
        expected = [sum(expected[at : at + each]) for at in range(0, len(expected), each)]
    if all(there):
        return PagePresence(there, expected)
    end = there.index(False) + 1 if to_gap else len(there)
    failure = next(
        (one.code for one in results[: end * each] if one.code not in (ResultCode.OK, ResultCode.MISS)), None
    )
    return PagePresence(there[:end] + [False] * (len(there) - end), expected, failure)


def find_stored_prefix(plan: SequencePlan, results: Results) -> PrefixHit:
    """The pages without a gap whose parts are all there, by what `exists` said of `plan.keys`."""
    seen = find_presence(plan, results, to_gap=True)
    held = sum(seen.pages)
    if held == len(plan.pages):
        return PrefixHit(plan.tokens, held, sum(seen.nbytes))
    return PrefixHit(plan.pages[held].start, held, sum(seen.nbytes[:held]), seen.failure)
