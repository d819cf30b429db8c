"""vLLM's MooncakeConnector: both legs carry a transfer id of ours, and decode finds the prefill engine by its bootstrap
server.

Prefill's answer says nothing. Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/mooncake/
mooncake_connector.py and mooncake_utils.py. The one rule: an engine id is believed only from the bootstrap server that
the operator named.
"""

from collections.abc import Mapping
from typing import Final, cast

from kvparams.dialects import Abandon, Bootstrap, HandoffMissing, Place
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts, Role

__all__ = ["MOONCAKE", "Mooncake", "MooncakeBootstrap"]

_LONGEST: Final = 256
"""Characters of an engine id: a UUID by default, and what an operator may choose instead."""


class MooncakeBootstrap:
    """`MooncakeBootstrapServer`: ranks and addresses of one prefill engine's workers, by data-parallel rank."""

    path = "/query"
    port = 8998
    """`VLLM_MOONCAKE_BOOTSTRAP_PORT`."""

    def place(self, url: str, answer: object) -> Place:
        """`{"0": {"engine_id": ..., "worker_addr": {"0": {"0": "tcp://..."}}}}`, of one data-parallel rank: behind one
        URL the engine itself would choose among several, and decode would have to know which."""
        ranks = cast("dict[str, object]", answer) if isinstance(answer, dict) else {}
        if not ranks:
            raise HandoffMissing("its bootstrap server knows no worker yet")
        if len(ranks) > 1:
            raise HandoffMissing(
                f"its bootstrap server names {len(ranks)} data-parallel ranks; give each a URL and a server of its own "
                "(vLLM's --data-parallel-external-lb)"
            )
        (rank,) = ranks.values()
        members = cast("dict[str, object]", rank) if isinstance(rank, dict) else {}
        engine = members.get("engine_id")
        if not isinstance(engine, str) or not 0 < len(engine) <= _LONGEST or not engine.isprintable():
            raise HandoffMissing("its bootstrap server names no engine_id: is it that of a MooncakeConnector?")
        if not members.get("worker_addr"):
            raise HandoffMissing("its bootstrap server knows no worker yet")
        return {"remote_engine_id": engine, "remote_bootstrap_addr": url}


class Mooncake:
    """See the module."""

    mode: Mode = "rendezvous"
    reusable = False
    lease_s = 480.0
    """`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, which nothing extends."""
    bootstrap: Bootstrap | None = MooncakeBootstrap()

    def splits(self, request: RequestFacts) -> bool:
        """A transfer id stands for the blocks of one sequence, sent once."""
        return request.prompts == request.choices == 1

    def prefill_keys(self, transfer_id: str) -> bytes:
        """Prefill keeps its blocks under this id, if its one token ends because of its length."""
        return b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}' % transfer_id.encode()

    def decode_keys(self, answer: Mapping[str, object], transfer_id: str, place: Place | None) -> Mapping[str, object]:
        """The id, and where to ask for it."""
        if place is None:
            raise HandoffMissing("the prefill engine's bootstrap server has not been asked")
        return {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id, **place}

    def abandon(self, native: bytes | None) -> Abandon | None:
        """As with NIXL: an engine that sees its client leave frees what it has; later a decode leg of one token has the
        blocks sent, or is aborted before and has them freed (request_finished)."""
        return None if native is None else Abandon(Role.DECODE, native, leg=True)


MOONCAKE: Final = Mooncake()
