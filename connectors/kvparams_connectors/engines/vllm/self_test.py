"""Sends one page through the whole path before the engine serves: gather, put, get, verify, scatter.

A page that comes back other than it went in stops the engine; a store that does not answer does not, for it may come
back, and until then everything is computed.
"""

import logging
import os
from collections.abc import Sequence
from typing import Final

import torch

from kvparams.params import PROTOCOL_VERSION, Isolation, KVTransferParams, Transfer
from kvparams_connectors.store import KVStore
from kvparams_connectors.transfer.cache_layouts import LayoutError
from kvparams_connectors.transfer.connector import KVStoreConnector

__all__ = ["SelfTestError", "run_self_test"]

_LOGGER: Final = logging.getLogger(__name__)


class SelfTestError(LayoutError):
    """A page came back other than it went in."""


@torch.inference_mode()
def run_self_test(
    connector: KVStoreConnector,
    store: KVStore,
    tensors: Sequence[torch.Tensor],
    *,
    page_tokens: int,
    block_size: int,
    deadline_s: float,
) -> bool:
    """Fill the blocks of one page with random bytes, save, wipe and load them, and compare. They are zero afterwards.

    Args:
        connector: of this worker.
        store: of the connector.
        tensors: per layer, with blocks in the first dimension; no request has used them yet.
        page_tokens: of a stored page.
        block_size: tokens of a block.
        deadline_s: of a job.

    Returns:
        False if the store did not take or give the page, which is not the path's fault.

    Raises:
        SelfTestError: what came back is not what went in.
    """
    count = -(-page_tokens // block_size)
    tokens = count * block_size
    if count >= len(tensors[0]):
        raise SelfTestError(f"the cache has {len(tensors[0])} blocks, but a page of {page_tokens} tokens needs {count}")
    blocks = list(range(len(tensors[0]) - 1, len(tensors[0]) - 1 - count, -1))  # backwards: no order is assumed
    plan = connector.plan(list(range(tokens)), _unshared_params())
    before = [_random(tensor, blocks) for tensor in tensors]
    try:
        saved = connector.save(plan, blocks, 0, tokens, required=True).result(deadline_s)
        if not saved.complete:
            _LOGGER.warning("self-test: the store did not accept a page (%s); until it does, all KV is computed", saved)
            return False
        for tensor in tensors:
            tensor[blocks] = 0
        loaded = connector.load(plan, blocks, 0, tokens).result(deadline_s)
        if loaded.refused:
            raise SelfTestError(f"self-test: a page that was just stored came back as {loaded.refused[0].reason}")
        if loaded.end_token != tokens:
            _LOGGER.warning(
                "self-test: the store did not return a page (%s); until it does, all KV is computed", loaded
            )
            return False
        for layer, (tensor, bytes_before) in enumerate(zip(tensors, before, strict=True)):
            if not torch.equal(_bytes(tensor, blocks), bytes_before):
                raise SelfTestError(f"self-test: the KV of layer {layer} changed between save and load")
        return True
    finally:
        for tensor in tensors:
            tensor[blocks] = 0
        store.delete(plan.keys, deadline_s).result(deadline_s)


def _unshared_params() -> KVTransferParams:
    """Params of pages that nobody else asks for."""
    salt = os.urandom(16).hex()
    return KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id="self-test",
        transfer=Transfer(id=salt, attempt=1),
        phase="prefill",
        mode="store",
        isolation=Isolation(cache_salt=f"self-test {salt}"),
    )


def _random(tensor: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Fill blocks with numbers of their type that are distinct enough; their bytes."""
    shape = tensor[list(blocks)].shape
    noise = torch.rand(shape, dtype=torch.float32, device=tensor.device)
    tensor[list(blocks)] = (noise * 255).to(torch.uint8) if tensor.dtype == torch.uint8 else noise.to(tensor.dtype)
    return _bytes(tensor, blocks)


def _bytes(tensor: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    return tensor[list(blocks)].contiguous().view(torch.uint8).clone()
