"""Content keys: which stored page holds the KV of which tokens.

A key is derived, never chosen: a SHA-256 chain over token ids, page by page, that starts from the digest of a namespace
of everything that changes the bytes for the whole model. What a rank holds and how many tokens a page has are in the
key itself, so engines with other parallelism or other block sizes share a store.

Every fact that changes the KV bytes changes the key. The encodings are specified byte by byte (see `Namespace.digest`
and `chain_pages`) so that any language can compute them.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

__all__ = [
    "DTYPE_BYTES",
    "MAX_KEY_CHARS",
    "WIRE_LAYOUT",
    "ExtraKey",
    "Geometry",
    "KVShard",
    "Namespace",
    "Page",
    "chain_pages",
    "page_key",
    "page_keys",
]

DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Bytes per element of every element type that has a name here."""

WIRE_LAYOUT: Final = "layer.kv.head.token.dim"
"""The canonical order of a page's payload: per layer all of K, then all of V; elements little-endian, no gaps."""

MAX_KEY_CHARS: Final = 128
"""No key is longer; every key is ASCII from `[A-Za-z0-9._-]`, those made here have at most 120 characters."""

_NAMESPACE_DOMAIN: Final = b"kvparams namespace 1\n"
_PAGE_DOMAIN: Final = b"kvparams page 1\n"
_MAX_TEXT_BYTES: Final = 1024
_MAX_PAGE_TOKENS: Final = 1 << 24
_MAX_LAYERS: Final = (1 << 16) - 1
_MAX_HEADS: Final = (1 << 16) - 1
_MAX_DIM: Final = (1 << 16) - 1
_MAX_EXTRAS: Final = 1 << 16
_MAX_POSITION: Final = 1 << 63
_MAX_PAYLOAD_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the whole model's KV, whatever part of it one rank holds."""

    layers: int
    kv_heads: int
    k_dim: int
    """Elements per token and head of K."""
    v_dim: int
    """Elements per token and head of V; 0 where K and V are one latent (MLA)."""

    def __post_init__(self) -> None:
        _bounded("layers", self.layers, 1, _MAX_LAYERS)
        _bounded("kv_heads", self.kv_heads, 1, _MAX_HEADS)
        _bounded("k_dim", self.k_dim, 1, _MAX_DIM)
        _bounded("v_dim", self.v_dim, 0, _MAX_DIM)


@dataclass(frozen=True, slots=True)
class KVShard:
    """The part of the model that one page holds: layers x KV heads, ends excluded, counted over the whole model."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    def __post_init__(self) -> None:
        _bounded("layer_start", self.layer_start, 0, _MAX_LAYERS)
        _bounded("layer_end", self.layer_end, self.layer_start + 1, _MAX_LAYERS)
        _bounded("head_start", self.head_start, 0, _MAX_HEADS)
        _bounded("head_end", self.head_end, self.head_start + 1, _MAX_HEADS)

    @classmethod
    def whole(cls, geometry: Geometry) -> "KVShard":
        """Returns the shard with all layers and all heads, as an engine without parallelism holds it."""
        return cls(0, geometry.layers, 0, geometry.kv_heads)

    @property
    def layers(self) -> int:
        """Returns the number of layers."""
        return self.layer_end - self.layer_start

    @property
    def heads(self) -> int:
        """Returns the number of KV heads."""
        return self.head_end - self.head_start


@dataclass(frozen=True)
class Namespace:
    """A `Namespace` holds the facts that change the KV bytes for the whole model.

    Two engines share pages only if all of them are equal.
    """

    model: str
    """The model's full name; never empty."""
    revision: str
    """The commit or digest of the weights; never empty: weights that change under one name would share pages."""
    dtype: str
    """Element type of the KV, a key of `DTYPE_BYTES`."""
    geometry: Geometry
    page_tokens: int
    """Tokens of a full page; independent of any engine's block size."""
    lora: str | None = None
    """The adapter in use; None for the bare model."""
    cache_salt: str | None = None
    """Requests of different salts share nothing; None and "" are different salts."""

    def __post_init__(self) -> None:
        for name, text in (("model", self.model), ("revision", self.revision)):
            if not text:
                raise ValueError(f"{name} is empty: pages of different models would be taken for each other")
        for name, text in self._texts():
            if text is not None and len(text.encode()) > _MAX_TEXT_BYTES:
                raise ValueError(f"{name} is longer than {_MAX_TEXT_BYTES} bytes")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        _bounded("page_tokens", self.page_tokens, 1, _MAX_PAGE_TOKENS)

    def _texts(self) -> tuple[tuple[str, str | None], ...]:
        """Returns the fields as text, in the order in which they are hashed."""
        shape = self.geometry
        return (
            ("model", self.model),
            ("revision", self.revision),
            ("dtype", self.dtype),
            ("layers", str(shape.layers)),
            ("kv_heads", str(shape.kv_heads)),
            ("k_dim", str(shape.k_dim)),
            ("v_dim", str(shape.v_dim)),
            ("wire_layout", WIRE_LAYOUT),
            ("page_tokens", str(self.page_tokens)),
            ("lora", self.lora),
            ("cache_salt", self.cache_salt),
        )

    @cached_property
    def digest(self) -> bytes:
        """Returns the 32-byte SHA-256 digest of the namespace.

        It covers `"kvparams namespace 1\n"` and then, for each field in the order of the list below, u32 length of the
        name, name, one byte 1, u32 length of the value, value; or, where the value is None, u32 length of the name,
        name, one byte 0.

        Fields: model, revision, dtype, layers, kv_heads, k_dim, v_dim, wire_layout, page_tokens, lora, cache_salt.
        Text is UTF-8, integers are decimal text, lengths are little-endian.
        """
        encoded = bytearray(_NAMESPACE_DOMAIN)
        for name, text in self._texts():
            encoded += struct.pack("<I", len(name)) + name.encode()
            if text is None:
                encoded += b"\0"
            else:
                raw = text.encode()
                encoded += struct.pack("<BI", 1, len(raw)) + raw
        return hashlib.sha256(encoded).digest()

    def payload_bytes(self, tokens: int, rectangle: KVShard) -> int:
        """Bytes that `tokens` tokens of the part `rectangle` take in the wire layout.

        Raises:
            ValueError: they are more than a page may have (2^40).
        """
        per_token = rectangle.layers * rectangle.heads * (self.geometry.k_dim + self.geometry.v_dim)
        found = tokens * per_token * DTYPE_BYTES[self.dtype]
        _bounded("payload_bytes", found, 0, _MAX_PAYLOAD_BYTES)
        return found


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something other than token ids that the KV of some positions depends on: an image, prompt embeddings.

    A request whose KV depends on something that is not said in extras must not be cached at all.
    """

    start: int
    """The first token position it fills."""
    end: int
    """The position behind the last one."""
    digest: bytes
    """16 to 64 bytes that stand for the content, the same wherever it appears (for example its SHA-256)."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= _MAX_POSITION:
            raise ValueError(f"an extra covers the positions [{self.start}, {self.end}): nothing that there is")
        if not 16 <= len(self.digest) <= 64:
            raise ValueError(f"an extra's digest has 16 to 64 bytes, not {len(self.digest)}")


@dataclass(frozen=True, slots=True)
class Page:
    """A `Page` is a page of a sequence: its place in the chain."""

    index: int
    start: int
    """Position of its first token."""
    tokens: int
    """How many tokens it holds: the namespace's `page_tokens`, or fewer on the last page."""
    chain: bytes
    """32 bytes: stands for the namespace, all tokens up to and with this page, and where the page ends."""

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.tokens


def chain_pages(
    namespace: Namespace, token_ids: Sequence[int], extras: Iterable[ExtraKey] = (), known: Sequence[Page] = ()
) -> tuple[Page, ...]:
    """The pages of a sequence, the partial last one included.

    `chain` of page i is SHA-256 over: `"kvparams page 1\\n"`; the chain of page i-1 (of page 0: the namespace's
    digest); u32 number of tokens; the token ids, u32 each; u32 number of extras that touch the page; and for each of
    them, sorted by what follows: u32 first position inside the page, u32 position behind the last one inside the page,
    u64 positions of the extra that lie before the page, u32 length of the digest, digest. All little-endian.

    So the chain of a page depends on nothing behind its end, and a partial page differs from every full one.

    Args:
        namespace: where the chain starts.
        token_ids: the sequence; each id fits in 32 bits without a sign.
        extras: what else the KV depends on. Positions behind the last token are ignored.
        known: pages of the same tokens, extras and namespace, from the first on, by an earlier call for more or fewer
            of these tokens: what is full of them is taken as it is, and costs nothing.

    Raises:
        ValueError: a token id is not an integer in [0, 2^32), or there are more than 65,536 extras.
    """
    size = namespace.page_tokens
    count = min(len(known), len(token_ids) // size)
    if count and known[count - 1].tokens < size:
        count -= 1
    pages = list(known[:count])
    since = count * size
    rest = token_ids[since:] if since else token_ids
    try:
        packed = struct.pack(f"<{len(rest)}I", *rest)
    except struct.error as error:
        raise ValueError(f"token ids are integers in [0, 2^32): {error}") from error
    others = tuple(extras)
    if len(others) > _MAX_EXTRAS:
        raise ValueError(f"{len(others)} extras are more than {_MAX_EXTRAS}")
    chain = pages[-1].chain if pages else namespace.digest
    for index, start in enumerate(range(since, len(token_ids), size), count):
        tokens = min(size, len(token_ids) - start)
        touching = _touching(others, start, start + tokens) if others else b"\0\0\0\0"
        text = b"%b%b%b%b%b" % (
            _PAGE_DOMAIN,
            chain,
            tokens.to_bytes(4, "little"),
            packed[4 * (start - since) : 4 * (start - since + tokens)],
            touching,
        )
        chain = hashlib.sha256(text).digest()
        pages.append(Page(index, start, tokens, chain))
    return tuple(pages)


def page_key(namespace: Namespace, page: Page, rectangle: KVShard) -> str:
    """The name under which a page is stored: at most 128 characters from `[A-Za-z0-9._-]`.

    `kv1.<16 hex of the namespace's digest>.<64 hex of the chain>.<tokens>.L<layers from-to>.H<heads from-to>`
    """
    return page_keys(namespace, (page,), (rectangle,))[0]


def page_keys(namespace: Namespace, pages: Iterable[Page], rectangles: Sequence[KVShard]) -> tuple[str, ...]:
    """`page_key` of every part of the first page, then of every part of the second, and so on."""
    head = f"kv1.{namespace.digest[:8].hex()}."
    tails = [f".L{one.layer_start}-{one.layer_end}.H{one.head_start}-{one.head_end}" for one in rectangles]
    return tuple(f"{head}{page.chain.hex()}.{page.tokens}{tail}" for page in pages for tail in tails)


def _touching(extras: Iterable[ExtraKey], start: int, end: int) -> bytes:
    """The extras that touch the positions [start, end), encoded; sorted, so that their order says nothing."""
    found = sorted(
        struct.pack(
            "<IIQI",
            max(extra.start, start) - start,
            min(extra.end, end) - start,
            max(start - extra.start, 0),
            len(extra.digest),
        )
        + extra.digest
        for extra in extras
        if extra.start < end and start < extra.end
    )
    return struct.pack("<I", len(found)) + b"".join(found)


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high}]")
