"""Determines what tells the weights of a model from others of the same name.

Where that cannot be known the engine is refused, for pages of other weights would be taken for its own. Reading all of
the weights would take minutes, so of each file its size, its ends and samples in between are read: files of different
training differ in each of them.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvparams_connectors.store_url import StoreError

__all__ = ["Adapters", "folder_digest", "model_name", "revision_of", "snapshot_commit"]

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE: Final = 64 << 10
_SAMPLES: Final = 32
_MAX_ADAPTERS: Final = 1024
_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Of a model's configuration: where it lies, and who wrote it."""


def model_name(model: str) -> str:
    """Returns the last part of a folder's path, because machines keep models in different places, or the hub's name."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def revision_of(weights: str, quantization: str | None, config: Mapping[str, object]) -> str:
    """Returns what stands in the keys: the weights, and what the engine was told to make of them.

    Args:
        weights: a digest, a commit, or what the operator says.
        quantization: of the engine; None: none.
        config: the model's configuration as the engine uses it, what was overridden included.
    """
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    text = json.dumps([weights, quantization, kept], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def folder_digest(folder: Path) -> str:
    """Returns a digest of the weights in a folder.

    Raises:
        StoreError: there are none.
    """
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    if not files:
        raise StoreError(
            f"the model's folder has no files {', '.join(_WEIGHTS)}; name the weights with "
            "kv_connector_extra_config.revision"
        )
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        step = max(_SAMPLE, size // _SAMPLES)
        with file.open("rb") as opened:
            for start in {*range(0, size, step), max(0, size - _SAMPLE)}:
                opened.seek(start)
                digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def snapshot_commit(config_file: str | None) -> str:
    """The commit of a model that came from the hub: where its cache keeps the file, `.../snapshots/COMMIT/...`.

    Raises:
        StoreError: the file is not there, or lies elsewhere.
    """
    parts = Path(config_file).parts if config_file else ()
    if "snapshots" in parts[:-2]:
        return parts[parts.index("snapshots") + 1]
    raise StoreError("the loaded weights cannot be identified; name them with kv_connector_extra_config.revision")


class Adapters:
    """Digests of LoRA adapters' weights: two engines may know different ones by one name."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], bytes] = {}

    def digest(self, path: str) -> bytes:
        """Returns a 32-byte digest of the adapter in a folder, which is read again when its files have changed.

        Raises:
            StoreError: there is no such folder, or there are no weights in it.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise StoreError("the adapter's weights cannot be identified, because they are not in a folder")
        files = sorted(file for file in folder.iterdir() if file.is_file())
        seen = (path, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))
        if seen not in self._known:
            if len(self._known) >= _MAX_ADAPTERS:
                self._known.clear()
            config = folder / "adapter_config.json"
            text = config.read_bytes() if config.is_file() else b""
            self._known[seen] = blake2b(folder_digest(folder).encode() + text, digest_size=32).digest()
        return self._known[seen]
