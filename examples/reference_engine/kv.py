"""How this engine uses kvparams: the only file that knows the protocol and the store connector.

An engine author needs four things: read a request's document (`KVSharing.read`), ask for stored KV before computing
(`KVSession.begin`), hand over what was computed (`KVSession.advance`), and say in the answer what is stored
(`Handoff.result`). The one rule: nothing here waits; the engine's loop asks again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal
from uuid import uuid4

from kvparams.codec import read_request, write
from kvparams.errors import InvalidParams
from kvparams.keys import Geometry, Namespace
from kvparams.params import PROTOCOL_VERSION, Endpoint, Isolation, KVTransferParams, Lease, Transfer, Usage
from kvparams.tokens import TokenPrefix
from kvparams_connectors.connector import ConnectorSettings, KVStoreConnector
from kvparams_connectors.jobs import Job
from kvparams_connectors.layout import PagedKVLayout
from kvparams_connectors.reports import Hit, LoadReport, SaveReport
from kvparams_connectors.store import open_store
from reference_engine.cache import PagedCache
from reference_engine.metrics import Metrics, StoreCounts
from reference_engine.requests import RequestError
from reference_engine.shape import ModelShape

__all__ = ["Handoff", "KVSession", "KVSharing", "Role"]

Role = Literal["prefill", "decode", "both"]

_LEASE_MS: Final = 60_000
"""For how long the proxy may count on saved pages. The store evicts what was not used for longest, so in a store of
sensible size they live much longer; should one be gone nevertheless, decode does what `on_load_failure` says."""


class KVSharing:
    """The engine's side of the protocol; without a store, requests that need one are refused in words."""

    def __init__(
        self,
        *,
        role: Role,
        instance_id: str,
        store_url: str | None,
        model_name: str,
        shape: ModelShape,
        cache: PagedCache,
        page_tokens: int,
        verify: bool,
        metrics: Metrics,
    ) -> None:
        """Args:
            role: what legs this engine takes.
            instance_id: its name; an incarnation is added, so that a restarted engine is another instance.
            store_url: where KV is shared; None: nowhere.
            model_name: with `shape`, what stored KV belongs to.
            shape: the model's geometry.
            cache: the tensors that pages are read into and written from.
            page_tokens: tokens of a stored page; the same on all engines that share.
            verify: False uses stored pages unchecked.
            metrics: is told where to read the connector's counters.

        Raises:
            KVParamsError: the store cannot be opened.
        """
        self.role: Final = role
        self.instance: Final = Endpoint(id=instance_id, incarnation=uuid4().hex)
        self._page_tokens = page_tokens
        self._store = None if store_url is None else open_store(store_url)
        self._connector = None
        if self._store is not None:
            namespace = Namespace(
                model=model_name,
                revision=blake2b(repr(shape).encode(), digest_size=16).hexdigest(),  # the shape holds the weights' seed
                dtype="float32",
                geometry=Geometry(shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim),
                page_tokens=page_tokens,
            )
            layout = PagedKVLayout(cache.keys, cache.values)
            self._connector = KVStoreConnector(self._store, namespace, layout, ConnectorSettings(verify=verify))
            metrics.watch_store(self._counts)

    def read(
        self,
        kv_transfer_params: Mapping[str, object] | str | None,
        request_id: str,
        cache_salt: str | None,
        prompts: Sequence[Sequence[int]],
    ) -> "Handoff":
        """What a request says about its KV. Without a document it is an ordinary request, which may share prefixes.

        Raises:
            RequestError: the document is wrong, or asks for what this engine does not do.
        """
        try:
            params = read_request(kv_transfer_params, request_id=request_id)
        except InvalidParams as error:
            raise RequestError(f"kv_transfer_params: {error}", param="kv_transfer_params") from error
        if params is not None:
            self._check(params, prompts)
        shared = params
        if cache_salt is not None and (params is None or params.isolation is None):
            isolation = Isolation(cache_salt=cache_salt)
            blank = KVTransferParams(
                version=PROTOCOL_VERSION,
                request_id=request_id,
                transfer=Transfer(id=uuid4().hex, attempt=1),
                phase="prefill",
                mode="store",
            )
            shared = (params or blank).model_copy(update={"isolation": isolation})
        return Handoff(self.instance, params, shared)

    def session(self, prompt: list[int], handoff: "Handoff") -> "KVSession | None":
        """One sequence's dealings with the store; None where there is none."""
        return None if self._connector is None else KVSession(self._connector, prompt, handoff, self._page_tokens)

    def close(self) -> None:
        """Wait, within bounds, for what is being saved, and let go of the store."""
        if self._connector is not None:
            self._connector.close()
        if self._store is not None:
            self._store.close()

    def _counts(self) -> StoreCounts:
        assert self._connector is not None
        stats = self._connector.stats()
        return StoreCounts(stats.bytes_loaded, stats.bytes_saved, stats.pages_refused)

    def _check(self, params: KVTransferParams, prompts: Sequence[Sequence[int]]) -> None:
        if params.mode != "store":
            fault = f"mode {params.mode!r} is not spoken here: KV travels through a store; start the proxy with "
            fault += "--connector store"
        elif params.phase not in ("prefill", "decode"):
            fault = f"phase {params.phase!r} does not belong to a request for tokens"
        elif self.role not in (params.phase, "both"):
            fault = f"this engine's role is {self.role}, it does not take the phase {params.phase!r}"
        elif self._connector is None:
            fault = "this engine has no store: start it with --store URL"
        elif params.prefix is not None and len(prompts) == 1 and not params.prefix.covers(prompts[0]):
            fault = "the prefix is not that of this prompt: proxy and engine do not tokenize alike"
        else:
            return
        raise RequestError(f"kv_transfer_params: {fault}", param="kv_transfer_params")


@dataclass(frozen=True, slots=True)
class Handoff:
    """What one request says about its KV, and what its answer says in return."""

    instance: Endpoint
    params: KVTransferParams | None
    """The document that came; None: an ordinary request."""
    shared: KVTransferParams | None
    """The same with the request's own cache salt: what page keys are derived with."""

    @property
    def prefilling(self) -> bool:
        """Whether the answer must wait until the KV is stored."""
        return self.params is not None and self.params.phase == "prefill"

    @property
    def decoding(self) -> bool:
        """Whether the KV is promised to be stored."""
        return self.params is not None and self.params.phase == "decode"

    @property
    def fails(self) -> bool:
        """Whether KV that cannot be loaded ends the request."""
        return self.params is not None and self.params.on_load_failure == "fail"

    @property
    def cache_root(self) -> bytes:
        """What the names of locally cached blocks start from: they are not shared across salts or adapters either."""
        isolation = self.shared.isolation if self.shared is not None else None
        parts = (isolation.cache_salt, isolation.lora) if isolation is not None else (None, None)
        return blake2b(repr(parts).encode(), digest_size=16).digest()

    def result(self, sessions: Sequence["KVSession"]) -> dict[str, object] | None:
        """The answer's `kv_transfer_params`, once all sequences of the request have ended; None without a document."""
        if self.params is None:
            return None
        first = sessions[0]
        result = KVTransferParams(
            version=PROTOCOL_VERSION,
            request_id=self.params.request_id,
            transfer=self.params.transfer,
            phase="prefill_result" if self.prefilling else "decode_result",
            mode="store",
            usage=Usage(
                prompt_tokens=sum(len(one.prompt) for one in sessions),
                cached_tokens=sum(one.loaded_to for one in sessions),
                computed_tokens=sum(len(one.prompt) - one.loaded_to for one in sessions),
                loaded_tokens=sum(one.loaded_to - one.local_tokens for one in sessions),
                loaded_bytes=sum(one.loaded_bytes for one in sessions),
                saved_bytes=sum(one.saved_bytes for one in sessions),
            ),
        )
        if self.prefilling:
            more: dict[str, object] = {
                "producer": self.instance,
                "load_keys": tuple(key for one in sessions for key in one.stored_keys),
                "lease": Lease(ttl_ms=_LEASE_MS),
            }
            if len(sessions) == 1:
                more["prefix"] = TokenPrefix.by_digest(first.prompt)
            result = result.model_copy(update=more)
        return write(result)


class KVSession:
    """One sequence's dealings with the store. The engine's loop calls it, in the order of the methods."""

    def __init__(self, connector: KVStoreConnector, prompt: list[int], handoff: Handoff, page_tokens: int) -> None:
        self.prompt: Final = prompt
        self.local_tokens = 0
        """Prompt tokens found in the engine's own cache."""
        self.loaded_to = 0
        """Up to this position the blocks are filled: by the local cache, and behind that from the store."""
        self.loaded_bytes = 0
        self.failure: str | None = None
        """Why the sequence cannot go on, in words."""
        self._connector, self._handoff, self._page_tokens = connector, handoff, page_tokens
        self._plan = connector.plan(prompt, handoff.shared)
        self._blocks: list[int] = []
        self._lookup: Job[Hit] | None = None
        self._load: Job[LoadReport] | None = None
        self._saves: list[Job[SaveReport]] = []
        self._stored_to = 0  # as far as is known: what lies before need not be saved

    @property
    def _wanted(self) -> int:
        """Tokens that need not be computed: all but the last, whose logits choose the first token of the answer."""
        return len(self.prompt) - 1

    def begin(self, blocks: list[int], local_tokens: int) -> None:
        """Start to fill the sequence's blocks behind `local_tokens`; they are not the engine's until `loaded`."""
        self._blocks = blocks
        self.local_tokens = self.loaded_to = local_tokens
        if self._handoff.decoding:
            self._stored_to = local_tokens
            self._start_load(self._wanted)  # promised: no need to ask first
        else:
            self._lookup = self._connector.lookup(self._plan)

    def loaded(self) -> bool:
        """Whether the blocks are the engine's; then `loaded_to` and `failure` say how far they are filled."""
        if self._lookup is not None and self._lookup.done():
            hit = self._lookup.result(0)
            self._lookup = None
            self._stored_to = hit.tokens
            self._start_load(min(hit.tokens, self._wanted))
        if self._load is not None and self._load.done():
            report = self._load.result(0)
            self._load = None
            self.loaded_to, self.loaded_bytes = report.end_token, report.nbytes
            if self._handoff.decoding or report.refused or report.failure is not None:
                self._stored_to = report.end_token
            if self._handoff.fails and report.end_token < self._wanted:
                why = report.failure.value if report.failure else report.refused[0].reason
                self.failure = f"KV of {self._wanted - report.end_token} prompt tokens could not be loaded: {why}"
        return self._lookup is None and self._load is None

    def advance(self, tokens: list[int], computed: int) -> None:
        """Save the pages that are full now that `computed` of `tokens` are; for a prefill leg the partial one too."""
        end = computed - computed % self._page_tokens
        if self._handoff.prefilling and self._stored_to < len(self.prompt) <= computed:
            end = len(self.prompt)
        if end <= self._stored_to:
            return
        known = end <= len(self.prompt)
        plan = self._plan if known else self._connector.plan(tokens[:end], self._handoff.shared)
        self._saves.append(self._connector.save(plan, self._blocks, self._stored_to, end))
        self._stored_to = end

    def saved(self) -> bool:
        """Whether the answer may go out: at once, except for a prefill leg."""
        return not self._handoff.prefilling or all(save.done() for save in self._saves)

    @property
    def saved_bytes(self) -> int:
        """Bytes stored for this sequence, as far as is known."""
        return sum(save.result(0).nbytes for save in self._saves if save.done())

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """The keys under which a prefill leg's KV is stored; none if the store did not take all of it."""
        reports = [save.result(0) for save in self._saves]
        return () if any(report.dropped or report.failed for report in reports) else self._plan.keys

    def _start_load(self, end: int) -> None:
        if end > self.loaded_to:
            self._load = self._connector.load(self._plan, self._blocks, self.loaded_to, end)
