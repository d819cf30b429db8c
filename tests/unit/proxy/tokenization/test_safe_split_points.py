"""Tests that a text is cut only where its parts have the token ids of the whole."""

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from kvparams_proxy.tokenization.local_tokenizer import LocalEncodingJob, LocalTokenizer
from kvparams_proxy.tokenization.safe_split_points import SafeSplitPoints, may_split_between_words
from kvparams_proxy.tokenization.segment_cache import SegmentCache
from tests.support.proxy.made_tokenizers import SPECIALS, byte_level, metaspace


def _with(*tokens: AddedToken) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens(list(tokens))  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def _llama3(digits: str) -> Tokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


MADE: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, NFC": lambda: byte_level(nfc=True),
    "metaspace": metaspace,
    "Llama 3": lambda: _llama3("{1,3}"),
    "Qwen": lambda: _llama3(""),
    "blanks taken": lambda: _with(
        AddedToken("<left>", lstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=False),
        AddedToken(" <blank>", normalized=False),
    ),
    "normalised": lambda: _with(AddedToken("<late>", normalized=True), AddedToken("im_end", normalized=True)),
    "words": lambda: _with(AddedToken("word", single_word=True, normalized=False)),
    "blanks taken behind a letter": lambda: _with(AddedToken("word", rstrip=True, normalized=False)),
}
EXTRA = ("<left>", "<right>", " <blank>", "<late>", "im_end", "word")
PIECES = st.one_of(
    st.sampled_from(
        [*SPECIALS, *EXTRA, "<|im", "_start|>", "<", "|", "[/INST", "e\u0301", "\u0301", "\u1100", "\u1161"]
    ),
    st.sampled_from([" ", "  ", "\n", " \n ", "a", "the prefix", "a b", "'s b", "word", "x1", "é", "\U0001f600", ""]),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
)
TEXTS = st.lists(PIECES, max_size=24).map("".join)


@pytest.fixture(scope="module")
def made() -> Callable[[str], Tokenizer]:
    kept: dict[str, Tokenizer] = {}
    return lambda name: kept.get(name) or kept.setdefault(name, MADE[name]())


def _said(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def cuts_of(tokenizer: Tokenizer, least: int) -> SafeSplitPoints:
    added = tokenizer.get_added_tokens_decoder().values()
    words = may_split_between_words(_said(tokenizer.normalizer), _said(tokenizer.pre_tokenizer))
    return SafeSplitPoints(added, normalizes=tokenizer.normalizer is not None, words=words, least=least)


@pytest.mark.parametrize("name", MADE)
@settings(deadline=None)
@given(text=TEXTS, least=st.integers(1, 12))
@example(text="the word and", least=1)
def test_the_parts_have_the_token_ids_of_the_whole(
    made: Callable[[str], Tokenizer], name: str, text: str, least: int
) -> None:
    tokenizer = made(name)
    cuts = cuts_of(tokenizer, least)
    parts = cuts.split(text)
    parts[-1:] = cuts.split_finely(parts[-1])
    assert "".join(parts) == text
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert [id for part in parts for id in tokenizer.encode(part, add_special_tokens=False).ids] == whole


@settings(deadline=None)
@given(text=TEXTS, more=TEXTS, least=st.integers(1, 12))
def test_a_text_that_goes_on_is_cut_as_before_but_for_its_last_parts(
    made: Callable[[str], Tokenizer], text: str, more: str, least: int
) -> None:
    cuts = cuts_of(made("byte level"), least)
    longest = max(map(len, SPECIALS))
    known = cuts.split(text)[:-1]
    while known and sum(map(len, known)) + longest > len(text):  # its end might become another token
        known.pop()
    assert cuts.split(text + more)[: len(known)] == known


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("byte level", "a<|im_start|>b<|im_end|>c", 3),
        ("byte level", "a<|im_start|>extrab", 2),
        ("blanks taken", "a  <left>b", 1),
        ("blanks taken", "a <blank>b", 1),
        ("blanks taken", "a<right>  b<s>", 3),
        ("normalised", "a<late>b<s>c<late>", 4),
        ("words", "a<s>b", 1),
        ("blanks taken behind a letter", "a word and so on<s>", 3),
    ],
)
def test_the_control_texts_are_cut_where_that_is_safe(
    made: Callable[[str], Tokenizer], name: str, text: str, count: int
) -> None:
    assert len(cuts_of(made(name), 1).split(text)) == count


@pytest.mark.parametrize(("name", "text", "at"), [("byte level", "the prefix", 5), ("blanks taken", "a  <left>b", 3)])
def test_elsewhere_a_cut_would_change_the_ids(made: Callable[[str], Tokenizer], name: str, text: str, at: int) -> None:
    """The control: the law is not true of any place."""
    tokenizer = made(name)
    parts = [id for part in (text[:at], text[at:]) for id in tokenizer.encode(part, add_special_tokens=False).ids]
    assert parts != tokenizer.encode(text, add_special_tokens=False).ids


def test_of_another_end_little_is_missing(made: Callable[[str], Tokenizer]) -> None:
    """The control is a tokenizer that must not be cut between words: all of it is."""
    said = "the prefix of what is said " * 30
    missing: list[int] = []
    for name in ("byte level", "metaspace"):
        local = LocalTokenizer(made(name))
        for end in ("first", "second"):
            work = LocalEncodingJob(local, said + end, special=False)
            if end == "first":
                work.encode()
        missing.append(work.missing_chars)
    assert missing[0] < 200 < len(said) < missing[1]


@pytest.mark.parametrize(
    ("name", "cut"), [("byte level", True), ("Llama 3", True), ("Qwen", True), ("metaspace", False)]
)
def test_a_long_text_is_cut_between_words_where_the_tokenizer_does_so_too(
    made: Callable[[str], Tokenizer], name: str, cut: bool
) -> None:
    """A text that goes on costs its end, though no added token is in it."""
    local = LocalTokenizer(made(name))
    text = "".join(f"word {number} and another's, " for number in range(600))
    LocalEncodingJob(local, text, special=True).encode()
    further = LocalEncodingJob(local, text + "and so on", special=True)
    assert (further.missing_chars < 2_500) is cut
    assert list(further.encode()) == made(name).encode(text + "and so on").ids


def test_parts_are_not_shorter_than_they_must_be(made: Callable[[str], Tokenizer]) -> None:
    parts = cuts_of(made("byte level"), 50).split("<|im_end|>" * 40)
    assert [len(part) for part in parts] == [50] * 8


@settings(deadline=None)
@given(turns=st.lists(TEXTS, min_size=1, max_size=6))
def test_a_conversation_that_grows_has_the_ids_of_its_whole_text_each_time(
    made: Callable[[str], Tokenizer], turns: list[str]
) -> None:
    """Also where most of it was encoded before, and where room is so scarce that much of that is forgotten."""
    tokenizer = made("byte level")
    for room in (1 << 20, 4_000):
        local = LocalTokenizer(tokenizer, cache_bytes=room)
        text = ""
        for turn in turns:
            text += f"<|im_start|>user\n{turn}<|im_end|>\n" * 3
            assert list(LocalEncodingJob(local, text, special=True).encode()) == tokenizer.encode(text).ids
            assert local.segment_cache.held_bytes <= room


def test_a_further_turn_encodes_only_what_it_adds(made: Callable[[str], Tokenizer]) -> None:
    local = LocalTokenizer(made("byte level"))

    def said(number: int) -> str:
        asked, told = f"what {number} asked " * 100, f"{number} answers " * 100
        return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{told}<|im_end|>\n"

    text, turn = "".join(map(said, range(20))), said(20)
    first = LocalEncodingJob(local, text, special=True)
    assert first.missing_chars == len(text)
    first.encode()
    again = LocalEncodingJob(local, text, special=True)
    assert again.missing_chars == 0
    further = LocalEncodingJob(local, text + turn, special=True)
    assert len(turn) <= further.missing_chars <= len(turn) + 200
    assert list(further.encode()) == made("byte level").encode(text + turn).ids


def test_what_is_forgotten_is_what_was_unused_longest() -> None:
    segments = SegmentCache(8_000)
    for number in range(100):
        segments.add(f"part {number}", array("I", [number]))
        segments.look_up(["part 0"])
    kept = [number for number in range(100) if segments.look_up([f"part {number}"])[0] is not None]
    assert 0 in kept
    assert kept[1:] == list(range(100 - len(kept) + 1, 100))
    assert segments.held_bytes <= 8_000


def test_a_part_that_would_fill_the_room_is_not_kept() -> None:
    segments = SegmentCache(8_000)
    segments.add("x" * 2_000, array("I", [1]))
    assert len(segments) == 0
