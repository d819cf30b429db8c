"""Tests that paged attention equals attention, and that batching does not change the model's tokens."""

import random

import pytest
import torch
from torch import Tensor

from reference_engine.cache import PagedCache
from reference_engine.model import COMPUTE, Model, Span, attention
from reference_engine.tokenizer import OUTPUT_IDS

BLOCK = 16


def new_cache(model: Model, blocks: int = 128) -> PagedCache:
    return PagedCache(model.shape.layers, blocks, BLOCK, model.shape.kv_heads, model.shape.head_dim)


def random_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def scattered_blocks(seed: int, count: int) -> list[int]:
    """A block table in no order."""
    return random.Random(seed).sample(range(128), count)


def prefill(model: Model, cache: PagedCache, tokens: list[int], blocks: list[int], chunk: int) -> Tensor:
    """The logits behind the last token, computed `chunk` tokens at a time."""
    logits = torch.empty(0)
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        logits = model.forward([Span(piece, start, blocks, start + len(piece) == len(tokens))], cache)
    return logits[0]


def greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    cache, blocks, grown = new_cache(model), list(range(-(-(len(tokens) + count) // BLOCK))), list(tokens)
    logits = prefill(model, cache, grown, blocks, 512)
    for _ in range(count):
        grown.append(OUTPUT_IDS[int(logits.argmax())])
        logits = model.forward([Span(grown[-1:], len(grown) - 1, blocks, True)], cache)[0]
    return grown[len(tokens) :]


def test_paged_grouped_attention_equals_plain_attention_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    spans, width, tokens, heads, kv_heads, dim = 3, 5, 48, 4, 2, 8
    start = torch.tensor([0, 17, 43])
    query = torch.randn(spans * width, heads, dim, generator=generator, dtype=COMPUTE)
    keys = torch.randn(spans, tokens, kv_heads, dim, generator=generator, dtype=COMPUTE)
    values = torch.randn(spans, tokens, kv_heads, dim, generator=generator, dtype=COMPUTE)
    positions = start.view(-1, 1) + torch.arange(width)
    mask = (torch.arange(tokens) <= positions.unsqueeze(-1)).unsqueeze(1).repeat(1, 1, heads // kv_heads, 1)

    found = attention(query, keys, values, mask)

    for span in range(spans):
        for step in range(width):
            end = int(positions[span, step]) + 1
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = keys[span, :end, shared] @ query[span * width + step, head] / dim**0.5
                expected = torch.softmax(scores, 0) @ values[span, :end, shared]
                torch.testing.assert_close(found[span * width + step, head], expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunks_of_a_prompt_give_the_same_kv_bits_and_the_same_logits(model: Model, chunk: int) -> None:
    tokens = random_prompt(1, 150)
    whole, pieces, blocks = new_cache(model), new_cache(model), scattered_blocks(2, 10)

    expected = prefill(model, whole, tokens, blocks, 512)
    found = prefill(model, pieces, tokens, blocks, chunk)

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for layer in range(model.shape.layers):
        assert torch.equal(whole.keys[layer], pieces.keys[layer])
        assert torch.equal(whole.values[layer], pieces.values[layer])


def test_a_batch_gives_every_sequence_the_logits_it_has_alone(model: Model) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate([1, 15, 16, 17, 63, 64, 65, 130])]
    tables = [list(range(10 * index, 10 * index + 10)) for index in range(len(prompts))]
    alone = [prefill(model, new_cache(model), prompt, list(range(10)), 512) for prompt in prompts]
    cache = new_cache(model)
    spans = [Span(prompt[:-1], 0, table, False) for prompt, table in zip(prompts, tables, strict=True) if prompt[:-1]]
    assert len(model.forward(spans, cache)) == 0

    last = [Span(prompt[-1:], len(prompt) - 1, table, True) for prompt, table in zip(prompts, tables, strict=True)]
    together = model.forward(last, cache)

    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_changing_the_first_of_600_tokens_changes_the_answer(model: Model, seed: int) -> None:
    """Otherwise equal tokens would prove nothing about the KV that was moved."""
    prompt = random_prompt(seed, 600)
    other = [prompt[0] ^ 1, *prompt[1:]]

    assert greedy(model, prompt, 16) != greedy(model, other, 16)


def test_every_process_has_the_same_weights(model: Model) -> None:
    tokens = random_prompt(3, 20)

    assert greedy(Model(model.shape, 64), tokens, 8) == greedy(model, tokens, 8)
