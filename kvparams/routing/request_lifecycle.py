"""The life of one request: its states, the ways between them, and what it holds until it gives it back.

    created -> encode -> queued -> prefill -> result -> queued -> decode -> first_byte -> done

Every state leads to `done`; `queued` is entered only by those who must wait, `encode` only by those whose media an
encode engine takes; a further attempt goes back; where both legs run at once, `prefill` leads to `decode` at once. A
request is not done while it holds anything, and it reaches `done` once.
"""

from collections.abc import Callable
from typing import Final, Literal

from kvparams.instances import Instance
from kvparams.routing.plan import KVLease

__all__ = ["TRANSITIONS", "LifecycleError", "LifecycleState", "RequestLifecycle", "RequestOutcome", "StateSpan"]

LifecycleState = Literal["created", "queued", "encode", "prefill", "result", "decode", "first_byte", "done"]
RequestOutcome = Literal["ok", "refused", "failed", "midway", "gone"]
"""How a request ended: well; with a 4xx; with a 5xx; with an error in its stream; without its client."""

TRANSITIONS: Final[dict[LifecycleState, frozenset[LifecycleState]]] = {
    "created": frozenset(("queued", "encode", "prefill", "decode", "done")),
    "queued": frozenset(("queued", "encode", "prefill", "decode", "done")),
    "encode": frozenset(("queued", "encode", "prefill", "decode", "done")),
    "prefill": frozenset(("prefill", "result", "decode", "queued", "done")),
    "result": frozenset(("queued", "prefill", "decode", "done")),
    "decode": frozenset(("first_byte", "queued", "prefill", "decode", "done")),
    "first_byte": frozenset(("queued", "prefill", "decode", "done")),
    "done": frozenset(),
}
"""From each state, where to: `first_byte` goes back only where a stream is continued on another engine."""

_ENTRIES: Final = {state: ways - {"done"} for state, ways in TRANSITIONS.items()}
"""The same without `done`, which has a way in of its own."""
_EXITS: Final[dict[RequestOutcome, bool | None]] = {
    "ok": True,
    "midway": True,
    "refused": False,
    "failed": False,
    "gone": None,
}
"""Whether the client must have its first byte for this outcome, must not, or either."""


class LifecycleError(AssertionError):
    """The executor is wrong: a way that does not exist, or something held at the end."""


StateSpan = tuple[LifecycleState, str, float]
"""One visit to one state: which, the instance where there is one, and when it began. It ends where the next begins."""


class RequestLifecycle:
    """A `RequestLifecycle` is the state machine of one request; times are seconds on the executor's clock."""

    __slots__ = ("_now", "answering", "lease", "loads", "outcome", "since_s", "spans", "state")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.since_s = now()
        """When it came to where it is."""
        self.state: LifecycleState = "created"
        self.answering = False
        """Whether the client has a part of its answer."""
        self.outcome: RequestOutcome | None = None
        self.spans: list[StateSpan] = [("created", "", self.since_s)]
        self.loads: list[Instance] = []
        """Instances whose load it counts for."""
        self.lease: KVLease | None = None
        """KV that somebody holds for it and nobody has fetched."""

    @property
    def started_s(self) -> float:
        """Returns the time at which the request began."""
        return self.spans[0][2]

    def enter(self, state: LifecycleState, who: str = "") -> None:
        """Go there. `done` has its own way in, `finish`.

        Raises:
            LifecycleError: no way leads there from here.
        """
        if state not in _ENTRIES[self.state]:
            raise LifecycleError(f"no way leads from {self.state} to {state}")
        self.state = state
        now = self.since_s = self._now()
        self.spans.append((state, who, now))
        if state == "first_byte":
            self.answering = True
            self.lease = None  # whoever answers has fetched it

    def finish(self, outcome: RequestOutcome) -> None:
        """It is over.

        Raises:
            LifecycleError: it was over before, something is still held, or it cannot have ended like this.
        """
        if "done" not in TRANSITIONS[self.state]:
            raise LifecycleError("a request ends once")
        if self.loads or self.lease is not None:
            raise LifecycleError(f"it ends and holds {len(self.loads)} loads, lease: {self.lease is not None}")
        begun = _EXITS[outcome]
        if begun is not None and begun is not self.answering:
            raise LifecycleError(f"{outcome} is no way to end {'with' if self.answering else 'without'} a first byte")
        self.outcome = outcome
        self.state = "done"
        now = self.since_s = self._now()
        self.spans.append(("done", "", now))
