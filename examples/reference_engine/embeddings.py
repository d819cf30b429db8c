"""Texts as vectors: the mean of the hidden states of all tokens, of length one.

The embedder has a small cache of its own and takes nothing from the engine's loop but time.
"""

import threading
from base64 import b64encode
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.cache import PagedCache
from reference_engine.model import Model, Span

__all__ = ["Embedder"]

_BLOCK_TOKENS: Final = 16
_STEP_TOKENS: Final = 512
_DECIMALS: Final = 6

JSON = dict[str, object]


class Embedder:
    """Computes one input after the other."""

    def __init__(self, model: Model, max_tokens: int) -> None:
        shape = model.shape
        self._blocks = list(range(-(-max_tokens // _BLOCK_TOKENS)))
        self._cache = PagedCache(shape.layers, len(self._blocks), _BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        self._model = model
        self._lock = threading.Lock()

    def embed(self, tokens: list[int]) -> NDArray[np.float32]:
        """Returns the vector of one input; any thread may call it, and it takes as long as computing the tokens."""
        total = torch.zeros(self._model.shape.hidden, dtype=torch.float64)
        with self._lock:
            for start in range(0, len(tokens), _STEP_TOKENS):
                span = Span(tokens[start : start + _STEP_TOKENS], start, self._blocks, want_logits=False)
                total += self._model.hidden([span], self._cache).sum(dim=0)
        found = total.numpy()
        return np.round(found / np.linalg.norm(found), _DECIMALS).astype(np.float32)  # no last bit of a sum is seen

    def answer(self, inputs: list[list[int]], model: str, *, base64: bool) -> JSON:
        """The answer of `/v1/embeddings`."""
        data: list[JSON] = []
        for index, tokens in enumerate(inputs):
            vector = self.embed(tokens)
            said = (
                b64encode(vector.tobytes()).decode() if base64 else [round(one, _DECIMALS) for one in vector.tolist()]
            )
            data.append({"index": index, "object": "embedding", "embedding": said})
        count = sum(map(len, inputs))
        counted = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model, "usage": counted}
