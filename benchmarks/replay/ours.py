"""The policies of `kvparams`, as they are, with what the proxy would tell them."""

from collections.abc import Callable, Sequence

from benchmarks.replay.beliefs import Belief, ByEvents
from benchmarks.replay.model import Leg
from benchmarks.replay.trace import BLOCK
from benchmarks.replay.world import World
from kvparams.cost_model import FleetCostPrior
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, RequestFacts, Role, SchedulingPolicy
from kvparams.routing.ttft_estimate import estimate_ttft

__all__ = ["Ours"]


class _Seat:
    """A `_Seat` is an instance: a `kvparams.instances.Candidate`."""

    __slots__ = ("backlog", "belief", "in_flight", "index", "instance", "tokens")

    def __init__(self, index: int, role: Role, belief: Belief, pace: EngineBacklog) -> None:
        self.index = index
        self.instance = Instance(f"{role}-{index}", "1", role, "http://replay", "content")
        self.in_flight = 0
        self.tokens = 0
        self.backlog = pace
        self.belief = belief


class Ours:
    """A policy for prefill and one for decode, and the books that a fleet keeps for them."""

    def __init__(
        self, world: World, policy: Callable[[], SchedulingPolicy], belief: Callable[[], Belief] = ByEvents
    ) -> None:
        """`belief` makes what is believed of one worker's cache."""
        self._now = 0.0
        self._prefill = policy()
        self._decode = policy()
        self._turn = 0
        usual = FleetCostPrior()
        paces = [EngineBacklog(lambda: self._now, usual) for _ in range(2 * world.workers)]
        self.seats = [_Seat(i, Role.PREFILL, belief(), paces.pop()) for i in range(world.workers)]
        self._decoders = [_Seat(i, Role.DECODE, belief(), paces.pop()) for i in range(world.workers)]
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
        chosen.backlog.begin(leg.number, expected.compute_s, expected.fetch_s)
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
        )
