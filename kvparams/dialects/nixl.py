"""vLLM's NixlConnector: the decode engine pulls blocks that the prefill engine holds under a lease.

Prefill is asked with six keys; its answer names engine, address, request and blocks, and goes to decode verbatim.
Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py.
"""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects import Abandon, Bootstrap, HandoffMissing, Place
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts, Role

__all__ = ["NIXL", "Nixl"]

_PREFILL: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_NEEDED: Final = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


class Nixl:
    """See the module."""

    mode: Mode = "pull"
    reusable = False
    lease_s = 30.0
    """`kv_lease_duration`, which a decode engine that waits extends (vLLM 0.32.0 nixl/base_worker.py)."""
    bootstrap: Bootstrap | None = None

    def splits(self, request: RequestFacts) -> bool:
        """The answer names the blocks of one sequence only (vLLM 0.32.0 completion/serving.py: prompt 0)."""
        return request.prompts == request.choices == 1

    def prefill_keys(self, transfer_id: str) -> bytes:
        """The six keys that routers conventionally send."""
        return _PREFILL

    def decode_keys(self, answer: Mapping[str, object], transfer_id: str, place: Place | None) -> Mapping[str, object]:
        """What prefill said, as it said it, without our own document."""
        missing = [name for name in _NEEDED if answer.get(name) is None]
        if missing:
            raise HandoffMissing(
                f"the prefill engine's answer lacks {', '.join(missing)} in kv_transfer_params: "
                "is it started with a NixlConnector (--kv-transfer-config)?"
            )
        return {name: value for name, value in answer.items() if name != DOCUMENT_KEY}

    def abandon(self, native: bytes | None) -> Abandon | None:
        """Nothing as long as prefill has not answered: an engine that sees its client leave frees what it has. Then a
        decode leg of one token: its engine fetches the blocks, or is aborted before, and tells the prefill engine
        to free them either way (vLLM 0.32.0 nixl/base_scheduler.py: request_finished)."""
        return None if native is None else Abandon(Role.DECODE, native, leg=True)


NIXL: Final = Nixl()
