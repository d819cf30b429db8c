"""Writes a tiny Gemma 3 with random weights: layers with a sliding window between layers with full attention.

Six layers make three groups of two in vLLM's cache: two with a window, one without.
"""

import sys
from pathlib import Path
from typing import Final

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.interop.vllm.tiny_model import MAX_TOKENS, make_model

__all__ = ["GROUPS", "WINDOW", "make_hybrid"]

WINDOW: Final = 128
GROUPS: Final = 3
_LAYERS: Final = ("sliding_attention", "sliding_attention", "full_attention") * 2


def make_hybrid(folder: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer into `folder`. The weights are wide enough that an answer depends on all it reads."""
    make_model(folder, seed=seed)
    config = Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=len(_LAYERS),
        layer_types=list(_LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=WINDOW,
        initializer_range=0.2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":  # in a process of its own: what these libraries warn of is not the caller's
    make_hybrid(Path(sys.argv[1]), seed=int(sys.argv[2]))
