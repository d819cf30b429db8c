"""Sends one page through the whole path before the server serves: pool, store, verification, pool.

A page that comes back other than it went in stops the server; a store that does not answer does not, for it may come
back, and until then everything is computed.
"""

import logging
import os
from typing import Final

from kvparams_connectors.engines.sglang.host_pages import HostPages
from kvparams_connectors.engines.sglang.interface import HostKVCache
from kvparams_connectors.engines.sglang.page_buffers import flat_bytes, gather_page, scatter_page
from kvparams_connectors.engines.sglang.page_pipeline import HiCachePagePipeline
from kvparams_connectors.engines.sglang.settings import WHERE
from kvparams_connectors.store import ResultCode
from kvparams_connectors.transfer.cache_layouts import LayoutError

__all__ = ["HiCacheSelfTestError", "run_self_test"]

_LOGGER: Final = logging.getLogger(__name__)


class HiCacheSelfTestError(LayoutError):
    """A page came back other than it went in."""


def run_self_test(pool: HostKVCache, pages: HostPages, traffic: HiCachePagePipeline) -> bool:
    """Take a page of the pool, fill it with random bytes, store, wipe and load it, and compare.

    Returns:
        False if there was no free page, or the store did not take or give it: neither is the path's fault.

    Raises:
        HiCacheSelfTestError: what came back is not what went in, or is not what SGLang calls that page.
    """
    indices = pool.alloc(pool.page_size)
    if indices is None:
        _LOGGER.warning("%s: no self-test: the host pool has no free page", WHERE)
        return False
    try:
        (place,) = pages.places(indices, 1)
        before, nothing = os.urandom(pages.page_bytes), bytes(pages.page_bytes)
        scatter_page(memoryview(before), place)
        _compare_with_sglang(pool, int(indices[0]), before)
        name = f"self-test {os.urandom(16).hex()}"
        code = traffic.put([name], [place])[0]
        scatter_page(memoryview(nothing), place)
        if code is not ResultCode.OK:
            _LOGGER.warning("%s: self-test: the store did not accept a page (%s)", WHERE, code.value)
            return False
        loaded = traffic.get([name], [place])
        after = bytearray(nothing)
        gather_page(place, memoryview(after))
        scatter_page(memoryview(nothing), place)
        traffic.delete([name])
        if not loaded:
            _LOGGER.warning("%s: self-test: the store did not return a page", WHERE)
            return False
        if bytes(after) != before:
            raise HiCacheSelfTestError(f"{WHERE}: self-test: a page changed between save and load")
        return True
    finally:
        pool.free(indices)


def _compare_with_sglang(pool: HostKVCache, index: int, before: bytes) -> None:
    """Checks that SGLang itself reads the same bytes for this page as were written to it."""
    try:
        seen = pool.get_data_page(index)
    except NotImplementedError:  # asymmetric K and V: SGLang has no copy of a page
        return
    if flat_bytes(seen).tobytes() != before:
        raise HiCacheSelfTestError(
            f"{WHERE}: self-test: the memory of a page differs from the page that SGLang returns"
        )
