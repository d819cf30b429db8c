"""Tests our keys on vLLM's own requests: equal token ids with other images, embeddings or adapters share no page."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvparams_connectors.engines.vllm.scheduler_connector import SchedulerConnector
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from tests.interop.vllm.half_steps import PROMPT, FullAttentionSpec, Manager, key_of, make_cache, make_config, saves_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def half(tmp_path: Path) -> Iterator[SchedulerConnector]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB", "trust_media_hashes": True})
    made = SchedulerConnector(make_config(tmp_path), make_cache(FullAttentionSpec()), settings)
    made.bind(Manager())
    yield made
    made.shutdown()


def _request(name: str, **more: Any) -> Any:
    """A request as vLLM's engine makes it."""
    sampling = import_module("vllm.sampling_params").SamplingParams(max_tokens=4)
    told: dict[str, Any] = {"prompt_token_ids": list(PROMPT), "sampling_params": sampling, **more}
    return import_module("vllm.v1.request").Request(request_id=name, pooling_params=None, **told)


def _image(content: int, offset: int = 10) -> Any:
    """An image in a prompt, named by vLLM's hash of its content."""
    inputs: Any = import_module("vllm.multimodal.inputs")
    hasher: Any = import_module("vllm.multimodal.hasher").MultiModalHasher
    picture: Any = import_module("PIL.Image").fromarray(np.full((8, 8, 3), content, np.uint8))
    name = hasher.hash_kwargs("blake3", model_id="tiny", image=picture)
    position = inputs.PlaceholderRange(offset=offset, length=20)
    return inputs.MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=position)


def test_equal_ids_with_other_images_share_nothing(half: SchedulerConnector) -> None:
    keys = [
        key_of(half, _request("none")),
        key_of(half, _request("one", mm_features=[_image(1)])),
        key_of(half, _request("another", mm_features=[_image(2)])),
        key_of(half, _request("elsewhere", mm_features=[_image(1, 11)])),
        key_of(half, _request("salted", mm_features=[_image(1)], cache_salt="s")),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(half, _request("again", mm_features=[_image(1)])) == keys[1]


def test_other_images_under_one_name_of_a_client_are_not_cached(half: SchedulerConnector) -> None:
    """vLLM takes a client's `uuid` of an image for its hash, whatever is in it."""
    hashes = [_hashes_of(content, "cat.jpg") for content in (1, 2)]
    assert hashes == ["cat.jpg", "cat.jpg"]
    for content, identifier in enumerate(hashes):
        image = replace(_image(content), identifier=identifier)
        assert saves_of(half, _request(f"named {content}", mm_features=[image])) == []
    unnamed = [_hashes_of(content, None) for content in (1, 2)]
    keys = [key_of(half, _request(name, mm_features=[replace(_image(0), identifier=name)])) for name in unnamed]
    assert len(set(keys)) == 2


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_every_hash_of_vllm_itself_is_taken(half: SchedulerConnector, algorithm: str) -> None:
    image = replace(_image(1), identifier=_hashes_of(1, None, algorithm))
    assert saves_of(half, _request(algorithm, mm_features=[image]))


def _hashes_of(content: int, name: str | None, algorithm: str = "blake3") -> str:
    """What vLLM's processor calls an image that a client has given a name, or none."""
    parse: Any = import_module("vllm.multimodal.parse")
    inputs: Any = import_module("vllm.multimodal.processing.inputs")
    picture: Any = import_module("PIL.Image").fromarray(np.full((8, 8, 3), content, np.uint8))
    data = parse.MultiModalDataParser().parse_mm_data({"image": [picture]})
    told = inputs.ProcessorInputs([1], data, mm_uuid_items=parse.parse_mm_uuids({"image": [name]}))
    (found,) = told.get_mm_hashes("tiny", algorithm)["image"]
    return found


def test_pages_before_an_image_are_shared(half: SchedulerConnector) -> None:
    """The KV of a token depends on what stands before it, and on no more."""
    (one,) = saves_of(half, _request("one", mm_features=[_image(1, 200)]))
    (other,) = saves_of(half, _request("other", mm_features=[_image(2, 200)]))
    first, second = (
        half.state.plan_of(save.sequence.token_ids, save.sequence.shared_params, save.sequence.extras).keys
        for save in (one, other)
    )
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_embeds": torch.zeros(300, 8), "prompt_token_ids": None},
        {"prompt_embeds": torch.zeros(300, 8), "prompt_is_token_ids": [True] * 100 + [False] * 200},
    ],
)
def test_embeddings_are_not_cached(half: SchedulerConnector, more: dict[str, Any]) -> None:
    """They have no ids to be named by: vLLM shows zeros in their place, which others may have as well."""
    assert saves_of(half, _request("r", **more)) == []
