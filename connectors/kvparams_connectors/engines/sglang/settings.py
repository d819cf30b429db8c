"""The settings of the backend, as they stand in SGLang's `--hicache-storage-backend-extra-config`.

--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "kvparams", "module_path": "kvparams_connectors.engines.sglang.backend",
  "class_name": "KVParamsHiCache", "interface_v1": 1, "store": "valkey://host:6379"}'
"""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from kvparams.page_auth import TenantPageAuthKeys
from kvparams.settings_model import Allowed
from kvparams_connectors.engines.engine_settings import EngineSettings, Text

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
_MAX_S: Final = 600
_MAX_TENANT: Final = 256
_Seconds = Annotated[float, Field(gt=0, le=_MAX_S), Allowed(f"a number above 0, at most {_MAX_S}")]


def _check_size(text: str) -> str:
    if not 0 < len(text.encode()) <= _MAX_TENANT:
        raise ValueError("its size is wrong")
    return text


_Tenant = Annotated[str, AfterValidator(_check_size), Allowed(f"text of 1 to {_MAX_TENANT} bytes")]


class SGLangSettings(EngineSettings):
    """Holds what was configured; every field is a setting of that name."""

    model: Text | None = None
    """The model's name in the keys (default: as SGLang was told, of a folder its last part)."""
    tenant: _Tenant | None = None
    """The name of this server's tenant; servers of different tenants share nothing."""
    deadline_s: _Seconds = 5.0
    """The time limit of each call that reads or writes pages; a lookup has a fifth of it."""

    @classmethod
    def of(cls, extra_config: Mapping[str, object] | None) -> "SGLangSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        return cls.read(extra_config or {}, WHERE, _SGLANGS)

    def read_tenant_seals(self) -> TenantPageAuthKeys | None:
        """Returns the tenant's keys of authenticated pages.

        Raises:
            PageAuthError: they cannot be read.
        """
        seals = self.read_seals()
        return None if seals is None else seals.for_tenant(self.tenant)
