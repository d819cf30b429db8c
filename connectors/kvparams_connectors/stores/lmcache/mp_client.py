"""LMCache 0.5.6's own client of its multi-process server: what is used of it, and how it is loaded.

Facts of lmcache/v1/multiprocess/ of that version: requests go over ZeroMQ and are answered by number; a request whose
handler raises on the server is never answered (transport/zmq_impl/server.py, mq.py); a client whose peer is gone blocks
the loop that all clients of the process share once 1000 requests wait to be sent. Whoever did not get an answer in time
throws the client away, with whatever it had not sent, and takes a new one.
"""

import hashlib
import importlib
import struct
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final, Protocol

from kvparams_connectors.store_url import StoreError

__all__ = ["LMCacheMPClient", "LMCacheMPLibrary", "MessagingFuture", "NoReplyError", "pseudo_token_ids"]

_VERSION: Final = "0.5.6"
_TOKENS_DOMAIN: Final = b"kvparams lmcache tokens 1\n"


class NoReplyError(Exception):
    """The server did not answer in time: it is gone, busy, or its handler raised."""


class MessagingFuture(Protocol):
    """`MessagingFuture` in futures.py."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the answer."""
        ...


def pseudo_token_ids(key: str, count: int) -> tuple[int, ...]:
    """The pseudo tokens that stand for a key: SHAKE-256 of it, as so many numbers below 2^31."""
    raw = hashlib.shake_256(_TOKENS_DOMAIN + key.encode()).digest(4 * count)
    return tuple(number & 0x7FFF_FFFF for number in struct.unpack(f"<{count}I", raw))


class LMCacheMPLibrary:
    """The parts of the package, loaded once for a store."""

    def __init__(self) -> None:
        """Imports LMCache's client classes.

        Raises:
            StoreError: LMCache is not installed, or its version is not the supported one.
        """
        try:
            found = metadata.version("lmcache")
            self._types: Any = importlib.import_module("lmcache.v1.multiprocess.custom_types")
            self._factory: Any = importlib.import_module("lmcache.v1.multiprocess.transport.factory")
            self._hasher: Any = importlib.import_module("lmcache.v1.multiprocess.token_hasher")
            self._api: Any = importlib.import_module("lmcache.v1.distributed.api")
            self._zmq: Any = importlib.import_module("zmq")
        except ImportError as error:
            raise StoreError(
                f"lmcache-mp store: LMCache cannot be loaded ({error}); pip install 'kvparams[lmcache]'"
            ) from error
        self._hash: Any = None
        if found != _VERSION:
            raise StoreError(f"lmcache-mp store: LMCache {found} is installed; only {_VERSION} is supported")

    def connect(self, address: str) -> "LMCacheMPClient":
        """A client of the server at `host:port`. It connects in the background."""
        context = self._zmq.Context()
        context.linger = 0  # what was not sent must not keep the process from ending
        return LMCacheMPClient(self._factory.RequestClientFactory.create(f"tcp://{address}", context=context), context)

    def key(self, model: str, tokens: tuple[int, ...], request: str, *, worker: bool) -> Any:
        """Returns the key of a request's value; `worker` selects the single worker, or all of them for a lookup."""
        return self._types.IPCCacheServerKey(
            model_name=model,
            world_size=1,
            worker_id=0 if worker else None,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=request,
            num_kv_readers=1,
        )

    def registration(self, instance: int, model: str, value_bytes: int) -> Any:
        """Returns the registration of one layer of one slot, in which a chunk is a row of bytes."""
        return self._types.RegisterEngineDrivenContextPayload(
            instance_id=instance,
            model_name=model,
            world_size=1,
            block_size=1,
            num_layers=1,
            hidden_dim_size=value_bytes,
            dtype_str="uint8",
            use_mla=True,
            num_physical_slots=1,
        )

    def object_name(self, model: str, tokens: Sequence[int]) -> dict[str, object]:
        """Returns the name of the value in the server's HTTP interface: `EncodedObjectKey` in distributed/api.py.

        It is right for a server with the default `--hash-algorithm blake3`.
        """
        if self._hash is None or self._hash.chunk_size != len(tokens):
            self._hash = self._hasher.TokenHasher(len(tokens), "blake3")
        (digest,) = self._hash.compute_chunk_hashes(list(tokens))
        rank = self._api.ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
        return {"chunk_hash_hex": digest.hex(), "model_name": model, "kv_rank": rank}


class LMCacheMPClient:
    """A client, until the first question that is not answered in time."""

    def __init__(self, client: Any, context: Any) -> None:
        self._client = client
        self._context = context

    def chunk_size(self) -> MessagingFuture:
        """Returns the tokens of a chunk."""
        return self._client.get_chunk_size()

    def register(self, registration: Any) -> MessagingFuture:
        """Name and size of the shared memory. Doing it again refreshes the registration, or makes it anew."""
        return self._client.register_kv_cache_engine_driven_context(registration)

    def unregister(self, instance: int) -> MessagingFuture:
        """Takes the shared memory back."""
        return self._client.unregister_kv_cache_engine_driven_context(instance)

    def lookup(self, key: Any) -> MessagingFuture:
        """Asks which chunks the server has, and locks them."""
        return self._client.lookup(key, 1)

    def status(self, request: str, wait_s: float) -> MessagingFuture:
        """Returns how many chunks the lookup has found and locked; None if it is not done."""
        return self._client.wait_prefetch_status(request, wait_s)

    def free(self, key: Any) -> MessagingFuture:
        """Unlocks chunks that were looked up."""
        return self._client.free_lookup_locks(key, 1)

    def end(self, request: str) -> MessagingFuture:
        """Ends a session."""
        return self._client.end_session(request)

    def prepare_store(self, key: Any, instance: int) -> MessagingFuture:
        """Asks where chunks may be written."""
        return self._client.prepare_store(key, instance)

    def commit_store(self, key: Any, instance: int) -> MessagingFuture:
        """Says that chunks were written."""
        return self._client.commit_store(key, instance, b"")

    def prepare_retrieve(self, key: Any, instance: int) -> MessagingFuture:
        """Asks where chunks can be read."""
        return self._client.prepare_retrieve(key, instance)

    def commit_retrieve(self, key: Any, instance: int) -> MessagingFuture:
        """Says that chunks were read."""
        return self._client.commit_retrieve(key, instance)

    @staticmethod
    def wait(answer: MessagingFuture, deadline: float) -> Any:
        """The answer. Raises NoAnswer if there is none by `deadline`, on the clock of `time.monotonic`."""
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise NoReplyError from error

    def close(self) -> None:
        """Throw away what was not sent; nobody waits for it any more."""
        self._client.close()
        self._context.destroy(linger=0)
