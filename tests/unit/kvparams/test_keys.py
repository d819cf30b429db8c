"""Tests content keys: the laws that sharing depends on, and fixed values for other languages."""

import hashlib
import re
import struct
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import (
    MAX_KEY_CHARS,
    ExtraKey,
    Geometry,
    KVShard,
    Namespace,
    Page,
    chain_pages,
    page_key,
)

SHAPE = Geometry(layers=4, kv_heads=2, k_dim=8, v_dim=8)
SPACE = Namespace("model", "revision", "float32", SHAPE, page_tokens=16)
PART = KVShard.whole(SHAPE)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)
SPACES = st.builds(replace, st.just(SPACE), page_tokens=st.integers(1, 40))


@st.composite
def an_extra(draw: st.DrawFn) -> ExtraKey:
    start = draw(st.integers(0, 110))
    return ExtraKey(start, start + draw(st.integers(1, 60)), draw(st.binary(min_size=16, max_size=64)))


EXTRAS = st.lists(an_extra(), max_size=4)


def keys(namespace: Namespace, tokens: list[int], extras: list[ExtraKey] | None = None) -> list[str]:
    return [page_key(namespace, page, PART) for page in chain_pages(namespace, tokens, extras or ())]


def test_the_encodings_are_what_the_documentation_says_byte_by_byte() -> None:
    """Spec-mandated: written out here a second time, without the module's own helpers."""
    namespace = replace(SPACE, lora="adapter", page_tokens=2)
    text = b"kvparams namespace 1\n"
    for name, value in (
        ("model", "model"),
        ("revision", "revision"),
        ("dtype", "float32"),
        ("layers", "4"),
        ("kv_heads", "2"),
        ("k_dim", "8"),
        ("v_dim", "8"),
        ("wire_layout", "layer.kv.head.token.dim"),
        ("page_tokens", "2"),
        ("lora", "adapter"),
    ):
        text += struct.pack("<I", len(name)) + name.encode() + b"\1" + struct.pack("<I", len(value)) + value.encode()
    text += struct.pack("<I", 10) + b"cache_salt" + b"\0"
    assert namespace.digest == hashlib.sha256(text).digest()

    image = ExtraKey(1, 5, b"i" * 32)
    first = b"kvparams page 1\n" + namespace.digest + struct.pack("<III", 2, 7, 8)
    first += struct.pack("<IIIQI", 1, 1, 2, 0, 32) + b"i" * 32
    second = b"kvparams page 1\n" + hashlib.sha256(first).digest() + struct.pack("<II", 1, 9)
    second += struct.pack("<IIIQI", 1, 0, 1, 1, 32) + b"i" * 32
    assert chain_pages(namespace, [7, 8, 9], [image]) == (
        Page(0, 0, 2, hashlib.sha256(first).digest()),
        Page(1, 2, 1, hashlib.sha256(second).digest()),
    )


def test_known_sequences_have_known_keys() -> None:
    """Spec-mandated: fixed values; if one moves, every stored page is lost and other implementations disagree."""
    assert SPACE.digest.hex() == "c3170b7d8af574cd3338de06980d7debf369288df762307bb58b2870cd208a43"
    assert keys(SPACE, list(range(18))) == [
        "kv1.c3170b7d8af574cd.ecb3f474fc44a03b4100df55ed8491cf54d8669ae14b333d78ad6e4ec3809fe9.16.L0-4.H0-2",
        "kv1.c3170b7d8af574cd.8871ede585a7e0786ef1c7f0491fb5caa879dc76d70fb86dead7076c855420a2.2.L0-4.H0-2",
    ]


@given(SPACES, TOKENS, EXTRAS)
def test_pages_cover_every_token_once(namespace: Namespace, tokens: list[int], extras: list[ExtraKey]) -> None:
    pages = chain_pages(namespace, tokens, extras)
    assert [position for page in pages for position in range(page.start, page.end)] == list(range(len(tokens)))
    assert [page.index for page in pages] == list(range(len(pages)))
    assert all(page.tokens == namespace.page_tokens for page in pages[:-1])


@given(SPACES, TOKENS, TOKENS, EXTRAS)
def test_full_pages_do_not_depend_on_what_follows(
    namespace: Namespace, tokens: list[int], more: list[int], extras: list[ExtraKey]
) -> None:
    full = len(tokens) // namespace.page_tokens
    assert chain_pages(namespace, tokens, extras)[:full] == chain_pages(namespace, tokens + more, extras)[:full]


@given(SPACES, TOKENS, TOKENS, EXTRAS)
def test_pages_that_are_known_change_nothing(
    namespace: Namespace, tokens: list[int], more: list[int], extras: list[ExtraKey]
) -> None:
    fewer, every = chain_pages(namespace, tokens, extras), chain_pages(namespace, tokens + more, extras)
    assert chain_pages(namespace, tokens + more, extras, fewer) == every
    assert chain_pages(namespace, tokens, extras, every) == fewer


def test_full_pages_that_are_known_are_not_computed_again() -> None:
    other = chain_pages(SPACE, [7] * 40)  # of other tokens, which a caller must never pass
    assert chain_pages(SPACE, [8] * 50, (), other)[:2] == other[:2]


@given(SPACES, TOKENS, st.data())
def test_another_token_changes_the_key_of_its_page_and_of_all_that_follow(
    namespace: Namespace, tokens: list[int], data: st.DataObject
) -> None:
    if not tokens:
        return
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] = (other[at] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    page = at // namespace.page_tokens
    before, after = keys(namespace, tokens), keys(namespace, other)
    assert before[:page] == after[:page]
    assert not set(before[page:]) & set(after[page:])


@given(SPACES, TOKENS)
def test_a_partial_page_never_has_the_key_of_a_longer_or_shorter_one(namespace: Namespace, tokens: list[int]) -> None:
    found = {page_key(namespace, page, PART) for n in range(len(tokens)) for page in chain_pages(namespace, tokens[:n])}
    full, rest = divmod(max(0, len(tokens) - 1), namespace.page_tokens)
    partial = full * (namespace.page_tokens - 1) + rest
    assert len(found) == full + partial


CHANGES: list[dict[str, object]] = [
    {"model": "other"},
    {"revision": "other"},
    {"dtype": "bfloat16"},
    {"page_tokens": 17},
    {"lora": "adapter"},
    {"lora": ""},
    {"cache_salt": "salt"},
    {"cache_salt": ""},
    {"geometry": replace(SHAPE, layers=5)},
    {"geometry": replace(SHAPE, kv_heads=3)},
    {"geometry": replace(SHAPE, k_dim=9)},
    {"geometry": replace(SHAPE, v_dim=0)},
]


def test_whatever_changes_the_bytes_changes_every_key() -> None:
    spaces = [SPACE, *(replace(SPACE, **change) for change in CHANGES)]  # pyright: ignore[reportArgumentType]
    tokens = list(range(40))
    found = [key for space in spaces for key in keys(space, tokens)]
    assert len(set(found)) == len(found)
    assert len({space.digest[:8] for space in spaces}) == len(spaces)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_text_cannot_slip_from_one_field_into_the_next(a: str, b: str, c: str, d: str) -> None:
    first = replace(SPACE, model="m" + a, revision="r" + b)
    second = replace(SPACE, model="m" + c, revision="r" + d)
    assert (first.digest == second.digest) == ((a, b) == (c, d))


def test_what_a_rank_holds_is_in_the_key_and_not_in_the_namespace() -> None:
    page = chain_pages(SPACE, [1, 2, 3])[0]
    parts = [KVShard(a, b, c, d) for a, b, c, d in product((0, 1), (2, 4), (0, 1), (2,))]
    assert len({page_key(SPACE, page, part) for part in parts}) == len(parts)


def test_the_longest_key_is_within_the_limit_and_plain() -> None:
    most = (1 << 16) - 1
    namespace = replace(SPACE, geometry=Geometry(most, most, most, most), page_tokens=1 << 24)
    page = Page(0, 0, 1 << 24, b"\xff" * 32)
    longest = page_key(namespace, page, KVShard(most - 1, most, most - 1, most))
    assert len(longest) == 120 <= MAX_KEY_CHARS
    assert re.fullmatch(r"[A-Za-z0-9._-]+", longest)


@given(SPACES, TOKENS, EXTRAS)
def test_extras_change_the_pages_they_touch_and_none_before(
    namespace: Namespace, tokens: list[int], extras: list[ExtraKey]
) -> None:
    size = namespace.page_tokens
    touched = min((extra.start // size for extra in extras if extra.start < len(tokens)), default=len(tokens))
    plain, dressed = keys(namespace, tokens), keys(namespace, tokens, extras)
    assert plain[:touched] == dressed[:touched]
    assert not set(plain[touched:]) & set(dressed[touched:])


@given(SPACES, TOKENS, EXTRAS, st.randoms(use_true_random=False))
def test_the_order_in_which_extras_are_listed_says_nothing(
    namespace: Namespace, tokens: list[int], extras: list[ExtraKey], random: Random
) -> None:
    shuffled = list(extras)
    random.shuffle(shuffled)
    assert chain_pages(namespace, tokens, extras) == chain_pages(namespace, tokens, shuffled)


def test_another_image_at_the_same_place_is_another_key() -> None:
    """Two requests of equal token ids, as vision models make them: placeholders are all the same."""
    tokens = [9] * 40
    first, second = ExtraKey(4, 20, b"a" * 32), ExtraKey(4, 20, b"b" * 32)
    moved = ExtraKey(5, 21, b"a" * 32)
    found = [keys(SPACE, tokens, [extra]) for extra in (first, second, moved)]
    assert len({key for one in found for key in one}) == 9


def test_an_image_that_crosses_a_page_is_told_from_two_that_meet_there() -> None:
    one, two = [ExtraKey(8, 24, b"a" * 32)], [ExtraKey(8, 16, b"a" * 32), ExtraKey(16, 24, b"a" * 32)]
    first, second = keys(SPACE, [9] * 32, one), keys(SPACE, [9] * 32, two)
    assert first[0] == second[0]  # up to here they are the same
    assert first[1] != second[1]


@pytest.mark.parametrize("token", [-1, 2**32, "7", 1.5, None])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        chain_pages(SPACE, [1, token])


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"revision": ""},
        {"dtype": "float33"},
        {"page_tokens": 0},
        {"page_tokens": (1 << 24) + 1},
        {"model": "m" * 1025},
        {"cache_salt": "s" * 1025},
    ],
)
def test_a_namespace_that_says_too_little_or_too_much_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which words it uses is not the matter
        replace(SPACE, **change)  # pyright: ignore[reportArgumentType]


def test_more_than_a_page_may_hold_is_refused() -> None:
    """The control is one token, or one extra, less."""
    space = replace(SPACE, geometry=Geometry(1, 1, 1 << 15, 1 << 15), dtype="float16", page_tokens=1 << 24)
    whole = KVShard.whole(space.geometry)
    assert space.payload_bytes(1 << 23, whole) == 1 << 40
    with pytest.raises(ValueError, match="payload_bytes"):
        space.payload_bytes((1 << 23) + 1, whole)
    extras = [ExtraKey(0, 1, b"d" * 16)] * (1 << 16)
    assert chain_pages(SPACE, [], extras) == ()
    with pytest.raises(ValueError, match="65537 extras"):
        chain_pages(SPACE, [], [*extras, extras[0]])


def test_impossible_shapes_are_refused() -> None:
    for arguments in (
        (0, 1, 1, 1),
        (1, 0, 1, 1),
        (1, 1, 0, 1),
        (1, 1, 1, -1),
        (65536, 1, 1, 1),
        (1, 65536, 1, 1),
        (1, 1, 65536, 1),
    ):
        with pytest.raises(ValueError, match="must be in"):
            Geometry(*arguments)
    for arguments in ((0, 0, 0, 1), (2, 1, 0, 1), (0, 1, 1, 1), (-1, 1, 0, 1)):
        with pytest.raises(ValueError, match="must be in"):
            KVShard(*arguments)
    for start, end in ((3, 3), (-1, 2), (5, 2), (0, 2**63 + 1)):
        with pytest.raises(ValueError, match="nothing"):
            ExtraKey(start, end, b"d" * 32)
    with pytest.raises(ValueError, match="digest"):
        ExtraKey(0, 1, b"short")


def test_payload_sizes_follow_from_the_geometry() -> None:
    assert SPACE.payload_bytes(3, PART) == 3 * 4 * 2 * (8 + 8) * 4
    assert SPACE.payload_bytes(3, KVShard(1, 2, 0, 1)) == 3 * (8 + 8) * 4
    latent = replace(SPACE, geometry=Geometry(2, 1, 576, 0), dtype="float8_e4m3fn")
    assert latent.payload_bytes(16, KVShard.whole(latent.geometry)) == 16 * 2 * 576
