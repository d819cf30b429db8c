"""Runs a plan without any I/O: it chooses in order, and hands each leg to a script."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvparams.dialects.interface import BootstrapInfo, Dialect
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.routing.pairing import may_pair
from kvparams.routing.plan import AcquireInstance, KVLease, Leg, LegFailed, LegPair, LegResult, Plan

__all__ = ["Table", "echoed", "fleet_of"]


def fleet_of(prefill: int = 1, decode: int = 1, aggregated: int = 0, encode: int = 0) -> list[Instance]:
    """So many of each."""
    numbers = {Role.PREFILL: prefill, Role.DECODE: decode, Role.AGGREGATED: aggregated, Role.ENCODE: encode}
    return [
        Instance(f"{role}-{index}", "boot", role, "http://h:1", "x") for role in Role for index in range(numbers[role])
    ]


def echoed(answer: Mapping[str, object], asked: str | bytes | None) -> dict[str, object]:
    """The answer, its document with the ids and the mode of the one that was asked: as every engine answers.

    Args:
        answer: a `kv_transfer_params`; one without a document stays as it is.
        asked: the text of the `kv_transfer_params` of the leg.
    """
    theirs = answer.get("kvparams")
    ours: Any = json.loads(asked or b"{}").get("kvparams")
    if not isinstance(theirs, dict) or ours is None:
        return dict(answer)
    return {**answer, "kvparams": {**theirs, **{name: ours[name] for name in ("request_id", "transfer", "mode")}}}


class Table:
    """A `kvparams.routing.plan.Context` and an executor in one."""

    def __init__(
        self,
        dialect: Dialect,
        fleet: list[Instance] | None = None,
        retries: int = 0,
        *,
        one_token: dict[str, bytes | None] | None = None,
    ) -> None:
        self.fleet = fleet or fleet_of()
        self.speech = dialect
        self.retries = retries
        self.cut = one_token or {"max_tokens": b"1"}
        self.clock_s = 100.0
        self.ends_at_s: float | None = None
        self.waits_s = 0.0
        """How long every choice of a decode instance takes."""
        self.cached: dict[str, int] = {}
        self.full: set[str] = set()
        """Who has no room for now."""
        self.chosen: list[str] = []
        self.given_back: list[str] = []
        self.leases: list[KVLease] = []
        self.transfers = 0
        self.legs: list[Leg] = []
        self.found: BootstrapInfo | None = None
        """What the bootstrap server of every prefill engine says."""
        self.pinned: list[tuple[str, Mapping[str, object]]] = []
        self.pins: HandoffVerifier | None = None
        self.sources: dict[str, str] = {}
        """Where prefill instances should read what others have."""
        self.encodings: list[str | None] = []
        """How the encode steps have ended."""
        self.echoes = True
        """Documents of answers are those of the legs that were asked (`echoed`)."""

    def dialect(self, instance: Instance) -> Dialect:
        return self.speech

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        return self.found

    def verify_handoff(self, instance: Instance, said: Mapping[str, object]) -> None:
        self.pinned.append((instance.id, said))
        if self.pins is not None:
            self.pins.verify(instance, said)

    def peer_source(self, instance: Instance) -> str | None:
        return self.sources.get(instance.id)

    def one_token_changes(self) -> dict[str, bytes | None]:
        return self.cut

    def time_left(self) -> float | None:
        return None if self.ends_at_s is None else self.ends_at_s - self.clock_s

    def can_split(self, request: RequestFacts) -> bool:
        return self.speech.can_split(request)

    def encode_changes(self, instance: Instance) -> dict[str, bytes | None]:
        return {**self.cut, "tools": None}

    def record_encoding(self, problem: str | None) -> None:
        self.encodings.append(problem)

    def now(self) -> float:
        return self.clock_s

    def has_candidates(self, role: Role) -> bool:
        return any(each.role is role for each in self.fleet)

    def should_fail_over(self, instance: Instance, failed: Sequence[str]) -> bool:
        fresh = [each for each in self.fleet if each.id not in failed]
        if any(each.role is not instance.role and may_pair(each, instance) for each in fresh):
            return False
        return any(may_pair(one, other) for one in fresh for other in fresh if one.role is not other.role)

    def cached_tokens(self, role: Role) -> dict[str, int]:
        able = {each.id for each in self.fleet if each.role is role}
        return {id: tokens for id, tokens in self.cached.items() if id in able}

    def may_retry(self) -> bool:
        self.retries -= 1
        return self.retries >= 0

    def next_transfer(self) -> str:
        self.transfers += 1
        return f"transfer-{self.transfers}"

    def hold_lease(self, lease: KVLease) -> None:
        self.leases.append(lease)

    def release_instance(self, instance: Instance) -> None:
        self.given_back.append(instance.id)

    def run(self, plan: Plan, answer: Callable[[Leg], LegResult | LegFailed]) -> list[Leg]:
        """Take every step; `answer` says how each leg ends. The legs that were run."""
        step = next(plan)
        try:
            while True:
                if isinstance(step, AcquireInstance):
                    if step.role is Role.DECODE:
                        self.clock_s += self.waits_s
                    could = [each for each in self.fleet if each.role is step.role]
                    fresh = [each for each in could if each.id not in step.avoid and each.id not in self.full]
                    near = [each for each in fresh if each.id in step.prefer]
                    instance = (near or fresh or could)[0]
                    self.chosen.append(instance.id)
                    step = plan.send(instance)
                elif isinstance(step, LegPair):
                    ended = self._leg(step.prefill, answer)
                    if not isinstance(ended, LegFailed):
                        self.hold_lease(step.kv)
                        ended = self._leg(step.decode, answer)
                    step = plan.throw(ended) if isinstance(ended, LegFailed) else plan.send(ended)
                else:
                    ended = self._leg(step, answer)
                    step = plan.throw(ended) if isinstance(ended, LegFailed) else plan.send(ended)
        except StopIteration:
            return self.legs

    def _leg(self, leg: Leg, answer: Callable[[Leg], LegResult | LegFailed]) -> LegResult | LegFailed:
        self.legs.append(leg)
        ended = answer(leg)
        if isinstance(ended, LegFailed):
            ended.instance = leg.instance
        elif self.echoes:
            params = echoed(ended.kv_transfer_params, leg.changes.get("kv_transfer_params"))
            ended = LegResult(params, ended.ec_transfer_params)
        return ended
