"""The settings of the backend, as they stand in SGLang's `--hicache-storage-backend-extra-config`.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "kvparams", "module_path": "kvparams_connectors.engines.sglang.backend",
      "class_name": "KVParamsHiCache", "interface_v1": 1, "store": "valkey://host:6379"}'

A setting that is not known here is refused, with the known ones listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from kvparams.page_auth import TenantPageAuthKeys
from kvparams_connectors.engines.setting_values import SettingValues
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.page_auth_keys import read_page_auth_keys

__all__ = ["WHERE", "SGLangSettings"]

WHERE: Final = "SGLang backend"
"""How messages begin."""

_SGLANGS: Final = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "allocator"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        "hicache_storage_pass_prefix_keys",
    }
)
"""What SGLang itself reads there."""
_ARENA_BYTES: Final = 64 << 20
_ARENA_PAGES: Final = 8
_MAX_S: Final = 600.0
_MAX_TENANT: Final = 256


@dataclass(frozen=True, slots=True)
class SGLangSettings:
    """An `SGLangSettings` holds the configured settings; every field is a setting of that name."""

    store: str = field(repr=False)
    """The URL of a store that other processes reach."""
    model: str | None = None
    """The model's name in the keys; None: as SGLang was told, of a folder its last part."""
    revision: str | None = None
    """What tells these weights from others of the same name; None: from the files."""
    tenant: str | None = None
    """Whoever has another one shares nothing. A request's `cache_salt` is another thing: SGLang's hashes have it."""
    deadline_s: float = 5.0
    """For each call that reads or writes pages."""
    lookup_s: float = 1.0
    """For the question what is there."""
    arena_bytes: int | None = None
    """For pages on their way; None: 64 MiB, and room for 8 pages at least."""
    verify: bool = True
    """False uses whatever the store gives back; to show what verification is good for."""
    self_test: bool = True
    """Send one page through the whole path before serving."""
    seal_keys: Path | None = None
    """A key file of authenticated pages."""

    @classmethod
    def of(cls, extra_config: Mapping[str, object] | None) -> "SGLangSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        found = {name: value for name, value in (extra_config or {}).items() if name not in _SGLANGS}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise StoreError(f"{WHERE}: unknown setting {', '.join(unknown)}; known: {', '.join(known)}")
        given = SettingValues(found, f"{WHERE}: ")
        store = given.read_text("store")
        if store is None:
            raise StoreError(f"{WHERE}: store is not there; it is the store's URL: valkey://host:6379")
        tenant = given.read_text("tenant")
        if tenant is not None and len(tenant.encode()) > _MAX_TENANT:
            raise StoreError(f"{WHERE}: tenant is longer than {_MAX_TENANT} bytes")
        return cls(
            store=store,
            model=given.read_text("model"),
            revision=given.read_text("revision"),
            tenant=tenant,
            deadline_s=given.read_float("deadline_s", _MAX_S) or 5.0,
            lookup_s=given.read_float("lookup_s", _MAX_S) or 1.0,
            arena_bytes=given.read_int("arena_bytes"),
            verify=given.read_bool("verify", default=True),
            self_test=given.read_bool("self_test", default=True),
            seal_keys=given.read_path("seal_keys"),
        )

    def room_for(self, stored_bytes: int) -> int:
        """Bytes of the arena, for pages that take so many with their headers."""
        return self.arena_bytes or max(_ARENA_BYTES, _ARENA_PAGES * stored_bytes)

    def read_seals(self) -> TenantPageAuthKeys | None:
        """The tenant's keys of authenticated pages. Raises PageAuthError if they cannot be read."""
        return None if self.seal_keys is None else read_page_auth_keys(self.seal_keys).for_tenant(self.tenant)
