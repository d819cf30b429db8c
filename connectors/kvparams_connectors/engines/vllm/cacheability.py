"""Defines what the KV of one of vLLM's requests depends on besides its token ids, and whether a key can say it.

Invariant: only hashes that vLLM has computed from the content enter a key. vLLM takes a client's name of an image for
such a hash, and does not tell a connector where a hash comes from. So the operator has to vouch for the hashes.
"""

import re
from hashlib import blake2b
from typing import Final

from kvparams.keys import ExtraKey
from kvparams_connectors.engines.vllm.interface import LoRARequest, VLLMRequest

__all__ = ["media_extras", "why_not_cacheable"]

_DIGEST: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""BLAKE3 or SHA-256, or SHA-512."""


def why_not_cacheable(request: VLLMRequest, *, hashes_trusted: bool) -> str | None:
    """Returns why the KV of a request depends on something that no key says; None if it does not.

    Args:
        request: of vLLM.
        hashes_trusted: the hashes of its images, audio and video are known to be vLLM's own.
    """
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None or not request.prompt_token_ids:
        return "its prompt holds embeddings, which have no token ids"
    if request.pooling_params is not None:
        return "it asks for an embedding, not for tokens"
    if request.resumable:
        return "its prompt is sent in several pieces"
    if not all(_says_content(feature.identifier, request.lora_request) for feature in request.mm_features):
        return "it has an image with a client's own name, so the image's content is unknown"
    if request.mm_features and not hashes_trusted:
        return (
            "it has images, whose hashes may be clients' own names; set verify_with in "
            "kv_connector_extra_config, or trust_media_hashes if only proxies can reach this engine"
        )
    return None


def _says_content(identifier: str, lora: LoRARequest | None) -> bool:
    """Returns True if the identifier looks like a hash of vLLM's hasher (vllm/multimodal/hasher.py).

    A client's `uuid` comes as it is, so it may look like that too; and vLLM hashes it with `mm_processor_kwargs` where
    there are any.

    With an adapter for the encoder, too, its name stands before (vllm/v1/engine/input_processor.py).
    """
    if lora is not None:
        identifier = identifier.removeprefix(f"{lora.lora_name}:")
    return _DIGEST.fullmatch(identifier) is not None


def media_extras(request: VLLMRequest) -> tuple[ExtraKey, ...]:
    """Returns the images, audio and video of a request, by vLLM's hashes of their content."""
    return tuple(
        ExtraKey(
            feature.mm_position.offset,
            feature.mm_position.offset + feature.mm_position.length,
            blake2b(feature.identifier.encode(), digest_size=32).digest(),
        )
        for feature in request.mm_features
    )
