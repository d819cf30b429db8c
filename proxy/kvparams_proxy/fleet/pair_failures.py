"""Detects prefill and decode engines that fail together: a decision over outcomes, without I/O.

A decode leg that fails before its first byte may fail because of its engine, because of the KV that it was to fetch, or
because of the two together: a prefill engine that was restarted under the same NIXL engine id, for example, is refused
by every decode engine that remembers its predecessor. The failures are counted against the pair first. The decode
engine is to blame where

- it fails with the KV of several prefill engines, or
- the KV of this one is fetched by other decode engines, or
- its failures explain themselves no other way for some time (`BreakerLimits.open_s` after the pair was set apart),

and never while it fetches the KV of other prefill engines. A pair that fails again and again is set apart: its
instances are chosen together only where nobody else is left, for a time that doubles with each failure after it, as a
breaker's does. Then one leg shows whether they work together again.
"""

from collections.abc import Collection, Iterable
from typing import Final

from kvparams.instances import Instance, Role
from kvparams.routing.breaker import BreakerLimits
from kvparams.routing.pairing import may_pair

__all__ = ["PairFailures"]

_MOST_DECODE: Final = 256
"""Decode engines that are remembered."""
_MOST_PREFILL: Final = 64
"""Prefill engines that are remembered for each of them."""


class _PairRecord:
    """The failures of one pair since it last worked."""

    __slots__ = ("apart_since", "decode_works", "failures", "prefill_works", "trial", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        """When the pair may be tried again; 0 while it is not set apart."""
        self.apart_since = 0.0
        self.trial = False
        """Whether a leg runs that shows whether the pair works again."""
        self.decode_works = False
        """Whether the decode engine has fetched the KV of another prefill engine meanwhile."""
        self.prefill_works = False
        """Whether another decode engine has fetched the KV of this prefill engine meanwhile."""


class PairFailures:
    """The pairs of one fleet that fail. Time is passed in, in seconds. It is false while there are none."""

    __slots__ = ("_limits", "_records")

    def __init__(self, limits: BreakerLimits) -> None:
        """`limits` say after how many failures in a row a pair is set apart, and for how long."""
        self._limits = limits
        self._records: dict[Instance, dict[Instance, _PairRecord]] = {}
        """By decode engine, then by prefill engine."""

    def __bool__(self) -> bool:
        return bool(self._records)

    @property
    def separated_count(self) -> int:
        """Returns the number of pairs that are set apart, those included that may be tried."""
        return sum(record.until > 0 for records in self._records.values() for record in records.values())

    # what legs find out

    def record_failure(self, prefill: Instance, decode: Instance, now: float) -> bool:
        """Counts a decode leg that failed and was to fetch KV; returns whether the decode engine is to blame for it."""
        limits = self._limits
        records, record = self._record(prefill, decode)
        if now >= record.until or record.trial:
            record.trial = False
            record.failures += 1
            if record.failures >= limits.consecutive:
                record.apart_since = record.apart_since if record.until else now
                record.until = now + self._wait_s(record)
        if record.decode_works:
            return False
        unexplained = record.until > 0 and now >= record.apart_since + limits.open_s
        return len(records) > 1 or record.prefill_works or unexplained

    def record_success(self, prefill: Instance, decode: Instance) -> bool:
        """Notes that a decode engine has fetched KV; returns whether this pair was set apart."""
        records = self._records.get(decode)
        record = None if records is None else records.pop(prefill, None)
        if records is not None:
            for other in records.values():
                other.decode_works = True
            if not records:
                del self._records[decode]
        for others in self._records.values():
            if prefill in others:
                others[prefill].prefill_works = True
        return record is not None and record.until > 0

    def forget(self, instance: Instance) -> None:
        """Forgets what is known of one incarnation, of either role."""
        self._records.pop(instance, None)
        for decode in [decode for decode, records in self._records.items() if records.pop(instance, None)]:
            if not self._records[decode]:
                del self._records[decode]

    # what choices ask

    def is_separated(self, prefill: Instance, decode: Instance, now: float) -> bool:
        """Returns whether this pair is set apart now."""
        record = self._records.get(decode, {}).get(prefill)
        return record is not None and now < record.until

    def separated_until(self, prefill: Instance, decode: Instance) -> float:
        """Returns when this pair may be tried again; 0 while it is not set apart."""
        record = self._records.get(decode, {}).get(prefill)
        return 0.0 if record is None else record.until

    def record_choice(self, prefill: Instance, decode: Instance, now: float) -> None:
        """Notes that this pair gets a leg. If that shows whether it works again, others leave it alone meanwhile."""
        record = self._records.get(decode, {}).get(prefill)
        if record is not None and 0 < record.until <= now:
            record.trial = True
            record.until = now + self._wait_s(record)

    def separated_from(self, instance: Instance, now: float) -> list[str]:
        """Returns the ids of instances that are set apart from this one."""
        if instance.role is Role.DECODE:
            return [prefill.id for prefill, record in self._records.get(instance, {}).items() if now < record.until]
        return [decode.id for decode in self._records if self.is_separated(instance, decode, now)]

    def without_partner(self, role: Role, partners: Collection[Instance], now: float) -> set[str]:
        """Returns the ids of instances of a role that are set apart from all of `partners` they may be paired with.

        Args:
            role: prefill or decode.
            partners: instances of the other role.
            now: the time.
        """
        found: set[str] = set()
        for one in self._known(role):
            theirs = [partner for partner in partners if may_pair(one, partner)]
            if theirs and all(self._apart(one, partner, now) for partner in theirs):
                found.add(one.id)
        return found

    # inside

    def _known(self, role: Role) -> Iterable[Instance]:
        if role is Role.DECODE:
            return list(self._records)
        return {prefill for records in self._records.values() for prefill in records}

    def _apart(self, one: Instance, other: Instance, now: float) -> bool:
        return self.is_separated(other, one, now) if one.role is Role.DECODE else self.is_separated(one, other, now)

    def _record(self, prefill: Instance, decode: Instance) -> tuple[dict[Instance, _PairRecord], _PairRecord]:
        records = self._records.get(decode)
        if records is None:
            if len(self._records) >= _MOST_DECODE:
                del self._records[next(iter(self._records))]
            records = self._records[decode] = {}
        record = records.get(prefill)
        if record is None:
            if len(records) >= _MOST_PREFILL:
                del records[next(iter(records))]
            record = records[prefill] = _PairRecord()
        return records, record

    def _wait_s(self, record: _PairRecord) -> float:
        limits = self._limits
        return min(limits.longest_s, limits.open_s * 2.0 ** min(record.failures - limits.consecutive, 62))
