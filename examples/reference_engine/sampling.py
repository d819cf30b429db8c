"""From logits to a token.

Sampling has no state. A choice is a function of the logits, the seed and the tokens before it, so that batching, a
hand-over to another engine, or a continuation from the ids already sent cannot change it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reference_engine.tokenizer import OUTPUT_IDS, VOCABULARY

__all__ = ["Choice", "Sampling", "choose"]

Logits = NDArray[np.float64]
_Rows = NDArray[np.intp]

_DECIMALS: Final = 5
"""Of a log probability. How the work was cut up changes the last bits of a sum; what is reported must not show it."""
_IDS: Final = np.asarray(OUTPUT_IDS)


@dataclass(frozen=True, slots=True)
class Sampling:
    """A `Sampling` says how the tokens of one sequence are chosen."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less: all."""
    seed: bytes = b""
    """Differs between requests and between the choices of one request."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None: no log probabilities at all."""
    min_p: float = 0.0
    """Tokens less likely than this part of the likeliest are not drawn."""
    presence: float = 0.0
    """Taken from the logits of tokens that were generated before."""
    frequency: float = 0.0
    """The same, for each time that they were."""
    repetition: float = 1.0
    """Divides the logits of tokens that stand in the prompt or were generated; multiplies negative ones."""
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""


class Choice(NamedTuple):
    """A chosen token, its log probability before everything that `Sampling` does, and the likeliest alternatives."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def choose(
    logits: Logits, sampling: Sampling, tokens: Sequence[int], prompt_tokens: int, allowed: frozenset[int] | None
) -> Choice:
    """Choose the next token.

    Args:
        logits: one per `OUTPUT_IDS`.
        sampling: how.
        tokens: all before it; the first `prompt_tokens` of them are the prompt.
        prompt_tokens: see `tokens`.
        allowed: the tokens that may be chosen, at least one of `OUTPUT_IDS`; None: all.
    """
    weighed = _weighed(logits, sampling, tokens, prompt_tokens)
    rows = np.arange(len(_IDS)) if allowed is None else np.flatnonzero([token in allowed for token in OUTPUT_IDS])
    if sampling.temperature == 0:
        row = int(rows[int(np.argmax(weighed[rows]))])
    else:
        row = _draw(weighed[rows] / sampling.temperature, rows, sampling, len(tokens))
    if sampling.logprobs is None:
        return Choice(OUTPUT_IDS[row], None, [])
    logprobs = np.log(_softmax(logits))
    best = np.argsort(-logprobs, kind="stable")[: sampling.logprobs]
    top = [(OUTPUT_IDS[int(one)], round(float(logprobs[one]), _DECIMALS)) for one in best]
    return Choice(OUTPUT_IDS[row], round(float(logprobs[row]), _DECIMALS), top)


def _weighed(logits: Logits, sampling: Sampling, tokens: Sequence[int], prompt_tokens: int) -> Logits:
    """The logits with bias and penalties."""
    if sampling.bias:
        added = np.zeros(VOCABULARY)
        for token, bias in sampling.bias:
            added[token] = bias
        logits = logits + added[_IDS]
    if sampling.repetition != 1:
        seen = np.bincount(tokens, minlength=VOCABULARY)[_IDS] > 0
        factor = np.where(logits > 0, 1 / sampling.repetition, sampling.repetition)
        logits = np.where(seen, logits * factor, logits)
    if sampling.frequency or sampling.presence:
        generated = np.asarray(tokens[prompt_tokens:], dtype=np.intp)
        counts = np.bincount(generated, minlength=VOCABULARY)[_IDS]
        logits = logits - sampling.frequency * counts - sampling.presence * (counts > 0)
    return logits


def _draw(logits: Logits, rows: _Rows, sampling: Sampling, position: int) -> int:
    """Draws one of `rows`, whose logits these are."""
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    probabilities = _softmax(logits[order])
    if sampling.min_p:
        likely = probabilities >= sampling.min_p * probabilities[0]
        likely[0] = True
        order, probabilities = order[likely], probabilities[likely] / probabilities[likely].sum()
    cumulated = cast("list[float]", np.cumsum(probabilities).tolist())
    # The smallest set that reaches top_p: the token that crosses the line belongs to it.
    keep = min(bisect_left(cumulated, sampling.top_p) + 1, len(cumulated))
    drawn = _uniform(sampling.seed, position) * cumulated[keep - 1]
    return int(rows[order[min(bisect_right(cumulated, drawn), keep - 1)]])


def _softmax(logits: Logits) -> Logits:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def _uniform(seed: bytes, position: int) -> float:
    digest = blake2b(seed + b"/%d" % position, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64
