"""Connects the engine to kvparams; only this module, `handoff` and `session` know the protocol and the connector.

An engine author needs five things: read a request's document (`KVSharing.read`), ask for stored KV before computing
(`KVSession.begin`), hand over what was computed (`KVSession.advance`), say in the answer what is stored
(`KVSharing.result`), and drop what nobody will fetch (`KVSharing.release`). No call waits for the store while the
engine computes; the engine's loop asks again.
"""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, Literal
from uuid import uuid4

from kvparams.codec import kv_transfer_members, read_request, write
from kvparams.errors import InvalidParams
from kvparams.keys import Geometry, Namespace
from kvparams.legacy_params import legacy_members
from kvparams.params import PROTOCOL_VERSION, Endpoint, Isolation, KVTransferParams, Lease, Transfer, Usage
from kvparams.peer_reads import READS_EXTENSION
from kvparams.signing.request_verifier import RequestVerifier
from kvparams.signing.verification import UntrustedParams
from kvparams.tokens import TokenPrefix
from kvparams.versions import LossyDowngrade, downgrade_for_reader
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector
from kvparams_connectors.transfer.layout import PagedKVLayout
from reference_engine.ask import RequestError
from reference_engine.cache import PagedCache
from reference_engine.handoff import Handoff
from reference_engine.metrics import Metrics, StoreCounts
from reference_engine.session import KVSession
from reference_engine.shape import ModelShape

__all__ = ["LEASE_MS", "KVSharing", "Role"]

Role = Literal["prefill", "decode", "both"]

LEASE_MS: Final = 60_000
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
        gate: RequestVerifier | None = None,
        legacy: bool = False,
    ) -> None:
        """Opens the store and prepares the connector.

        Args:
            role: what legs this engine takes.
            instance_id: its name; an incarnation is added, so that a restarted engine is another instance.
            store_url: where KV is shared; None: nowhere.
            model_name: with `shape`, what stored KV belongs to.
            shape: the model's geometry.
            cache: the tensors that pages are read into and written from.
            page_tokens: tokens of a stored page; the same on all engines that share.
            verify: False uses stored pages unchecked.
            metrics: is told where to read the connector's counters.
            gate: lets only signed documents in.
            legacy: speaks only the three fields of vLLM pull request #12957.

        Raises:
            KVParamsError: the store cannot be opened.
        """
        self.role: Final = role
        self._gate = gate
        self._legacy = legacy
        self.instance: Final = Endpoint(id=instance_id, incarnation=uuid4().hex)
        self._page_tokens = page_tokens
        self._store = None if store_url is None else open_guarded(store_url)
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
    ) -> Handoff:
        """Reads the KV instructions of a request.

        A request without a document is an ordinary one, which may share prefixes.

        Raises:
            RequestError: the document is wrong, or asks for what this engine does not do.
        """
        if self._legacy:
            return self._read_legacy(kv_transfer_params, request_id, cache_salt, prompts)
        params = self._admit(kv_transfer_params, request_id)
        if params is not None:
            self._check(params, prompts, cache_salt)
        shared = params
        told = None if params is None else params.isolation
        if cache_salt is not None and (told is None or "cache_salt" not in told.model_fields_set):
            isolation = (told or Isolation()).model_copy(update={"cache_salt": cache_salt})
            blank = KVTransferParams(
                version=PROTOCOL_VERSION,
                request_id=request_id,
                transfer=Transfer(id=uuid4().hex, attempt=1),
                phase="prefill",
                mode="store",
            )
            shared = (params or blank).model_copy(update={"isolation": isolation})
        return Handoff(params, shared)

    def _read_legacy(
        self,
        kv_transfer_params: Mapping[str, object] | str | None,
        request_id: str,
        cache_salt: str | None,
        prompts: Sequence[Sequence[int]],
    ) -> Handoff:
        """Reads the three fields alone. KV that is put under a key is found with this key and no other."""
        trio = legacy_members(kv_transfer_members(kv_transfer_params))
        params = self._admit(trio, request_id) if trio else None
        if params is None:
            return Handoff(None, None)
        self._check(params, prompts, cache_salt)
        named = f"{cache_salt or ''} {(params.store_keys or params.load_keys or ('',))[0]}"
        salted = blake2b(named.encode(), digest_size=16).hexdigest()
        found_by = {"isolation": Isolation(cache_salt=salted), "store_keys": None, "load_keys": None}
        return Handoff(params, params.model_copy(update=found_by))

    def read_control(self, kv_transfer_params: Mapping[str, object]) -> KVTransferParams:
        """The document of a message that is no request for tokens: phase `release` or `cancel`.

        Raises:
            RequestError: there is none, it is wrong, or is of another phase.
        """
        params = self._admit(kv_transfer_params)
        if params is None or params.phase not in ("release", "cancel"):
            raise RequestError(
                "kv_transfer_params: a document of the phase release or cancel is needed here",
                param="kv_transfer_params",
            )
        return params

    def _admit(
        self, kv_transfer_params: Mapping[str, object] | str | None, request_id: str | None = None
    ) -> KVTransferParams | None:
        """The document of a request, from somebody who may send one."""
        try:
            if self._gate is not None:
                return self._gate.verify(kv_transfer_params)
            return read_request(kv_transfer_params, request_id=request_id)
        except (InvalidParams, UntrustedParams) as error:
            raise RequestError(f"kv_transfer_params: {error}", param="kv_transfer_params") from error

    @property
    def ready(self) -> bool:
        """Returns True if the engine can accept signed documents."""
        return self._gate is None or self._gate.ready <= time.time()

    def session(self, prompt: list[int], handoff: Handoff) -> KVSession | None:
        """Returns a session of one sequence with the store; None where there is no store."""
        return None if self._connector is None else KVSession(self._connector, prompt, handoff, self._page_tokens)

    def result(self, handoff: Handoff, sessions: Sequence[KVSession]) -> dict[str, object] | None:
        """The answer's `kv_transfer_params`, once all sequences of the request have ended; None without a document.

        Raises:
            RequestError: whoever asked speaks a version that cannot say what must be understood.
        """
        params = handoff.params
        if params is None or self._legacy:
            return None
        first = sessions[0]
        result = KVTransferParams(
            version=PROTOCOL_VERSION,
            request_id=params.request_id,
            transfer=params.transfer,
            phase="prefill_result" if handoff.prefilling else "decode_result",
            mode=params.mode,
            usage=Usage(
                prompt_tokens=sum(len(one.prompt) for one in sessions),
                cached_tokens=sum(one.loaded_to for one in sessions),
                computed_tokens=sum(len(one.prompt) - one.loaded_to for one in sessions),
                loaded_tokens=sum(one.loaded_to - one.local_tokens for one in sessions),
                loaded_bytes=sum(one.loaded_bytes for one in sessions),
                saved_bytes=sum(one.saved_bytes for one in sessions),
            ),
        )
        if handoff.prefilling:
            more: dict[str, object] = {
                "producer": self.instance.model_copy(update=self._address()),
                "load_keys": tuple(key for one in sessions for key in one.stored_keys),
                "lease": Lease(ttl_ms=LEASE_MS),
            }
            if len(sessions) == 1:
                more["prefix"] = TokenPrefix.by_digest(first.prompt)
            if self._address():
                more["extensions"] = {**(result.extensions or {}), **READS_EXTENSION}
            result = result.model_copy(update=more)
        try:
            return write(downgrade_for_reader(result, params.version))
        except LossyDowngrade as error:
            raise RequestError(f"kv_transfer_params: {error}", param="kv_transfer_params") from error

    def _address(self) -> dict[str, object]:
        """Returns the address at which other engines can read this one's pages, if they are read from here."""
        address = None if self._store is None else self._store.address
        return {} if address is None else {"address": address}

    async def release(self, sessions: Sequence[KVSession]) -> int:
        """Delete what these sessions have saved and nobody had saved before; how many pages that were."""
        return 0 if self._store is None else sum([await session.drop(self._store) for session in sessions])

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

    def _check(self, params: KVTransferParams, prompts: Sequence[Sequence[int]], cache_salt: str | None) -> None:
        isolation = params.isolation or Isolation()
        if params.mode not in ("store", "rendezvous"):
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
        elif "cache_salt" in isolation.model_fields_set and cache_salt not in (None, isolation.cache_salt):
            fault = "isolation.cache_salt is not the request's cache_salt"
        else:
            return
        raise RequestError(f"kv_transfer_params: {fault}", param="kv_transfer_params")
