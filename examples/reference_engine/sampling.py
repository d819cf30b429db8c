"""From logits to a token.

The one rule: nothing random is remembered. The draw for a position is a function of the seed and that position, so that
batching, a hand-over to another engine, or a continuation from the ids already sent cannot change it.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reference_engine.tokenizer import EOS, OUTPUT_IDS

__all__ = ["Choice", "Sampling", "choose"]

Logits = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence's tokens are chosen."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less: all."""
    seed: bytes = b""
    """Differs between requests and between the choices of one request."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None: no log probabilities at all."""


class Choice(NamedTuple):
    """A chosen token, its log probability before temperature and truncation, and the likeliest alternatives."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def choose(logits: Logits, sampling: Sampling, position: int, *, may_end: bool) -> Choice:
    """Choose the token for `position` (counted from the start of the prompt).

    Args:
        logits: one per `OUTPUT_IDS`.
        sampling: how.
        position: where in the sequence the token will stand.
        may_end: whether the end marker may be chosen.
    """
    allowed = logits if may_end else np.where(np.asarray(OUTPUT_IDS) == EOS, -np.inf, logits)
    if sampling.temperature == 0:
        row = int(np.argmax(allowed))
    else:
        row = _draw(allowed / sampling.temperature, sampling, position)
    if sampling.logprobs is None:
        return Choice(OUTPUT_IDS[row], None, [])
    logprobs = np.log(_softmax(logits))
    best = np.argsort(-logprobs, kind="stable")[: sampling.logprobs]
    return Choice(OUTPUT_IDS[row], float(logprobs[row]), [(OUTPUT_IDS[int(i)], float(logprobs[i])) for i in best])


def _draw(logits: Logits, sampling: Sampling, position: int) -> int:
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    cumulated = cast("list[float]", np.cumsum(_softmax(logits[order])).tolist())
    # The smallest set that reaches top_p: the token that crosses the line belongs to it.
    keep = min(bisect_left(cumulated, sampling.top_p) + 1, len(cumulated))
    drawn = _uniform(sampling.seed, position) * cumulated[keep - 1]
    return int(order[min(bisect_right(cumulated, drawn), keep - 1)])


def _softmax(logits: Logits) -> Logits:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def _uniform(seed: bytes, position: int) -> float:
    digest = blake2b(seed + b"/%d" % position, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64
