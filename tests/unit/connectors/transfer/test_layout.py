"""Tests paged tensors and canonical payloads against a plain loop over every element."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import Geometry, KVShard, Namespace
from kvparams_connectors.transfer.layout import LayoutError, PagedKVLayout
from tests.support.connectors.native_layouts import copying_code

__all__ = ["copying_code"]

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, NaNs and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def shuffled(count: int, seed: int) -> list[int]:
    return Random(seed).sample(range(count), count)


def bits(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """`[..., dim * itemsize]` bytes, whatever the element type."""
    return tensor.contiguous().view(torch.uint8).numpy()


def oracle(keys: list[torch.Tensor], values: list[torch.Tensor], blocks: list[int], start: int, tokens: int) -> bytes:
    size, heads = keys[0].shape[1], keys[0].shape[2]
    payload = b""
    for pair in zip(keys, values, strict=True):
        for tensor in pair:
            raw = bits(tensor)
            for head in range(heads):
                for position in range(start, start + tokens):
                    payload += raw[blocks[position // size], position % size, head].tobytes()
    return payload


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gather_and_scatter_agree_with_a_plain_loop(dtype: torch.dtype, block_size: int) -> None:
    keys = [filled((40, block_size, 2, 8), dtype, seed) for seed in range(3)]
    values = [filled((40, block_size, 2, 4), dtype, seed + 10) for seed in range(3)]
    layout = PagedKVLayout(keys, values)
    blocks = shuffled(40, 1)
    payload = bytearray(layout.payload_bytes(21))
    layout.gather(blocks, 5, 21, memoryview(payload))
    assert bytes(payload) == oracle(keys, values, blocks, 5, 21)

    others = [torch.zeros_like(tensor) for tensor in keys], [torch.zeros_like(tensor) for tensor in values]
    target = PagedKVLayout(*others)
    target.scatter(blocks, 9, 10, memoryview(payload), range(5, 26))
    back = bytearray(target.payload_bytes(21))
    target.gather(blocks, 5, 21, memoryview(back))
    expected = oracle([torch.zeros_like(t) for t in keys], [torch.zeros_like(t) for t in values], blocks, 5, 21)
    assert len(back) == len(expected)
    assert oracle(*others, blocks, 9, 10) == oracle(keys, values, blocks, 9, 10)
    assert oracle(*others, blocks, 5, 4) == expected[: len(oracle(*others, blocks, 5, 4))]
    written = sum(int(bits(tensor).any(axis=-1).sum()) for one in others for tensor in one)
    assert written <= 10 * 2 * 6  # ten tokens, two heads, six tensors: not one row more


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 30), st.integers(1, 30), st.integers(0, 99))
def test_any_two_block_sizes_share_pages(first: int, second: int, start: int, tokens: int, seed: int) -> None:
    def layout(block_size: int) -> tuple[torch.Tensor, PagedKVLayout, list[int]]:
        tensor = filled((2, 2, 64, block_size, 3, 4), torch.float16, seed)
        blocks = shuffled(64, seed)
        return tensor, PagedKVLayout.from_stacked(tensor), blocks

    _, source, source_blocks = layout(first)
    _, target, target_blocks = layout(second)
    end = min(start + tokens, 64 * min(first, second))
    if end <= start:
        return
    payload = bytearray(source.payload_bytes(end - start))
    source.gather(source_blocks, start, end - start, memoryview(payload))
    target.scatter(target_blocks, start, end - start, memoryview(payload), range(start, end))
    back = bytearray(len(payload))
    target.gather(target_blocks, start, end - start, memoryview(back))
    assert back == payload


def test_tensors_with_gaps_between_tokens_and_heads_are_read_by_their_strides() -> None:
    """K and V packed side by side in one tensor: `[blocks, block_size, heads, K dim + V dim]`."""
    packed = filled((10, 4, 2, 12), torch.float32)
    keys, values = [packed[..., :8]], [packed[..., 8:]]
    layout = PagedKVLayout(keys, values)
    payload = bytearray(layout.payload_bytes(13))
    layout.gather([3, 9, 0, 5], 2, 13, memoryview(payload))
    assert bytes(payload) == oracle(keys, values, [3, 9, 0, 5], 2, 13)
    packed[:, :, :, :8] = 0
    layout.scatter([3, 9, 0, 5], 2, 13, memoryview(payload), range(2, 15))
    assert bytes(payload) == oracle(keys, values, [3, 9, 0, 5], 2, 13)


def test_tensors_that_were_made_in_inference_mode_are_written_from_any_thread() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(1, 2, 4, 4, 1, 4)
    layout = PagedKVLayout.from_stacked(tensor)
    payload = memoryview(bytearray(b"\1" * layout.payload_bytes(4)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(layout.scatter, [2], 0, 4, payload, range(4)).result()
    assert tensor[:, :, 2].all()
    assert int((tensor != 0).sum()) == 2 * 4 * 4


def test_a_position_behind_the_table_and_a_block_that_is_none_are_errors() -> None:
    layout = PagedKVLayout.from_stacked(filled((1, 2, 4, 4, 1, 4), torch.float32))
    payload = memoryview(bytearray(layout.payload_bytes(4)))
    for blocks, start in (([0], 1), ([0, 4], 1), ([0, -1], 1), ([], 0)):
        with pytest.raises(IndexError):
            layout.gather(blocks, start, 4, payload)
        with pytest.raises(IndexError):
            layout.scatter(blocks, start, 4, payload, range(start, start + 4))
    with pytest.raises(ValueError, match="payload"):
        layout.gather([0, 1], 0, 5, payload)


A = torch.zeros(4, 4, 2, 8)
REFUSED: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {
    "no layers": ([], []),
    "a V missing": ([A, A], [A]),
    "three dimensions": ([A[0]], [A[0]]),
    "five dimensions": ([A[None]], [A[None]]),
    "no tokens": ([A[:, :0]], [A[:, :0]]),
    "integers of 8 bytes": ([A.long()], [A.long()]),
    "doubles": ([A.double()], [A.double()]),
    "complex": ([A.to(torch.complex64)], [A.to(torch.complex64)]),
    "another device": ([A.to("meta")], [A.to("meta")]),
    "layers of other shape": ([A, A[:2]], [A, A[:2]]),
    "layers of other strides": ([A, torch.zeros(4, 4, 2, 9)[..., :8]], [A, A]),
    "K and V of other heads": ([A], [A[:, :, :1]]),
    "K and V of other dtype": ([A], [A.half()]),
    "a head with gaps": ([A[..., ::2]], [A[..., ::2]]),
    "one block for all": ([A[:1].expand(4, 4, 2, 8)], [A]),
    "one token for all": ([A[:, :1].expand(4, 4, 2, 8)], [A]),
    "one head for all": ([A[:, :, :1].expand(4, 4, 2, 8)], [A]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_are_not_understood_are_refused(what: str) -> None:
    with pytest.raises(LayoutError):
        PagedKVLayout(*REFUSED[what])


@pytest.mark.parametrize("shape", [(2, 3, 4, 4, 2, 8), (2, 2, 4, 4, 8), (2, 2, 2, 4, 4, 2, 8)])
def test_stacked_tensors_that_are_not_understood_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        PagedKVLayout.from_stacked(torch.zeros(shape))


def test_a_rectangle_says_which_part_of_the_model_the_tensors_are() -> None:
    namespace = Namespace("model", "revision", "float32", Geometry(6, 4, 8, 8), 16)
    part = PagedKVLayout([A, A], [A, A], rectangle=KVShard(2, 4, 2, 4))
    part.check(namespace)
    with pytest.raises(LayoutError):
        PagedKVLayout([A, A], [A, A], rectangle=KVShard(2, 5, 2, 4))
    for wrong in (
        replace(namespace, dtype="bfloat16"),
        replace(namespace, geometry=Geometry(3, 4, 8, 8)),
        replace(namespace, geometry=Geometry(6, 3, 8, 8)),
        replace(namespace, geometry=Geometry(6, 4, 16, 8)),
        replace(namespace, geometry=Geometry(6, 4, 8, 0)),
    ):
        with pytest.raises(LayoutError):
            part.check(wrong)
