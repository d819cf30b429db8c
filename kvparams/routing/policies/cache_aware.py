"""Chooses the prefill engine that minimizes expected time to first token, including the delay of queued requests.

For each candidate by itself: the seconds of work that wait there, then the seconds that this prompt takes there, less
for what its cache holds or what is fetched sooner than computed, at the speed that was learnt of it (`estimate_ttft`).
There is no threshold between cache and load, because both are seconds, and no switch for all: each is judged on its
own.

What computing this prompt takes is also what others wait for it. How many those are is what a candidate in the middle
has in flight (Little's law: as many arrive during a stay as stay). So a second of computing costs one second and that
many more: the busier everybody is, the more a cached prefix is worth. The middle one, because a heap on few, where a
prefix is hot, says nothing of the others. Whoever has been idle for longer than that computing takes would have made
nobody wait meanwhile: there it counts for less, the longer it was idle; so with many on a hot prefix nobody is left out
for good. And nobody is made to wait for others' sake more than twice as long as it
would have to: so a hot prefix spreads.

Loading a LoRA adapter that the request asks for costs what computing costs: an engine loads between its steps, and all
wait for it. So an adapter stays where it is loaded until waiting there takes longer than loading it elsewhere. Decode
knows no seconds: it goes where the adapter is loaded unless there are twice as many legs as elsewhere.

Costs that are as good as equal are: speeds are learnt, no better than to half a hundredth. Of equals the one with the
fewest legs runs it, then the one whose last leg ended first. So with little to do everyone gets a request before anyone
gets two, and what nobody holds yet goes where it displaces what was used longest ago.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from kvparams.instances import Candidate, RequestFacts, Role
from kvparams.routing.policies.least_load import LeastLoad
from kvparams.routing.policies.rotation import rotate_candidates
from kvparams.routing.ttft_estimate import estimate_ttft

__all__ = ["CacheAware"]

_PATIENCE: Final = 2.0
"""Times the least expected time to first token: whoever would take longer is not asked."""
_EQUAL: Final = 1.005
"""Costs that differ by less than this factor are as good as equal."""
_LEAST_S: Final = 1e-9
"""What stands for the idle time of whoever has something to do."""

C = TypeVar("C", bound=Candidate)


class CacheAware:
    """Prefill by expected time to first token; decode, which has its KV fetched in any case, by load."""

    uses_prefixes: Final = True

    def __init__(self) -> None:
        self._by_load = LeastLoad()

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The candidate that costs the least time, its own and others'."""
        if candidates[0].instance.role is Role.DECODE:
            return self._by_load.choose(_with_adapter(candidates, request), request, turn)
        behind = sorted(each.in_flight for each in candidates)[(len(candidates) - 1) // 2]
        expected = [(estimate_ttft(each, request), each) for each in candidates]
        latest = _PATIENCE * min(each.ttft_s for each, _ in expected)
        costs = [
            (each.ttft_s + min(behind, each.busy_s / (one.backlog.idle_s or _LEAST_S)) * each.busy_s, one)
            for each, one in expected
            if each.ttft_s <= latest
        ]
        enough = _EQUAL * min(cost for cost, _ in costs)
        equals = [one for cost, one in costs if cost <= enough]
        return min(rotate_candidates(equals, turn), key=lambda each: (each.in_flight, each.backlog.ended))


def _with_adapter(candidates: Sequence[C], request: RequestFacts) -> Sequence[C]:
    """Returns the candidates that have the request's adapter and not much more load than others, or else all."""
    if not request.adapter_load_s:
        return candidates
    most = _PATIENCE * min(each.in_flight for each in candidates) + 1
    having = [each for each in candidates if each.instance not in request.adapter_load_s and each.in_flight <= most]
    return having or candidates
