"""Defines how engines lay out the KV cache of one layer: the known forms, and which one a tensor is.

A form names the dimensions of a tensor by letters: S (K then V), B (blocks), N (tokens of a block), H (KV heads), D
(elements of a head), C (the elements of K and behind them those of V; of MLA its latent). Strides are always read from
the tensor, so the physical order may be any. A tensor that fits no form, or several that mean different things, is
refused; then whoever knows the engine names the form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvparams.keys import DTYPE_BYTES

__all__ = [
    "CACHE_LAYOUTS",
    "CacheLayout",
    "CacheSpec",
    "LayoutError",
    "check_view",
    "find_layout",
    "kv_views",
    "read_cache_spec",
]


class LayoutError(ValueError):
    """These tensors cannot be read as paged KV; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Describes what an engine says about its KV cache; the tensors must agree."""

    block_size: int
    """Tokens per block."""
    kv_heads: int
    """On this rank. MLA: 1."""
    k_dim: int
    """MLA: the latent, rotary part included."""
    v_dim: int
    """MLA: 0."""
    dtype: str
    """What the elements mean, a key of `kvparams.keys.DTYPE_BYTES`. Engines keep fp8 as bytes; say which fp8 it is."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A `CacheLayout` is a layout of a layer's K and V in one tensor."""

    name: str
    dims: str
    """One letter per dimension of the tensor, see the module."""
    seen_in: str
    """Which software has it."""
    k_transposed: bool = False
    """Inside of a head of a block K is `[D, N]` and V `[N, D]`, whatever the tensor's shape says. CPU only."""


CACHE_LAYOUTS: Final = (
    CacheLayout(
        "kv_first_nhd", "SBNHD", "vLLM FlashAttention, Triton (v1/attention/backends/flash_attn.py, up to 0.2x)"
    ),
    CacheLayout("kv_first_hnd", "SBHND", "a K/V-first cache whose shape names heads first"),
    CacheLayout("blocks_first_nhd", "BSNHD", "vLLM FlashInfer, shape `(blocks, 2, block, heads, dim)`"),
    CacheLayout("blocks_first_hnd", "BSHND", "TensorRT-LLM; FlashInfer's HND shape"),
    CacheLayout(
        "packed", "BHNC", "vLLM 0.32 on GPUs (v1/kv_cache_layout.py), all six physical orders; MLA with one head"
    ),
    CacheLayout("packed_nhd", "BNHC", "the same with the tokens before the heads"),
    CacheLayout("mla", "BNC", "MLA in vLLM (v1/attention/backends/mla), SGLang"),
    CacheLayout(
        "vllm_cpu_vec",
        "BHNC",
        "vLLM 0.32 on a CPU whose attention is `vec` or `vec16` (csrc/cpu/cpu_attn_vec.hpp)",
        k_transposed=True,
    ),
    CacheLayout(
        "vllm_cpu_vec_kv_first",
        "SBHND",
        "the same in earlier versions, shape `(2, blocks, heads, block, dim)` (v1/attention/backends/cpu_attn.py)",
        k_transposed=True,
    ),
)
"""All that are known. Not among them, and refused by whoever knows the engine: vLLM's `amx` attention (bfloat16 on CPUs
that have AMX), which packs K and V into tiles (csrc/cpu/cpu_attn_amx.hpp); its shape is that of `vllm_cpu_vec`."""

_SPECS: Final = {"FullAttentionSpec": False, "MLAAttentionSpec": True}
_WINDOWS: Final = {"SlidingWindowSpec": False}
"""For whoever knows that such a cache does not keep all blocks."""


def read_cache_spec(spec: object, *, cache_dtype: str | None = None, windows: bool = False) -> CacheSpec:
    """Returns what one of vLLM's cache specs says (vllm/v1/kv_cache_interface.py, 0.32).

    Args:
        spec: a `FullAttentionSpec` or an `MLAAttentionSpec`; with `windows` a `SlidingWindowSpec`, too.
        cache_dtype: what the elements mean if the spec only says bytes (`torch.uint8`): `float8_e4m3fn`,
            `float8_e5m2`, or `uint8`.
        windows: whether sliding windows are known, too, to whoever asks.

    Raises:
        LayoutError: the spec is of another kind (sliding windows, Mamba states, ...), or it only says bytes.
    """
    kind = type(spec).__name__
    known = _SPECS | (_WINDOWS if windows else {})
    if kind not in known:
        raise LayoutError(
            f"a cache of the kind {kind} is not supported; supported: {', '.join(known)}. Turn the store off for "
            "this model, because its pages would be incomplete"
        )
    values = {name: getattr(spec, name, None) for name in ("block_size", "num_kv_heads", "head_size")}
    missing = [name for name, value in values.items() if not isinstance(value, int)]
    if missing:
        raise LayoutError(f"{kind} has no whole number {', '.join(missing)}, so its version is not supported")
    dtype = str(getattr(spec, "dtype", None)).removeprefix("torch.")
    if dtype == "uint8" and cache_dtype is None:
        raise LayoutError(
            f"{kind} has elements of one byte and an unknown type: set cache_dtype to float8_e4m3fn, float8_e5m2 "
            "or uint8, as in the engine's --kv-cache-dtype"
        )
    block_size, heads, k_dim = (int(getattr(spec, name)) for name in values)
    v_dim = getattr(spec, "head_size_v", None)
    mla = known[kind]
    return CacheSpec(block_size, heads, k_dim, 0 if mla else int(v_dim or k_dim), cache_dtype or dtype)


def find_layout(tensor: torch.Tensor, spec: CacheSpec, form: str | CacheLayout | None = None) -> CacheLayout:
    """The form of `tensor`.

    Args:
        tensor: of one layer.
        spec: what the engine says.
        form: its name if it is known; None finds out.

    Raises:
        LayoutError: the named form does not fit or is not known; or none fits; or several fit and differ.
    """
    shape = list(tensor.shape)
    if form is not None:
        named = (
            form if isinstance(form, CacheLayout) else next((one for one in CACHE_LAYOUTS if one.name == form), None)
        )
        if named is None:
            raise LayoutError(f"form {form!r} is not known; known: {', '.join(one.name for one in CACHE_LAYOUTS)}")
        if not _fits(named, tensor, spec):
            raise LayoutError(f"shape {shape} on {tensor.device} does not fit the form {named.name} ({named.dims})")
        return named
    found = [one for one in CACHE_LAYOUTS if _fits(one, tensor, spec)]
    if not found:
        raise LayoutError(
            f"shape {shape} fits no known form of {spec}; known: "
            + ", ".join(f"{one.name} ({one.dims})" for one in CACHE_LAYOUTS)
            + ". Give the tensors of K and V by themselves, as views [blocks, tokens, heads, dim]"
        )
    meanings = {_meaning(one, tensor, spec) for one in found}
    if len(meanings) > 1:
        raise LayoutError(
            f"shape {shape} may be "
            + ", or ".join(f"{one.name} ({one.seen_in})" for one in found)
            + ": say which by form="
        )
    return found[0]


def kv_views(tensor: torch.Tensor, form: CacheLayout, spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of `tensor`, which fits `form`, as views `[blocks, tokens, heads, dim]`; V is None for MLA.

    Raises:
        LayoutError: K is transposed in this form, and the elements of a head of a block do not lie together.
    """
    at = {letter: index for index, letter in enumerate(form.dims)}
    if form.k_transposed:
        return _transposed(tensor, form, spec)
    if "S" in at:
        ordered = tensor.permute([at[letter] for letter in "SBNHD"])
        return ordered[0], ordered[1]
    if "H" not in at:
        return tensor.unsqueeze(2), None
    ordered = tensor.permute([at[letter] for letter in "BNHC"])
    value = ordered[..., spec.k_dim :] if spec.v_dim else None
    return ordered[..., : spec.k_dim], value


def _transposed(tensor: torch.Tensor, form: CacheLayout, spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, dim = spec.block_size, spec.k_dim
    row = dim if "S" in form.dims else 2 * dim
    if tensor.stride()[-2:] != (row, 1):
        raise LayoutError(f"strides {list(tensor.stride())}: in the form {form.name} a head of a block lies together")
    at = {letter: index for index, letter in enumerate(form.dims)}
    blocks, heads = tensor.shape[at["B"]], tensor.shape[at["H"]]
    block, head = tensor.stride(at["B"]), tensor.stride(at["H"])
    to_value = tensor.stride(at["S"]) if "S" in at else tokens * dim
    start = tensor.storage_offset()
    shape = (blocks, tokens, heads, dim)
    key = tensor.as_strided(shape, (block, 1, head, tokens), start)
    return key, tensor.as_strided(shape, (block, dim, head, 1), start + to_value)


def _sizes(form: CacheLayout, spec: CacheSpec) -> Sequence[int | None]:
    """Returns what the tensor's shape must be; None where anything goes."""
    known = {"S": 2, "B": None, "N": spec.block_size, "H": spec.kv_heads, "D": spec.k_dim, "C": spec.k_dim + spec.v_dim}
    return [known[letter] for letter in form.dims]


def _fits(form: CacheLayout, tensor: torch.Tensor, spec: CacheSpec) -> bool:
    if form.k_transposed and tensor.device.type != "cpu":
        return False
    if ("D" in form.dims or form.k_transposed) and spec.v_dim != spec.k_dim:
        return False
    if "H" not in form.dims and (spec.v_dim or spec.kv_heads != 1):
        return False
    sizes = _sizes(form, spec)
    return len(sizes) == tensor.dim() and all(
        size in (None, have) for size, have in zip(sizes, tensor.shape, strict=True)
    )


def _meaning(form: CacheLayout, tensor: torch.Tensor, spec: CacheSpec) -> tuple[object, ...]:
    """Equal for two forms exactly if they read the same elements of this tensor in the same places."""
    try:
        views = kv_views(tensor, form, spec)
    except LayoutError:
        return (form.name,)
    return tuple(None if view is None else (view.storage_offset(), *_steps(view)) for view in views)


def _steps(view: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Size and stride of each dimension; the stride of a dimension of size 1 says nothing."""
    return tuple((size, 0 if size == 1 else step) for size, step in zip(view.shape, view.stride(), strict=True))


def check_view(name: str, tensor: torch.Tensor, dtype: str) -> None:
    """Refuse a view `[blocks, tokens, heads, dim]` whose elements overlap, have gaps inside, or are not known.

    Raises:
        LayoutError: with the view's name.
    """
    held = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"{name}: element type {dtype} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    if held != dtype and not (held == "uint8" and dtype.startswith("float8")):
        raise LayoutError(f"{name}: elements are {held} and are said to be {dtype}; only fp8 is kept as other bytes")
    if tensor.device.type not in ("cpu", "cuda"):
        raise LayoutError(f"{name}: the tensor is on {tensor.device}; only the CPU and CUDA are supported")
    if tensor.dim() != 4 or 0 in tensor.shape:
        raise LayoutError(
            f"{name}: the shape is {list(tensor.shape)}; it must be [num_blocks, block_size, kv_heads, head_dim]"
        )
    span = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step < span:
            raise LayoutError(
                f"{name}: strides {list(tensor.stride())} of shape {list(tensor.shape)} let elements share their "
                "place; give the tensors as the engine allocated them"
            )
        span = max(span, step * size) if size > 1 else span
    if tensor.shape[3] > 1 and tensor.stride(3) != 1 and tensor.stride(1) != 1:
        raise LayoutError(
            f"{name}: strides {list(tensor.stride())} of shape {list(tensor.shape)}; neither the elements of a head "
            "nor the tokens of a block lie side by side, which no known engine does"
        )
