"""Determines which model and which weights a server of SGLang runs, from the configuration that it has published.

What HiCache tells a backend of the model is only what the server calls it. Where the weights cannot be known the server
is refused, for pages of other weights would be taken for its own.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from kvparams_connectors.engines.sglang.settings import WHERE, SGLangSettings
from kvparams_connectors.engines.weights_identity import folder_digest, revision_of, snapshot_commit
from kvparams_connectors.store_url import StoreError

__all__ = ["DRAFT_SETTINGS", "MODEL_SETTINGS", "ModelIdentity", "identify_model", "published_config"]

MODEL_SETTINGS: Final = (
    *("model_path", "revision", "load_format", "quantization", "quantization_param_path", "json_model_override_args"),
    *("kv_cache_dtype", "model_impl"),
)
"""Read from `get_model()` of srt/runtime_context.py."""
DRAFT_SETTINGS: Final = ("speculative_draft_model_path", "speculative_draft_model_revision")
"""Read from `get_spec()`."""
_UNSEEN: Final = (StoreError, OSError, ImportError, ValueError)
"""What looking for weights may raise; the last one is the hub's, of names that it cannot have."""
_SAY: Final = "name the weights with the setting revision"

ModelIdentity = tuple[str, str]
"""The name of the model, and what tells its weights from others of that name."""


def published_config() -> Mapping[str, object] | None:
    """Returns what this process's SGLang was started with, as far as it matters here; None if it has published nothing.

    Of LoRA adapters only those of the command line are told (`adapters`: names and paths): SGLang names their pages by
    name and path (`LoRARef.deterministic_id`, srt/lora/lora_registry.py), those that are loaded later at random.
    """
    context: Any = import_module("sglang.srt.runtime_context")
    try:
        model, draft, lora = context.get_model(), context.get_spec(), context.get_lora()
    except ValueError:
        return None
    told: dict[str, object] = {
        name: getattr(bag, name) for bag, names in ((model, MODEL_SETTINGS), (draft, DRAFT_SETTINGS)) for name in names
    }
    adapters: Sequence[Any] = (lora.lora_paths or ()) if lora.enable_lora else ()
    told["adapters"] = [(str(one.lora_name), str(one.lora_path)) for one in adapters]
    return told


def identify_model(
    settings: SGLangSettings, served_name: str | None, told: Mapping[str, object] | None, *, draft_layers: int
) -> ModelIdentity:
    """Name and revision, as they stand in the keys.

    Args:
        settings: of the backend.
        served_name: what the server calls the model.
        told: see `published_config`.
        draft_layers: of a draft model, whose KV stands in the same pages.

    Raises:
        StoreError: they cannot be known.
    """
    if draft_layers and settings.revision is None:
        raise StoreError(f"{WHERE}: pages also hold the KV of a draft model; {_SAY}, for both models")
    if told is None:
        name = settings.model or served_name
        if name is None or settings.revision is None:
            raise StoreError(f"{WHERE}: SGLang does not name its model; set model and revision")
        return name, settings.revision
    path = str(told["model_path"])
    kept: dict[str, object] = {
        "overrides": told["json_model_override_args"],
        "scales": _content(told["quantization_param_path"]),
        "implementation": told["model_impl"],
        "adapters": _adapters(cast("Sequence[tuple[str, str]]", told["adapters"]), settings.revision),
    }
    if draft_layers:
        kept["draft"] = [told[name] for name in DRAFT_SETTINGS]
    quantization = told["quantization"]
    weights = settings.revision or _model(path, told)
    revision = revision_of(weights, None if quantization is None else str(quantization), kept)
    return settings.model or _name(path), revision


def _name(path: str) -> str:
    """Returns the hub's name of a folder in its cache, the last part of another folder, or else the name itself."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    return _hubs(folder) or folder.resolve().name


def _hubs(folder: Path) -> str | None:
    """Returns what the hub calls the model whose folder of its cache this is."""
    parts = folder.absolute().parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return None


def _model(path: str, told: Mapping[str, object]) -> str:
    if told["load_format"] == "dummy":
        raise StoreError(f"{WHERE}: the weights are random (load_format dummy); {_SAY}")
    try:
        return _seen(path, "config.json", told["revision"])
    except _UNSEEN as error:
        raise StoreError(f"{WHERE}: the loaded weights cannot be identified; {_SAY}") from error


def _adapters(adapters: Sequence[tuple[str, str]], said: str | None) -> list[tuple[str, str]]:
    """Returns the names and weights of the adapters.

    SGLang's hashes say which adapter a page is of, not which weights it has. So engines with other adapters on their
    command lines share nothing, pages without an adapter among them.
    """
    found: list[tuple[str, str]] = []
    for name, path in sorted(adapters):
        try:
            found.append((name, _seen(path, "adapter_config.json", None)))
        except _UNSEEN as error:
            if said is None:
                raise StoreError(
                    f"{WHERE}: the weights of the LoRA adapter {name} cannot be identified; {_SAY}, for the model "
                    "and all adapters"
                ) from error
            found.append((name, path))
    return found


def _seen(path: str, config: str, revision: object) -> str:
    """From the files: of the hub's the commit, of others a digest of weights and configuration.

    Raises:
        StoreError: they are not there.
    """
    folder = Path(path)
    if not folder.is_dir():
        hub: Any = import_module("huggingface_hub")  # SGLang has it
        found: object = hub.try_to_load_from_cache(path, config, revision=revision)
        return snapshot_commit(found if isinstance(found, str) else None)
    if _hubs(folder) is not None:
        return folder.absolute().name
    text = (folder / config).read_bytes() if (folder / config).is_file() else b""
    return blake2b(folder_digest(folder).encode() + text, digest_size=16).hexdigest()


def _content(path: object) -> str | None:
    """A digest of a file, or of its name where it cannot be read."""
    if path is None:
        return None
    file = Path(str(path))
    return blake2b(file.read_bytes() if file.is_file() else str(path).encode(), digest_size=16).hexdigest()
