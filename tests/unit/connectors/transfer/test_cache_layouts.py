"""Tests every form of an engine's tensors against a plain loop; uncertain forms are refused."""

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch

from kvparams.keys import DTYPE_BYTES, Geometry, KVShard
from kvparams_connectors.transfer.cache_layouts import CACHE_LAYOUTS, CacheLayout, CacheSpec, read_cache_spec
from kvparams_connectors.transfer.layout import LayoutError, PagedKVLayout
from tests.support.connectors.kv_oracle import PHYSICAL, TORCH, engine_tensors, payload, same_bits, truth
from tests.support.connectors.native_layouts import copying_code

__all__ = ["copying_code"]

SHAPE = Geometry(layers=3, kv_heads=2, k_dim=8, v_dim=8)
LATENT = Geometry(layers=3, kv_heads=1, k_dim=12, v_dim=0)
BLOCKS = 9
BY_NAME = {form.name: form for form in CACHE_LAYOUTS}


def shape_of(form: CacheLayout) -> Geometry:
    return LATENT if form.name == "mla" else SHAPE


def spec_of(shape: Geometry, block_size: int, dtype: str) -> CacheSpec:
    return CacheSpec(block_size, shape.kv_heads, shape.k_dim, shape.v_dim, dtype)


def check(
    form: CacheLayout, dtype: str, block_size: int, *, physical: str | None = None, shape: Geometry | None = None
) -> None:
    """Gather from, and scatter to, tensors that were filled by loops; page from inside a block to inside another."""
    shape = shape or shape_of(form)
    tokens = 2 * block_size + 5
    kv = truth(shape, tokens, dtype, seed=block_size)
    whole = KVShard.whole(shape)
    blocks = Random(block_size).sample(range(BLOCKS), -(-tokens // block_size))

    def tensors(filled: int | None) -> list[torch.Tensor]:
        return engine_tensors(
            form.dims,
            kv,
            whole,
            blocks,
            num_blocks=BLOCKS,
            block_size=block_size,
            dtype=dtype,
            physical=physical,
            k_transposed=form.k_transposed,
            tokens=filled,
        )

    def layout(engine: list[torch.Tensor]) -> PagedKVLayout:
        return PagedKVLayout.from_engine(engine, spec_of(shape, block_size, dtype), form=form)

    source = layout(tensors(None))
    start = max(1, block_size - 3)
    page = memoryview(bytearray(source.payload_bytes(tokens - start)))
    source.gather(blocks, start, tokens - start, page)
    assert bytes(page) == payload(kv, whole, start, tokens - start)

    first = memoryview(bytearray(payload(kv, whole, 0, start)))
    engine = tensors(0)
    target = layout(engine)
    target.scatter(blocks, 0, start, first, range(start))
    assert same_bits(engine, tensors(start))
    target.scatter(blocks, start, tokens - start, page, range(start, tokens))
    assert same_bits(engine, tensors(None))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_form_and_dtype(name: str, dtype: str) -> None:
    check(BY_NAME[name], dtype, 16)


@pytest.mark.parametrize("block_size", [1, 32, 64, 128])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_form_and_block_size(name: str, block_size: int) -> None:
    check(BY_NAME[name], "bfloat16", block_size)


@pytest.mark.parametrize("physical", PHYSICAL)
@pytest.mark.parametrize("shape", [SHAPE, replace(LATENT, k_dim=9), Geometry(2, 3, 8, 5)], ids=["gqa", "mla", "k!=v"])
def test_every_physical_order_is_read_from_the_strides(physical: str, shape: Geometry) -> None:
    check(BY_NAME["packed"], "float16", 16, physical=physical, shape=shape)


def test_heads_first_in_memory_under_a_shape_that_names_tokens_first() -> None:
    """How vLLM's HND order looks: the shape of NHD, other strides."""
    check(BY_NAME["kv_first_nhd"], "bfloat16", 16, physical="LSBHND")
    check(BY_NAME["blocks_first_nhd"], "bfloat16", 16, physical="LBSHND")


def plain(form: str, block_size: int = 16, dtype: str = "float16", **more: int) -> torch.Tensor:
    sizes = {"S": 2, "B": more.get("blocks", 5), "N": block_size, "H": more.get("heads", 2), "D": 8, "C": 16}
    return torch.zeros([sizes[letter] for letter in form], dtype=TORCH[dtype])


SPEC = CacheSpec(16, 2, 8, 8, "float16")


@pytest.mark.parametrize(
    ("dims", "name"), [("SBNHD", "kv_first_nhd"), ("BSNHD", "blocks_first_nhd"), ("BNHC", "packed_nhd")]
)
def test_a_shape_that_can_be_one_form_only_is_recognized(dims: str, name: str) -> None:
    found = PagedKVLayout.from_engine([plain(dims)], SPEC)
    named = PagedKVLayout.from_engine([plain(dims)], SPEC, form=name)
    assert [span.view.stride() for span in found.spans()] == [span.view.stride() for span in named.spans()]


def test_mla_is_recognized_with_and_without_a_dimension_for_its_one_head() -> None:
    for shape in ((5, 16, 12), (5, 1, 16, 12), (5, 16, 1, 12)):
        layout = PagedKVLayout.from_engine([torch.zeros(shape).half()], CacheSpec(16, 1, 12, 0, "float16"))
        assert (layout.heads, layout.k_dim, layout.v_dim) == (1, 12, 0)


AMBIGUOUS = {
    "K first or blocks first": (plain("SBNHD", blocks=2), SPEC),
    "tokens first or heads first": (plain("SBNHD", heads=16), replace(SPEC, kv_heads=16)),
    "heads before tokens, K transposed or not": (plain("SBHND"), SPEC),
    "packed, K transposed or not": (plain("BHNC"), SPEC),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_a_shape_that_can_be_several_forms_is_refused_with_what_to_do(what: str) -> None:
    tensor, spec = AMBIGUOUS[what]
    with pytest.raises(LayoutError, match="say which by form="):
        PagedKVLayout.from_engine([tensor], spec)


REFUSED: dict[str, tuple[list[torch.Tensor], CacheSpec, str | None, str]] = {
    "no tensors": ([], SPEC, None, "no tensors"),
    "an unknown shape": ([torch.zeros(4, 7).half()], SPEC, None, "fits no known form"),
    "another block size": ([plain("SBNHD")], replace(SPEC, block_size=8), None, "fits no known form"),
    "other heads": ([plain("SBNHD")], replace(SPEC, kv_heads=1), None, "fits no known form"),
    "a form that does not fit": ([plain("SBNHD")], SPEC, "packed", "does not fit the form packed"),
    "a form that nobody knows": ([plain("SBNHD")], SPEC, "vllm_cpu_amx", "'vllm_cpu_amx' is not known"),
    "another dtype": ([plain("SBNHD")], replace(SPEC, dtype="bfloat16"), None, "said to be bfloat16"),
    "unequal layers": ([plain("SBNHD"), plain("SBNHD", blocks=6)], SPEC, None, "different shapes"),
    "transposed and not together": (
        [plain("BHNC")[..., :16:2].repeat(1, 1, 1, 2).transpose(1, 2).contiguous().transpose(1, 2)],
        SPEC,
        "vllm_cpu_vec",
        "lies together",
    ),
    "elements that share their place": (
        [plain("SBNHD")[:, :1].expand(2, 5, 16, 2, 8)],
        SPEC,
        None,
        "share their place",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused_in_words(what: str) -> None:
    tensors, spec, form, message = REFUSED[what]
    with pytest.raises(LayoutError, match=message):
        PagedKVLayout.from_engine(tensors, spec, form=form)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_that_is_kept_as_bytes_has_the_name_that_the_engine_gives_it(dtype: str) -> None:
    layout = PagedKVLayout.from_engine([plain("SBNHD", dtype="uint8")], replace(SPEC, dtype=dtype))
    assert layout.dtype == dtype


def test_control_a_layout_that_is_read_wrongly_gives_other_bytes() -> None:
    """The pairs that shapes do not tell apart: a guess would have stored these under valid keys."""
    pairs = [
        ("packed", "vllm_cpu_vec", 2),
        ("kv_first_hnd", "vllm_cpu_vec_kv_first", 2),
        ("kv_first_nhd", "kv_first_hnd", 16),
    ]
    for right, wrong, heads in pairs:
        shape = Geometry(1, heads, 8, 8)
        kv = truth(shape, 16, "float16", seed=1)
        form = BY_NAME[right]
        tensors = engine_tensors(form.dims, kv, KVShard.whole(shape), [3], num_blocks=5, block_size=16, dtype="float16")
        pages: list[bytes] = []
        for name in (right, wrong):
            layout = PagedKVLayout.from_engine(tensors, replace(SPEC, kv_heads=heads), form=name)
            page = memoryview(bytearray(layout.payload_bytes(16)))
            layout.gather([3], 0, 16, page)
            pages.append(bytes(page))
        assert pages[0] == payload(kv, KVShard.whole(shape), 0, 16)
        assert pages[0] != pages[1]


# ---- what an engine says about its cache


@dataclass
class FullAttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 4
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 576


@dataclass
class MambaSpec:
    block_size: int = 32


class SlidingWindowSpec(FullAttentionSpec):
    pass


def test_a_cache_spec_is_read_from_the_engines_own() -> None:
    assert read_cache_spec(FullAttentionSpec()) == CacheSpec(32, 4, 64, 64, "bfloat16")
    assert read_cache_spec(MLAAttentionSpec()) == CacheSpec(32, 1, 576, 0, "bfloat16")
    fp8 = FullAttentionSpec(dtype=torch.uint8)
    assert read_cache_spec(fp8, cache_dtype="float8_e4m3fn").dtype == "float8_e4m3fn"
    with pytest.raises(LayoutError, match="set cache_dtype to"):
        read_cache_spec(fp8)
    with pytest.raises(LayoutError, match="MambaSpec is not supported"):
        read_cache_spec(MambaSpec())
    with pytest.raises(LayoutError, match=r"MambaSpec is not supported; supported: .*SlidingWindowSpec"):
        read_cache_spec(MambaSpec(), windows=True)
    assert read_cache_spec(SlidingWindowSpec(), windows=True) == CacheSpec(32, 4, 64, 64, "bfloat16")
    with pytest.raises(LayoutError, match="SlidingWindowSpec is not supported"):
        read_cache_spec(SlidingWindowSpec())  # by whoever takes it that all blocks are kept
