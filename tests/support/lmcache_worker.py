"""Serves LMCache's `StorageManager` over a pipe: it puts and gets chunks on request, in LMCache's interpreter.

    python tests/support/lmcache_worker.py SPEC

SPEC is a `tests.support.lmcache_process.Spec` as JSON. Each line on stdin is a question, each on stdout its answer. A
measurement covers LMCache's own path: `batched_put` until its own callback says that the remote store has every chunk,
`batched_get` until the chunks lie in its pool. Nothing is compared or freed in between.
"""

import importlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

_DONE_S: Final = 60.0


class Worker:
    """One `StorageManager`, its source chunks, and what it has read."""

    def __init__(self, spec: dict[str, Any]) -> None:
        for name in spec["disabled"]:
            sys.modules[name] = None  # type: ignore[assignment]
        self._numpy: Any = importlib.import_module("numpy")
        self._utils: Any = importlib.import_module("lmcache.utils")
        memory: Any = importlib.import_module("lmcache.v1.memory_management")
        config: Any = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata: Any = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
        events: Any = importlib.import_module("lmcache.v1.event_manager").EventManager
        manager: Any = importlib.import_module("lmcache.v1.storage_backend.storage_manager").StorageManager
        shape, settings = spec["shape"], spec["settings"]
        self._count: int = spec["count"]
        self._dtype = importlib.import_module("torch").bfloat16
        self._backend: str = spec["backend"]
        self._engine_config = config.from_file(settings["file"]) if "file" in settings else config.from_dict(settings)
        self._metadata = metadata(
            model_name="bench/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._dtype,
            kv_shape=(shape["layers"], 2, shape["tokens"], shape["heads"], shape["head_size"]),
            role="worker",
            chunk_size=shape["tokens"],
        )
        self._manager = manager(self._engine_config, self._metadata, events())
        if self._backend not in self._manager.storage_backends:
            raise RuntimeError(f"no {self._backend} among {list(self._manager.storage_backends)}")
        self._remote = self._manager.storage_backends[self._backend]
        self._submit = self._remote.batched_submit_put_task
        self._remote.batched_submit_put_task = self._submit_and_tell
        self._left = 0
        self._all_done = threading.Event()
        self._counting = threading.Lock()
        lengths = [shape["tokens"]] * self._count
        lengths[-1] = spec["last_tokens"] or shape["tokens"]
        self._order = memory.MemoryFormat.KV_2LTD
        self._sources = [self._allocate(tokens) for tokens in lengths]
        self._page_bytes = self._sources[0].get_size()
        self._pages: memoryview | None = None
        if spec["pages"]:
            with Path(spec["pages"]).open("r+b") as file:
                self._pages = memoryview(mmap.mmap(file.fileno(), 0))
        for number, source in enumerate(self._sources):
            view = source.byte_array.cast("B")
            if self._pages is not None:
                view[:] = self._pages[number * self._page_bytes : (number + 1) * self._page_bytes]
            else:
                view[:] = (bytes([number + 1, 7, number ^ 255]) * view.nbytes)[: view.nbytes]
        self._got: list[Any] = []

    def _allocate(self, tokens: int) -> Any:
        found = self._manager.allocate(self._metadata.get_shapes(tokens), self._metadata.get_dtypes(), fmt=self._order)
        if found is None:
            raise RuntimeError("LMCache's pool is too small")
        return found

    def _submit_and_tell(
        self, keys: Sequence[Any], objects: list[Any], transfer_spec: Any = None, on_complete_callback: Any = None
    ) -> None:
        """LMCache's own way to say that the remote store is done, for each key; its manager does not ask for it."""
        self._submit(keys, objects, transfer_spec, self._one_done)

    def _one_done(self, _key: Any) -> None:
        with self._counting:
            self._left -= 1
            if not self._left:
                self._all_done.set()

    def _keys(self, name: str) -> list[Any]:
        start = int(name) * 1_000_000
        return [
            self._utils.CacheEngineKey("bench/model", 1, 0, start + number, self._dtype)
            for number in range(self._count)
        ]

    # ---- what can be asked

    def put(self, name: str) -> dict[str, Any]:
        """Put all source chunks under the keys of `name`."""
        for source in self._sources:  # `batched_put` lets go of them
            source.ref_count_up()
        return self._put(name, list(self._sources))

    def _put(self, name: str, objects: list[Any]) -> dict[str, Any]:
        self._left = self._count
        self._all_done.clear()
        self._manager.batched_put(self._keys(name), objects, location=self._backend)
        return {"done": self._all_done.wait(_DONE_S)}

    def save(self, name: str) -> dict[str, Any]:
        """Put chunks that lie in the shared pages: room in the pool, one copy each, `put`."""
        assert self._pages is not None
        fresh = self._manager.batched_allocate(
            self._metadata.get_shapes(), self._metadata.get_dtypes(), self._count, fmt=self._order
        )
        if fresh is None:
            raise RuntimeError("LMCache's pool is too small")
        for number, one in enumerate(fresh):
            self._copy(self._numpy.frombuffer(one.byte_array, self._numpy.uint8), self._page(number))
        return self._put(name, fresh)

    def load(self, name: str) -> dict[str, Any]:
        """Get chunks, one copy each to the shared pages, and let go of them."""
        self.get(name)
        found = [one is not None for one in self._got]
        if all(found):
            for number, one in enumerate(self._got):
                self._copy(self._page(self._count + number), self._numpy.frombuffer(one.byte_array, self._numpy.uint8))
        self.release(name)
        return {"found": found}

    def _page(self, number: int) -> Any:
        assert self._pages is not None
        return self._numpy.frombuffer(self._pages, self._numpy.uint8, self._page_bytes, number * self._page_bytes)

    def _copy(self, target: Any, source: Any) -> None:
        self._numpy.copyto(target, source)

    def get(self, name: str) -> dict[str, Any]:
        """Get the chunks of `name`; they stay until `release`."""
        self._got = self._manager.batched_get(self._keys(name), location=self._backend)
        return {"found": [one is not None for one in self._got]}

    def compare(self, name: str) -> dict[str, Any]:
        """Which of the chunks that were got are those that were put: bytes, shape and order."""
        return {
            "same": [
                got is not None
                and bytes(got.byte_array.cast("B")) == bytes(source.byte_array.cast("B"))
                and list(got.get_shapes()) == list(source.get_shapes())
                and got.get_memory_format() == source.get_memory_format()
                for got, source in zip(self._got, self._sources, strict=True)
            ]
        }

    def show(self, name: str) -> dict[str, Any]:
        """Copy the chunks that were got to the pages that are shared."""
        assert self._pages is not None
        for number, got in enumerate(self._got):
            at = (self._count + number) * self._page_bytes
            self._pages[at : at + self._page_bytes] = got.byte_array.cast("B")
        return {}

    def release(self, name: str) -> dict[str, Any]:
        """Let go of what was got."""
        for got in self._got:
            if got is not None:
                got.ref_count_down()
        self._got = []
        return {}

    def forget(self, name: str) -> dict[str, Any]:
        """Remove the chunks of `name` from Mooncake, by force; its connector cannot."""
        native = self._remote.connection.getWrappedConnector().store
        native.batch_remove([key.to_string() for key in self._keys(name)], True)
        return {}

    def contains(self, name: str) -> dict[str, Any]:
        """How many leading chunks of `name` are there."""
        return {"found": self._manager.batched_contains(self._keys(name), [self._backend])[0]}

    def remove(self, name: str) -> dict[str, Any]:
        """Remove the chunks of `name`, by LMCache."""
        return {"removed": self._manager.batched_remove(self._keys(name), [self._backend])}

    def ping(self, name: str) -> dict[str, Any]:
        """What the connector says to LMCache's health monitor."""
        asyncio: Any = importlib.import_module("asyncio")
        future = asyncio.run_coroutine_threadsafe(self._remote.connection.ping(), self._manager.loop)
        return {"code": future.result(_DONE_S)}

    def prefix(self, name: str) -> dict[str, Any]:
        """The asynchronous way: lookup and get of LMCache's loading ahead."""
        asyncio: Any = importlib.import_module("asyncio")
        keys = self._keys(name)

        async def both() -> tuple[int, list[Any]]:
            found = await self._remote.batched_async_contains("lookup", keys)
            return found, await self._remote.batched_get_non_blocking("lookup", keys)

        found, self._got = asyncio.run_coroutine_threadsafe(both(), self._manager.loop).result(_DONE_S)
        return {"found": found, "got": len(self._got)}

    def keys(self, name: str) -> dict[str, Any]:
        """The keys of `name` as LMCache writes them."""
        return {"keys": [key.to_string() for key in self._keys(name)]}

    def free(self, name: str) -> dict[str, Any]:
        """How many bytes of LMCache's pool are not in use."""
        allocator = self._manager.allocator_backend.memory_allocator.pin_allocator
        return {"bytes": allocator.address_manager.get_free_size()}

    def close(self, name: str) -> dict[str, Any]:
        """Close LMCache. Not done at the end by itself: closing `redis://` waits for its own thread, for ever."""
        self.release("")
        for source in self._sources:
            source.ref_count_down()
        self._sources = []
        self._manager.close()
        return {}


def main() -> None:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever LMCache prints goes to the log

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer).encode() + b"\n")

    try:
        worker = Worker(json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - it belongs to whoever started this
        say({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # LMCache's threads are no daemons
    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        work: Callable[[str], dict[str, Any]] = getattr(worker, asked["do"])
        try:
            say(work(asked["name"]))
        except Exception as error:  # noqa: BLE001 - as above
            say({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)


if __name__ == "__main__":
    main()
