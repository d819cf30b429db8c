"""Tests that a text takes a cached prefix's ids up to a common split point, and that they are the whole text's ids."""

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from kvparams_proxy.tokenization.local_tokenizer import LocalEncodingJob, LocalTokenizer
from kvparams_proxy.tokenization.text_prefix_cache import EncodedText, TextPrefixCache
from tests.unit.proxy.tokenization.test_safe_split_points import MADE, TEXTS, cuts_of, made

__all__ = ["made"]

OPENING = "the prefix of what is said " * 20
"""Long enough to be found by."""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def encoded(tokenizer: Tokenizer, text: str, parts: Sequence[str]) -> EncodedText:
    """What is kept of a text that was cut like this."""
    ids = [encode(tokenizer, part) for part in parts]
    cuts = list(accumulate(map(len, parts[:-1])))
    return EncodedText(
        text, cuts, list(accumulate(map(len, ids[:-1]))), array("I", [id for part in ids for id in part])
    )


def by_the_other(tokenizer: Tokenizer, least: int, other: str, text: str, margin: int | None = None) -> list[int]:
    """The ids of `text`, as far as may be from those of `other`."""
    cuts = cuts_of(tokenizer, least)
    beginnings = TextPrefixCache(1 << 20, cuts.lookahead_chars if margin is None else margin)
    beginnings.add(encoded(tokenizer, other, cuts.split(other)), special=False)
    found = beginnings.find(text, special=False)
    if found is None:
        return encode(tokenizer, text)
    known, alike = found
    rest = cuts.split(text, known.split_points[alike - 1])
    assert text == other[: known.split_points[alike - 1]] + "".join(rest)
    return [*known.ids[: known.id_counts[alike - 1]], *(id for part in rest for id in encode(tokenizer, part))]


@pytest.mark.parametrize("name", MADE)
@settings(deadline=None)
@given(alike=TEXTS, ends=st.tuples(TEXTS, TEXTS), least=st.integers(1, 12))
def test_the_ids_are_those_of_the_whole(
    made: Callable[[str], Tokenizer], name: str, alike: str, ends: tuple[str, str], least: int
) -> None:
    tokenizer = made(name)
    other, text = (OPENING + alike + end for end in ends)
    assert by_the_other(tokenizer, least, other, text) == encode(tokenizer, text)


def test_what_is_alike_only_up_to_the_cut_would_have_others(made: Callable[[str], Tokenizer]) -> None:
    """The control: with no margin the law is broken."""
    other, text = (f"{OPENING} {end}" for end in ("<s>and so on", "<so on"))
    tokenizer = made("byte level")
    assert by_the_other(tokenizer, 1, other, text) == encode(tokenizer, text)
    assert by_the_other(tokenizer, 1, other, text, margin=0) != encode(tokenizer, text)


def test_an_added_token_at_a_cut_may_be_undone_by_one_that_overlaps_it() -> None:
    """The second begins in the first and ends far behind it, so the texts are alike for longer than either."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["z##< ##< ##<" * 200], trainer)
    raw = "b" + "-" * 40
    first, second = AddedToken("<ab", normalized=True, special=False), AddedToken(raw, normalized=False, special=False)
    tokenizer.add_tokens([first, second])  # pyright: ignore[reportUnknownMemberType]
    local = LocalTokenizer(tokenizer)
    head = "zz1" * 200 + "##<ab" + "-" * 39
    for text in (head + "!" + "y1" * 100, head + "-!" + "y1" * 100):
        assert list(LocalEncodingJob(local, text, special=False).encode()) == encode(tokenizer, text)


@settings(deadline=None)
@given(turns=st.lists(st.tuples(st.integers(0, 3), TEXTS), min_size=1, max_size=8), special=st.booleans())
def test_conversations_side_by_side_have_the_ids_of_their_whole_texts(
    made: Callable[[str], Tokenizer], turns: list[tuple[int, str]], special: bool
) -> None:
    """They begin alike, and grow in any order; where room is scarce, most of it is forgotten."""
    tokenizer = made("byte level")
    for room in (1 << 22, 40_000):
        local = LocalTokenizer(tokenizer, cache_bytes=room)
        texts = [OPENING] * 4
        for number, turn in turns:
            texts[number] += f"<|im_start|>user\n{turn * 20}<|im_end|>\n"
            ids = tokenizer.encode(texts[number], add_special_tokens=special).ids
            assert list(LocalEncodingJob(local, texts[number], special=special).encode()) == ids
            assert local.prefix_cache.held_bytes + local.segment_cache.held_bytes <= room


def test_of_a_text_that_goes_on_only_the_end_is_looked_at(made: Callable[[str], Tokenizer]) -> None:
    """Nothing else of it is asked for: all parts were forgotten meanwhile. The control has another opening."""
    local = LocalTokenizer(made("byte level"), cache_bytes=1 << 20)
    text = "".join(f"<|im_start|>user\nthe question of turn {number}<|im_end|>\n" for number in range(200))
    LocalEncodingJob(local, text, special=True).encode()
    for number in range(40):  # other texts, which fill the room of the parts, and one of the beginnings each
        LocalEncodingJob(local, "".join(f"{number} and {other} " for other in range(1000)), special=True).encode()
    assert local.segment_cache.look_up(local.split_points.split(text)[:20]) == [None] * 20
    assert LocalEncodingJob(local, text + "and so on", special=True).missing_chars < 2_000
    assert LocalEncodingJob(local, "but " + text, special=True).missing_chars > len(text) // 2


def test_what_is_forgotten_is_what_was_unused_longest() -> None:
    def text(number: int) -> str:
        return f"{number:03} " + OPENING

    beginnings = TextPrefixCache(40_000, 2)
    for number in range(30):
        beginnings.add(EncodedText(text(number), [100], [50], array("I", range(100))), special=True)
        assert beginnings.find(text(0), special=True) is not None
        assert beginnings.held_bytes <= 40_000
    kept = [number for number in range(30) if beginnings.find(text(number), special=True) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(30 - len(kept) + 1, 30))
    assert beginnings.find(text(0), special=False) is None


def test_a_text_that_would_fill_the_room_is_not_kept() -> None:
    beginnings = TextPrefixCache(8_000, 2)
    beginnings.add(EncodedText(OPENING * 10, [100], [50], array("I", range(100))), special=True)
    assert beginnings.held_bytes == 0
