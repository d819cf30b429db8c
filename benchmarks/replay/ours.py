"""The policies of `kvparams`, as they are, with what the proxy would tell them."""

from collections.abc import Callable, Sequence

from benchmarks.replay.beliefs import Belief, ByEvents
from benchmarks.replay.model import Leg
from benchmarks.replay.trace import BLOCK
from benchmarks.replay.world import World
from kvparams.cost_model import FleetCostPrior
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, RequestFacts, Role, SchedulingPolicy
from kvparams.routing.adapter_slots import AdapterSlots
from kvparams.routing.ttft_estimate import estimate_ttft

__all__ = ["Ours"]


class _Seat:
    """A `_Seat` is an instance: a `kvparams.instances.Candidate`."""

    __slots__ = ("adapters", "backlog", "belief", "in_flight", "index", "instance", "tokens")

    def __init__(self, index: int, role: Role, belief: Belief, pace: EngineBacklog, slots: int) -> None:
        self.index = index
        self.instance = Instance(f"{role}-{index}", "1", role, "http://replay", "content")
        self.in_flight = 0
        self.tokens = 0
        self.adapters = AdapterSlots(slots)
        self.backlog = pace
        self.belief = belief


class Ours:
    """A policy for prefill and one for decode, and the books that a fleet keeps for them."""

    def __init__(
        self,
        world: World,
        policy: Callable[[], SchedulingPolicy],
        belief: Callable[[], Belief] = ByEvents,
        *,
        by_adapter: bool = True,
    ) -> None:
        """Makes the books of a fleet.

        Args:
            world: the fleet.
            policy: makes a policy for a role.
            belief: makes what is believed of one worker's cache.
            by_adapter: whether the policy is told where LoRA adapters are loaded.
        """
        self._by_adapter = by_adapter
        self._now = 0.0
        self._prefill = policy()
        self._decode = policy()
        self._turn = 0
        usual = FleetCostPrior()
        paces = [EngineBacklog(lambda: self._now, usual) for _ in range(2 * world.workers)]
        numbers, slots = range(world.workers), world.adapter_slots
        self.seats = [_Seat(i, Role.PREFILL, belief(), paces.pop(), slots) for i in numbers]
        self._decoders = [_Seat(i, Role.DECODE, belief(), paces.pop(), slots) for i in numbers]
        self._aware = world.store is not None
        self.predicted = 0
        """Blocks that were believed to be cached where legs went."""
        self.reported = 0
        """Blocks that were."""
        self._predicted: dict[int, int] = {}

    def place(self, leg: Leg, now: float) -> int:
        """Chooses the prefill worker as the policy says, and records the leg wherever it counts."""
        self._now = now
        facts = self._facts(leg)
        chosen = self._prefill.choose(self.seats, facts, self._turn)
        self._turn += 1
        expected = estimate_ttft(chosen, facts)
        leg.fetch = expected.fetched_tokens > 0
        chosen.in_flight += 1
        chosen.tokens += leg.request.tokens
        chosen.backlog.begin(leg.number, expected.compute_s, expected.fetch_s, expected.load_s)
        if leg.request.adapter:
            chosen.adapters.begin(str(leg.request.adapter))
        chosen.belief.routed(leg)
        self._predicted[leg.number] = expected.cached_tokens // BLOCK
        return chosen.index

    def done(self, leg: Leg, now: float) -> None:
        """Counted back, and learnt from."""
        self._now = now
        seat = self.seats[leg.worker]
        tokens = leg.request.tokens
        seat.in_flight -= 1
        seat.tokens -= tokens
        fetched = (leg.held - leg.cached) * BLOCK
        seat.backlog.end(leg.number, max(1, tokens - leg.held * BLOCK), tokens, fetched)
        seat.belief.done(leg)
        seat.adapters.end(str(leg.request.adapter))
        predicted = self._predicted.pop(leg.number)
        self.predicted += predicted
        self.reported += min(predicted, leg.cached)

    def event(self, worker: int, came: Sequence[int], went: Sequence[int]) -> None:
        """Believed."""
        self.seats[worker].belief.event(came, went)

    def decode(self, leg: Leg, running: Sequence[int]) -> int:
        """Chooses the decode worker as the policy says."""
        for seat, legs in zip(self._decoders, running, strict=True):
            seat.in_flight = legs
        return self._decode.choose(self._decoders, self._facts(leg), leg.number).index

    def _facts(self, leg: Leg) -> RequestFacts:
        request = leg.request
        name = str(leg.number)
        most = request.tokens
        cached = {seat.instance: min(most, seat.belief.match(request.blocks) * BLOCK) for seat in self.seats}
        loads: dict[Instance, float] = {}
        if request.adapter and self._by_adapter:
            absent = [seat for seat in self.seats if str(request.adapter) not in seat.adapters]
            loads = {seat.instance: seat.backlog.cost_model.adapter_load_s for seat in absent}
        return RequestFacts(
            name,
            name,
            None,
            1,
            1,
            None,
            None,
            prompt_tokens=request.tokens,
            session=str(request.session),
            cached_tokens=cached,
            stored_tokens=min(most, leg.stored * BLOCK),
            adapter_load_s=loads,
        )
