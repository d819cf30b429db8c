"""Writes a tiny BLIP-2 with random weights, which takes images: `python -m tests.interop.vllm.vision_model FOLDER`.

No other kind of vision model was found to run in vLLM 0.32.0 without torchvision, which has no build without a GPU
there.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false

import sys
from pathlib import Path
from typing import Final

import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    OPTConfig,
    PreTrainedTokenizerFast,
)

from tests.interop.vllm.tiny_model import make_model

__all__ = ["make_vision_model"]

_IMAGE: Final = "<image>"
"""What stands for an image in a text."""
_IMAGE_TOKENS: Final = 16
"""Of a prompt, for each image."""
_PIXELS: Final = 56
"""Wide and high."""
_VOCABULARY: Final = 2112
_CHAT: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}<|assistant|>"
)


def make_vision_model(folder: Path) -> Path:
    """Writes model, tokenizer and processor into `folder`, wide enough that an answer depends on the image."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_model(folder / "words"))
    tokenizer.add_special_tokens({"additional_special_tokens": [_IMAGE]})
    tokenizer.pad_token = "</s>"
    tokenizer.chat_template = _CHAT
    wide = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "initializer_range": 0.2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(hidden_size=64, image_size=_PIXELS, patch_size=14, **wide),
        qformer_config=Blip2QFormerConfig(
            vocab_size=_VOCABULARY, hidden_size=64, encoder_hidden_size=64, cross_attention_frequency=2, **wide
        ),
        text_config=OPTConfig(
            vocab_size=_VOCABULARY,
            hidden_size=128,
            word_embed_proj_dim=128,
            ffn_dim=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=2048,
            init_std=0.2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        ),
        num_query_tokens=_IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).to(torch.float32)
    torch.nn.init.normal_(model.query_tokens, std=0.5)  # zeros would answer every image alike
    model.save_pretrained(folder)
    images = BlipImageProcessorPil(size={"height": _PIXELS, "width": _PIXELS})
    Blip2Processor(image_processor=images, tokenizer=tokenizer, num_query_tokens=_IMAGE_TOKENS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":  # in a process of its own: what these libraries warn of is not the caller's
    make_vision_model(Path(sys.argv[1]))
