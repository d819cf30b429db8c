"""Defines what one request's `kv_transfer_params` say, and what its answer's will.

A request's members never raise in the engine's loop, where one bad request would end all requests. Wrong or doubtful
members are logged, and the request does not use the store.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from kvparams.codec import read_request, write
from kvparams.errors import InvalidParams
from kvparams.params import PROTOCOL_VERSION, Endpoint, Isolation, KVTransferParams, Lease, Transfer, Usage
from kvparams.signing.verification import UntrustedParams
from kvparams.tokens import TokenPrefix
from kvparams.versions import downgrade_for_reader

__all__ = ["LEASE_MS", "RequestParams", "VerifyParams", "new_incarnation", "prefill_result", "read_request_params"]

VerifyParams = Callable[[Mapping[str, object] | str | None], KVTransferParams | None]
"""Raises `UntrustedParams` or `InvalidParams`."""
LEASE_MS: Final = 60_000
"""For how long the proxy may count on saved pages. The store evicts what was not used for longest, so in a store of
sensible size they live much longer; should one be gone nevertheless, vLLM's load failure policy says what follows."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """A `RequestParams` holds the document of one request, and the facts that follow from it."""

    params: KVTransferParams | None
    """The document that came; None: an ordinary request, which shares prefixes."""
    shared_params: KVTransferParams | None
    """What page keys and lookups need of it: isolation, source, store keys. None: nothing of that."""
    disabled_reason: str | None = None
    """Why the store is left alone; None: it is not."""
    malformed: bool = False
    """Whether that is because what came is no document."""

    @property
    def is_prefill(self) -> bool:
        """Returns whether another engine will ask for what this one computes."""
        return self.params is not None and self.params.phase == "prefill"

    @property
    def is_decode(self) -> bool:
        """Returns whether the KV is promised to be stored."""
        return self.params is not None and self.params.phase == "decode"

    @property
    def load_keys(self) -> Sequence[str]:
        """Returns the keys of promised KV; empty without such a promise."""
        return () if self.params is None or not self.is_decode else self.params.load_keys or ()


def read_request_params(
    kv_transfer_params: Mapping[str, object] | str | None,
    *,
    request_id: str,
    prompt: Sequence[int],
    cache_salt: str | None,
    lora: str | None,
    admit: VerifyParams | None = None,
) -> RequestParams:
    """Returns what a request says about its KV.

    Args:
        kv_transfer_params: of the request.
        request_id: the engine's, for the trio of vLLM #12957, which has none.
        prompt: token ids.
        cache_salt: the request's own.
        lora: the adapter that the engine uses for it.
        admit: whether what it says may be acted on (`kvparams.signing.request_verifier`); None: whoever says it is
            believed.
    """
    try:
        if admit is None:
            params = read_request(kv_transfer_params, request_id=request_id)
        else:
            params = admit(kv_transfer_params)
    except (InvalidParams, UntrustedParams) as error:
        return RequestParams(None, None, f"kv_transfer_params: {error}", isinstance(error, InvalidParams))
    isolation = None if params is None else params.isolation
    if params is not None:
        fault = _fault(params, cache_salt, lora)
        if fault is not None:
            return RequestParams(None, None, f"kv_transfer_params: {fault}")
        if params.mode != "store":
            params = None  # another connector of this engine moves the KV: to the store it is an ordinary request
    if isolation is not None and "cache_salt" in isolation.model_fields_set:
        cache_salt = isolation.cache_salt
    shared = None
    if params is not None or cache_salt is not None or lora is not None:
        members: dict[str, object] = {}
        if cache_salt is not None or lora is not None:
            members["isolation"] = _isolation(cache_salt, lora)
        for name in ("producer", "store_keys"):
            if params is not None and getattr(params, name) is not None:
                members[name] = getattr(params, name)
        try:
            shared = KVTransferParams.model_validate(
                {
                    "version": PROTOCOL_VERSION,
                    "request_id": "-",
                    "transfer": Transfer(id="-", attempt=1),
                    "phase": "prefill",
                    "mode": "store",
                    **members,
                }
            )
        except ValueError:  # a salt or an adapter's name that no document can hold
            return RequestParams(None, None, "the cache salt or the name of the adapter is longer than 256 characters")
    if params is not None and params.prefix is not None and not params.prefix.covers(prompt):
        params = None  # it speaks of another prompt, of several in one request perhaps: this one is an ordinary one
    return RequestParams(params, shared)


def _isolation(cache_salt: str | None, lora: str | None) -> dict[str, str]:
    """Only what is there: absent and null stay apart."""
    both = {"cache_salt": cache_salt, "lora": lora}
    return {name: value for name, value in both.items() if value is not None}


def _fault(params: KVTransferParams, cache_salt: str | None, lora: str | None) -> str | None:
    isolation = params.isolation or Isolation()
    if params.phase not in ("prefill", "decode"):
        return f"phase {params.phase!r} does not belong to a request for tokens"
    if isolation.lora is not None and isolation.lora != lora:
        return "isolation.lora is not the adapter that the engine uses for this request"
    if "cache_salt" in isolation.model_fields_set and cache_salt not in (None, isolation.cache_salt):
        return "isolation.cache_salt is not the request's cache_salt"
    return None


def prefill_result(
    handoff: RequestParams,
    *,
    producer: Endpoint,
    prompt: Sequence[int],
    load_keys: Sequence[str],
    cached_tokens: int,
    loaded_tokens: int,
) -> dict[str, object] | None:
    """The answer's `kv_transfer_params`; None without a document.

    Args:
        handoff: of the request.
        producer: this engine.
        prompt: token ids.
        load_keys: of the pages that hold the prompt's KV; for a decode leg none.
        cached_tokens: of the prompt, not computed here.
        loaded_tokens: of these, from the store.
    """
    params = handoff.params
    if params is None:
        return None
    cached_tokens = min(cached_tokens, len(prompt))
    result = KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id=params.request_id,
        transfer=params.transfer,
        phase="prefill_result" if handoff.is_prefill else "decode_result",
        mode="store",
        usage=Usage(
            prompt_tokens=len(prompt),
            cached_tokens=cached_tokens,
            computed_tokens=len(prompt) - cached_tokens,
            loaded_tokens=loaded_tokens,
        ),
    )
    if handoff.is_prefill:
        more: dict[str, object] = {
            "producer": producer,
            "load_keys": tuple(load_keys),
            "lease": Lease(ttl_ms=LEASE_MS),
            "prefix": TokenPrefix.by_digest(prompt),
        }
        result = result.model_copy(update=more)
    return write(downgrade_for_reader(result, params.version))


def new_incarnation() -> str:
    """A restarted engine is another one."""
    return uuid4().hex
