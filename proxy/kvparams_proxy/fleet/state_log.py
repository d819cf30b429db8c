"""Logs what becomes of engines: one line for each change of state, with its evidence, whoever noticed it.

`EngineStateLog` observes members: `FleetMembers` calls it after everything that may have changed one, and only it
decides whether there is something to say. Changes for the worse are WARNINGs, all others INFO. An engine that changes
all the time does not fill the log: after `_LINES` lines in `_WINDOW_S` seconds its changes are counted, and the next
line says how many there were. Lines name instances by their ids. Evidence is in the proxy's own words: no addresses, no
keys, nothing that clients have said.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from kvparams.instances import Instance
from kvparams_proxy.fleet.member import Member, MemberState

__all__ = ["ChangeCause", "EngineStateLog", "Evidence", "StateCause", "StateLog"]

_log: Final = logging.getLogger(__name__)
_WINDOW_S: Final = 60.0
_LINES: Final = 10
"""For one subject in one window."""
_SUBJECTS: Final = 4096
"""Subjects that are remembered."""
_WORDS: Final = {
    MemberState.READY: "is ready",
    MemberState.BROKEN: "is broken",
    MemberState.NOT_READY: "is not ready",
    MemberState.DRAINING: "is draining",
    MemberState.LEFT: "is leaving",
}
_IDLE: Final = {MemberState.DRAINING: "is drained", MemberState.LEFT: "has left"}
"""In place of these words, when no leg runs any more."""
_BAD: Final = frozenset((MemberState.BROKEN, MemberState.NOT_READY))


class Evidence(StrEnum):
    """Says how a change of an engine was noticed."""

    PROBE = "probe"
    LEG = "failed leg"
    """A leg got no connection."""
    BREAKER = "breaker"
    """So many legs failed, or worked again, that the breaker opened or closed."""
    OTHER_PROXY = "other proxy"
    OPERATOR = "operator"
    """The flags, the fleet file, discovery or the admin API."""
    LAST_LEG = "last leg"
    """The last leg of an engine that is draining or leaving has ended."""


_OF_PRESENCE: Final = frozenset((Evidence.PROBE, Evidence.LEG))


class ChangeCause(NamedTuple):
    """The evidence for a change, and a description of it in the proxy's own words."""

    evidence: Evidence
    why: str = ""


class StateCause(NamedTuple):
    """The reason for the present state of an engine."""

    why: str
    since_s: float
    """When it came into this state, on the clock of the log."""


class _SubjectState:
    """The last logged state of one subject."""

    __slots__ = ("changes", "line", "lines", "state", "until")

    def __init__(self) -> None:
        self.state: object = None
        """The state that was told last."""
        self.line: tuple[int, str, Mapping[str, object]] | None = None
        """The level, the words and the facts of the latest change, where it was not logged yet."""
        self.changes = 0
        """Changes since the last line."""
        self.lines = 0
        """Lines in the window."""
        self.until = 0.0
        """The end of the window."""


class StateLog:
    """Logs changes of state of anything that has a name."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a clock, in seconds."""
        self._now = now
        self._subjects: dict[Hashable, _SubjectState] = {}

    def log_change(
        self, subject: Hashable, state: object, words: str, *, good: bool, facts: Mapping[str, object] | None = None
    ) -> None:
        """Logs a change of state. Does nothing where the state is the one that was told before.

        Args:
            subject: whose state it is.
            state: what is compared.
            words: the line: who, what, and the evidence.
            good: whether that is INFO or a WARNING.
            facts: members of the line where the log is JSON.
        """
        known = self._subjects.get(subject)
        if known is None:
            if len(self._subjects) >= _SUBJECTS:
                del self._subjects[next(iter(self._subjects))]
            known = self._subjects[subject] = _SubjectState()
        if state != known.state:
            known.state = state
            known.line = logging.INFO if good else logging.WARNING, words, facts or {}
            known.changes += 1
        if known.line is None:
            return
        now = self._now()
        if now >= known.until:
            known.until, known.lines = now + _WINDOW_S, 0
        if known.lines >= _LINES:
            return
        level, words, facts = known.line
        more = f" ({known.changes - 1} more changes since the last line)" if known.changes > 1 else ""
        known.line, known.changes = None, 0
        known.lines += 1
        _log.log(level, "%s%s", words, more, extra={"facts": facts})

    def last_state(self, subject: Hashable) -> object:
        """Returns the state that was told last, or None."""
        known = self._subjects.get(subject)
        return None if known is None else known.state

    def forget(self, subject: Hashable) -> None:
        """Forgets a subject that is no more."""
        self._subjects.pop(subject, None)


class EngineStateLog:
    """Logs changes of the members of one fleet. It looks at a member's state itself: callers only bring evidence."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a clock, in seconds."""
        self._log = StateLog(now)
        self._now = now
        self._causes: dict[Member, StateCause] = {}

    def cause_of(self, member: Member) -> StateCause | None:
        """Returns the reason for the present state of a member; None if it was never observed."""
        return self._causes.get(member)

    def joined(self, member: Member, cause: ChangeCause) -> None:
        """Logs a member that has joined the fleet and was not probed yet."""
        facts = _facts("engine_joined", member, cause)
        self._log.log_change(member, "joined", _line(member, "has joined", cause.why), good=True, facts=facts)

    def observe(self, member: Member, cause: ChangeCause, *, answers: bool = False) -> None:
        """Logs the state of a member if it has changed.

        A member that answers and is given no work is in another state where the reason is another. So is one that
        runs as another incarnation, and one that is draining or leaving, when its last leg has ended.

        Args:
            member: the member.
            cause: the evidence of whoever noticed.
            answers: whether the member answers, where it is not ready; why one does not is no state of its own.
        """
        state, words = member.state, _WORDS[member.state]
        about: object = member.instance.incarnation
        if state is MemberState.NOT_READY:
            told = self._log.last_state(member)
            if cause.evidence not in _OF_PRESENCE and isinstance(told, tuple) and state in told:
                return  # what legs, breakers and operators do meanwhile does not change that it is not there
            about, words = (cause.why, "gets no requests") if answers else ("", words)
        elif state in _IDLE and not member.own_in_flight:
            words = _IDLE[state]
            about = about if state is MemberState.DRAINING else "", words
        elif state is MemberState.LEFT:
            about = ""
        if (state, about) != self._log.last_state(member):
            self._causes[member] = StateCause(cause.why, self._now())
        good = state not in _BAD
        line = _line(member, words if good else f"{words} ({cause.evidence})", cause.why)
        facts = _facts("engine_state", member, cause)
        self._log.log_change(member, (state, about), line, good=good, facts=facts)
        if state is MemberState.LEFT and not member.own_in_flight:
            self._log.forget(member)
            self._causes.pop(member, None)

    def log_pair(self, prefill: Instance, decode: Instance, apart_s: float | None, why: str = "") -> None:
        """Logs that a prefill and a decode instance are set apart for so long, or (None) work together again."""
        who = f"{decode.role} {decode.id} with the KV of {prefill.role} {prefill.id}"
        if apart_s is None:
            words = f"{who} works again"
        else:
            words = f"{who} fails ({why}); the two are not paired for {apart_s:.1f} s if there are others"
        facts = {
            "event": "pair_state",
            "prefill": prefill.id,
            "decode": decode.id,
            "state": "apart" if apart_s is not None else "together",
            "reason": why,
        }
        self._log.log_change((prefill.id, decode.id), apart_s is None, words, good=apart_s is None, facts=facts)


def _line(member: Member, words: str, why: str) -> str:
    return f"{member.instance.role} {member.instance.id} {words}{': ' if why else ''}{why}"


def _facts(event: str, member: Member, cause: ChangeCause) -> dict[str, object]:
    instance = member.instance
    return {
        "event": event,
        "engine": instance.id,
        "role": instance.role,
        "state": member.state,
        "incarnation": instance.incarnation,
        "evidence": cause.evidence,
        "reason": cause.why,
    }
