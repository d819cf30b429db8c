"""Holds the state of one request: its inputs, its store lookup, and the life of the weights that it belongs to.

vLLM may be given other weights while it runs, and then has its caches reset; what the engine computes from there on has
another name, a life.

Invariant: KV that a request began in one life is never stored under the name of another. Otherwise KV of old weights
would be loaded after a change of weights.
"""

from collections.abc import Sequence as Tokens
from typing import Final

from kvparams.keys import ExtraKey
from kvparams_connectors.engines.vllm.connector_metadata import TokenSequence
from kvparams_connectors.engines.vllm.grouped_plan import GroupedPlan, PageChains
from kvparams_connectors.engines.vllm.request_params import RequestParams
from kvparams_connectors.engines.vllm.request_state_machine import RequestStateMachine
from kvparams_connectors.jobs import Job
from kvparams_connectors.transfer.reports import PrefixHit

__all__ = ["ALL_TOKENS", "RequestState"]

ALL_TOKENS: Final = 1 << 40
"""Behind the last token of every sequence."""


class RequestState:
    """A `RequestState` is the scheduler-side state of one request."""

    def __init__(
        self,
        handoff: RequestParams,
        extras: tuple[ExtraKey, ...],
        prompt: Tokens[int],
        tracked: RequestStateMachine,
        life: tuple[ExtraKey, ...],
        plan: GroupedPlan | None,
    ) -> None:
        """Begins with a request that vLLM has just passed to the connector.

        Args:
            handoff: the request's parsed `kv_transfer_params`.
            extras: what the KV depends on besides token ids.
            prompt: the token ids of the prompt.
            tracked: the state machine that decides about loads and saves.
            life: the key of the current weights; empty for the weights that the engine has started with.
            plan: the pages of the prompt; None: the request does not use the store, and its answer only says so.
        """
        self.request_params: Final = handoff
        self.prompt: Final = tuple(prompt)
        self.state_machine: Final = tracked
        self.patient_until: float | None = None
        """It waits until then for promised pages; None: it does not."""
        self.again_at = 0.0
        self.plan = plan
        self.disabled_reason: Final = plan is None
        """Whether the store is left alone."""
        self.lookup: Job[PrefixHit] | None = None
        self.prefix_hit: PrefixHit | None = None
        self.worth = True
        self.small = False
        """A load of it was left out because it was smaller than a block."""
        self.outdated = False
        """What is known of it belongs to a life that is over, or to blocks that it has no more: before an offer the
        store is asked again, and until then nothing of it is saved or promised."""
        self.pages: PageChains = () if plan is None else plan.chains
        """Of its tokens, as far as they were needed: what is full of them never changes within a life."""
        self.gaps: Final[set[tuple[int, int]]] = set()
        """Group of layers and end of pages that could not be saved: their blocks were gone already."""
        self._extras: Final = extras
        self._life = life

    @property
    def extras(self) -> tuple[ExtraKey, ...]:
        """Returns what its KV depends on besides token ids, the weights' life included."""
        return self._extras + self._life

    def renew(self, life: tuple[ExtraKey, ...]) -> None:
        """The weights have another life."""
        self._life = life
        self.pages = ()
        self.outdated = True

    def sequence(self, token_ids: Tokens[int]) -> TokenSequence:
        """These tokens of it, for an order."""
        return TokenSequence(tuple(token_ids), self.request_params.shared_params, self.extras, self.pages)
