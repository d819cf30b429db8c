"""Checks in the background whether KV gets from prefill to decode, before a client finds out that it does not.

Each engine takes part in one small request soon after it is ready, as it does with `kvparams proxy --check`; again if
it runs as another incarnation; and again after a while if the request failed. There is one request at a time, and the
requests of clients are not involved. What is found goes into the log.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, NoReturn

from kvparams.dialects.interface import Dialect
from kvparams.instances import Instance, Role
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.routing.pairing import may_pair, pair_key
from kvparams.signing.signer import Signer
from kvparams_proxy.checks.engine_check import CheckFinding, EngineInfo, ask_engine
from kvparams_proxy.checks.pair_check import PairTrial
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.health import SPLIT_ROLES
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.state_log import StateLog
from kvparams_proxy.fleet.upstream_pools import UpstreamPools

__all__ = ["StartupCheck"]

_log: Final = logging.getLogger(__name__)
_LOOK_S: Final = 1.0
"""The time between two looks at the fleet, and so between two requests."""
_AGAIN_S: Final = 60.0
"""The time until a check that has failed is repeated."""


class _Checked(NamedTuple):
    """The last check of a member."""

    incarnation: str
    again_at: float | None
    """When it is repeated; None: it need not be."""


class StartupCheck:
    """Checks the engines of one fleet, one pair at a time."""

    def __init__(
        self,
        fleet: Fleet,
        pools: UpstreamPools,
        dialects: Mapping[str, Dialect],
        pins: HandoffVerifier,
        signer: Signer | None,
        now: Callable[[], float],
        local_id: str | None = None,
    ) -> None:
        """Creates a check that has not begun.

        Args:
            fleet: the engines.
            pools: the connections to them.
            dialects: by name.
            pins: verifies what prefill engines answer.
            signer: signs what engines are told of KV.
            now: the clock, in seconds.
            local_id: the engine beside this sidecar, which alone is checked: with many sidecars each engine would
                otherwise get many requests.
        """
        self._fleet = fleet
        self._pools = pools
        self._dialects = dialects
        self._pins = pins
        self._signer = signer
        self._now = now
        self._local_id = local_id
        self._checked: dict[Member, _Checked] = {}
        self._log = StateLog(now)

    async def run(self) -> NoReturn:
        """Checks engines as they become ready, until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            pair = self._next_pair()
            if pair is None:
                continue
            try:
                await self._check(*pair)
            except Exception:  # noqa: BLE001  it concerns no request, and the next check may work
                _log.exception("a check of engines ended with a fault")
                for member in pair:
                    self._checked[member] = _Checked(member.instance.incarnation, self._now() + _AGAIN_S)

    def _next_pair(self) -> tuple[Member, Member] | None:
        """Returns a prefill and a decode member of which one has to be checked, or None if there are none now."""
        members = set(self._fleet.members)
        self._checked = {member: last for member, last in self._checked.items() if member in members}
        if not self._fleet.needed >= SPLIT_ROLES:
            return None
        ready = [member for member in self._fleet.members if member.available and not self._is_shared(member)]
        due = [member for member in ready if self._is_due(member)]
        for member in due:
            role = Role.DECODE if member.instance.role is Role.PREFILL else Role.PREFILL
            if member.instance.role not in SPLIT_ROLES or not self._has_partner(member, role):
                continue
            partners = [one for one in ready if one.instance.role is role and may_pair(one.instance, member.instance)]
            partner = next((one for one in partners if one in due), next(iter(partners), None))
            if partner is not None:
                return (member, partner) if role is Role.DECODE else (partner, member)
        return None

    def _is_due(self, member: Member) -> bool:
        if self._local_id not in (None, member.instance.id):
            return False
        last = self._checked.get(member)
        if last is None or last.incarnation != member.instance.incarnation:
            return True
        return last.again_at is not None and self._now() >= last.again_at

    def _is_shared(self, member: Member) -> bool:
        pool = self._pools.get(member.instance.id)
        return pool is None or pool.shared

    def _has_partner(self, member: Member, role: Role) -> bool:
        """Returns whether any engine of this role may be paired with a member, ready or not. Logs if there is none."""
        instance = member.instance
        others = [one.instance for one in self._fleet.members if one.instance.role is role]
        if not others or any(may_pair(instance, one) for one in others):
            return True
        words = (
            f"{instance.role} {instance.id} has no {role} engine to work with: there is none "
            f"{pair_key(instance).describe()}"
        )
        facts = {"event": "engine_check", "engine": instance.id, "role": instance.role, "state": "unpaired"}
        self._log.log_change((instance.role, instance.id), "unpaired", words, good=False, facts=facts)
        return False

    async def _check(self, prefill: Member, decode: Member) -> None:
        """Sends one request through a pair, and logs what it shows."""
        pair = (prefill, decode)
        began = [(member, member.instance.incarnation) for member in pair]
        finding = await self._try_pair(prefill.instance, decode.instance, pair)
        failed = finding is None or finding.grade == "error"
        again_at = self._now() + _AGAIN_S if failed else None
        for member, incarnation in began:
            self._checked[member] = _Checked(incarnation, again_at)
        if finding is None or not all(member.available for member in pair):
            return  # probes say what is wrong with an engine that is not there
        said = finding.summary or finding.message
        who = f"prefill {prefill.instance.id} and decode {decode.instance.id}"
        words = f"{who} do not work together: {said}" if failed else f"{who} work together: {said}"
        facts = {
            "event": "pair_check",
            "prefill": prefill.instance.id,
            "decode": decode.instance.id,
            "state": finding.grade,
            "reason": said,
        }
        subject = (prefill.instance.id, decode.instance.id)
        self._log.log_change(subject, (finding.grade, said if failed else ""), words, good=not failed, facts=facts)

    async def _try_pair(self, prefill: Instance, decode: Instance, members: Iterable[Member]) -> CheckFinding | None:
        """Returns the finding, or None if one of the engines does not tell what it serves."""
        engines = {one: self._pools[one.id] for one in (prefill, decode)}
        known: dict[Instance, EngineInfo] = {}
        for instance, pool in engines.items():
            _, info = await ask_engine(instance, pool)
            if info is None:
                return None
            known[instance] = info
        places = {member.instance: place for member in members if (place := member.bootstrap_info) is not None}
        trial = PairTrial(engines, self._dialects, places, prefill, decode, known, self._signer, self._pins)
        return await trial.run()
