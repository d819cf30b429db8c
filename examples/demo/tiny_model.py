"""A small Llama with random weights and a tokenizer of its own, made on the spot: nothing is downloaded.

The weights are drawn wide enough that an answer depends on all of its context; otherwise wrong KV would go unseen.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["MAX_TOKENS", "TINY", "Shape", "main", "make_adapter", "make_model"]

MAX_TOKENS: Final = 4096
_VOCABULARY: Final = 2048
_CHAT: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROOT: Final = Path(__file__).parents[2]


class Shape(NamedTuple):
    """A `Shape` is the geometry of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


TINY: Final = Shape(layers=2, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64)


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shape: Shape = TINY,
    special_tokens: Sequence[str] = (),
) -> Path:
    """Write model and tokenizer into `folder`; about 5 s. Another seed is another model of the same shape."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>", *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [file.read_text() for file in sorted((_ROOT / "spec").rglob("*.md"))]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.2 * math.sqrt(TINY.hidden / shape.hidden),  # sums are as wide in any shape
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def make_adapter(folder: Path, *, seed: int) -> Path:
    """A LoRA adapter with random weights for such a model."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            tensors[start + "lora_A.weight"] = torch.randn(8, 256)
            tensors[start + "lora_B.weight"] = torch.randn(width, 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder


def main(arguments: Sequence[str]) -> None:
    """Make one: its folder, its seed, and the name of its type (`float32`), or `adapter`, or `thinking`.

    The tokenizer of a `thinking` model has the tokens that stand around reasoning.
    """
    folder, seed, kind = arguments
    if kind == "adapter":
        make_adapter(Path(folder), seed=int(seed))
    elif kind == "thinking":
        make_model(Path(folder), seed=int(seed), special_tokens=("<think>", "</think>"))
    else:
        make_model(Path(folder), seed=int(seed), dtype=getattr(torch, kind))


if __name__ == "__main__":  # in a process of its own: what these libraries warn of is not the caller's
    main(sys.argv[1:])
