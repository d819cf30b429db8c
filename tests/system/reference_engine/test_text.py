"""Tests tokens, sampling and stop strings, which make up one sequence's text."""

import numpy as np
import pytest

from reference_engine.sampling import Choice, Sampling, choose
from reference_engine.sequence import Event, Limits, Sequence
from reference_engine.tokenizer import BOS, EOS, OUTPUT_IDS, ROLES, Message, decode, encode, encode_chat

ALL = frozenset(OUTPUT_IDS)
LOGITS = np.random.default_rng(7).normal(size=len(OUTPUT_IDS)) * 2


def nobody(event: Event) -> None:
    """Events are looked at directly here."""


def write(sequence: Sequence, text: str) -> list[Event]:
    return [sequence.append(Choice(ord(character), None, [])) for character in text]


def drawn(sampling: Sampling, count: int = 400) -> list[int]:
    """One draw for each position, behind a prompt of a token that cannot be generated."""
    return [choose(LOGITS, sampling, [BOS] * position, position, None).token for position in range(count)]


def test_text_survives_the_way_to_ids_and_back() -> None:
    text = "Größe, 漢字, 🙂 and ASCII"

    assert decode(encode(text)) == text
    assert encode(text)[0] == BOS


def test_text_that_utf8_cannot_say_does_not_crash() -> None:
    assert encode("a\ud800", bos=False) == [ord("a"), ord("?")]


def test_the_next_turns_prompt_begins_with_this_turns_ids() -> None:
    """That is what makes a conversation's KV findable."""
    asked = [Message("system", "Be brief."), Message("user", "Why?")]
    prompt, generated = encode_chat(asked), [ord(character) for character in "Because."] + [EOS]

    following = encode_chat([*asked, Message("assistant", decode(generated)), Message("user", "Why not?")])

    assert following[: len(prompt) + len(generated)] == prompt + generated
    assert following[-1] == ROLES["assistant"]


def test_only_printable_ascii_and_the_end_can_be_generated() -> None:
    assert all(chr(token).isprintable() for token in OUTPUT_IDS if token != EOS)
    assert len(set(OUTPUT_IDS)) == len(OUTPUT_IDS) == 96


def test_temperature_0_takes_the_likeliest_token() -> None:
    assert drawn(Sampling(temperature=0), 3) == [OUTPUT_IDS[int(np.argmax(LOGITS))]] * 3


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    assert drawn(Sampling(seed=b"1")) == drawn(Sampling(seed=b"1"))
    assert drawn(Sampling(seed=b"1")) != drawn(Sampling(seed=b"2"))
    assert len(set(drawn(Sampling(seed=b"1")))) > 20


def test_draws_follow_the_probabilities() -> None:
    found = drawn(Sampling(seed=b"x"), 20_000)
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    frequency = np.array([found.count(token) for token in OUTPUT_IDS]) / len(found)

    assert np.abs(frequency - expected).max() < 0.02


def test_top_k_and_top_p_keep_the_likeliest_tokens_only() -> None:
    order = [OUTPUT_IDS[int(row)] for row in np.argsort(-LOGITS)]
    probabilities = np.sort(np.exp(LOGITS) / np.exp(LOGITS).sum())[::-1]
    needed = int(np.searchsorted(np.cumsum(probabilities), 0.5)) + 1

    assert set(drawn(Sampling(top_k=3, seed=b"s"))) == set(order[:3])
    assert set(drawn(Sampling(top_p=0.5, seed=b"s"), 2_000)) == set(order[:needed])
    assert set(drawn(Sampling(top_p=1e-9, seed=b"s"))) == {order[0]}


def test_the_end_is_not_chosen_where_it_may_not_be() -> None:
    logits = np.where(np.array(OUTPUT_IDS) == EOS, 100.0, LOGITS)

    assert choose(logits, Sampling(temperature=0), [], 0, None).token == EOS
    assert choose(logits, Sampling(temperature=0), [], 0, ALL - {EOS}).token != EOS


def test_logits_that_are_not_numbers_still_give_a_token() -> None:
    """A corrupted page, used unchecked, must not take the engine down."""
    for temperature in (0.0, 1.0):
        assert choose(LOGITS * np.nan, Sampling(temperature), [], 0, None).token in OUTPUT_IDS
        assert choose(LOGITS * np.nan, Sampling(temperature), [], 0, frozenset((90,))).token == 90


def test_log_probabilities_are_those_of_the_model() -> None:
    found = choose(LOGITS, Sampling(temperature=0, logprobs=3), [], 0, None)
    expected = LOGITS.max() - np.log(np.exp(LOGITS).sum())

    assert found.logprob == pytest.approx(expected, abs=1e-5)
    assert found.top[0] == (found.token, found.logprob)
    assert len(found.top) == 3


def test_text_that_may_begin_a_stop_string_is_held_back_and_cut_when_it_does() -> None:
    sequence = Sequence([1], 0, nobody, limits=Limits(max_tokens=20, stop=("END", "xy")))

    events = write(sequence, "abEND")

    assert "".join(event.text for event in events) == "ab"
    assert [event.text for event in events[:3]] == ["", "", "a"]
    assert (events[-1].finish, events[-1].reason) == ("stop", "END")


def test_held_back_text_is_sent_when_the_answer_ends_otherwise() -> None:
    sequence = Sequence([1], 0, nobody, limits=Limits(max_tokens=4, stop=("END",)))

    events = write(sequence, "abEN")

    assert "".join(event.text for event in events) == "abEN"
    assert (events[-1].finish, events[-1].reason) == ("length", None)


def test_a_stop_string_counts_only_behind_the_fewest_tokens() -> None:
    sequence = Sequence([1], 0, nobody, limits=Limits(max_tokens=20, min_tokens=3, stop=("b",)))

    events = write(sequence, "abcb")

    assert [event.finish for event in events] == [None, None, None, "stop"]
    assert "".join(event.text for event in events) == "abc"


def test_the_end_marker_ends_without_text() -> None:
    sequence = Sequence([1], 0, nobody, limits=Limits(max_tokens=20))
    write(sequence, "a")

    event = sequence.append(Choice(EOS, None, []))

    assert (event.text, event.finish, sequence.generated) == ("", "stop", 2)
