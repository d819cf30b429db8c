"""Sends one small request through a pair of engines, by the same plan as a client's: the second half of `--check`."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, cast
from uuid import uuid4

from kvparams.codec import kv_transfer_members
from kvparams.dialects.interface import BootstrapInfo, Dialect, HandoffMissing
from kvparams.errors import KVParamsError
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.jsontext.document import find_members
from kvparams.jsontext.editing import edit
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, KVLease, Leg, LegFailed, LegPair, LegResult
from kvparams.signing.signer import Signer
from kvparams_proxy.checks.engine_check import PROMPT_TOKENS, CheckFinding, EngineInfo, fetch
from kvparams_proxy.requests.one_token_changes import one_token_changes
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.types import UpstreamError

__all__ = ["PairTrial"]

_TOKEN_IDS: Final = range(32, 127)
"""Every vocabulary has them."""
_PATH: Final = b"/v1/completions"
_TELLS_S: Final = 3.0
"""An engine may count a request a little after it has answered it."""
_LOOK_S: Final = 0.1
_SAID: Final = 300
"""Characters of an engine's answer that are shown."""
_SHOW: Final = "`kvparams proxy --check` shows more"
_EXTERNAL: Final = re.compile(r'^\S*prompt_tokens\S*\{[^}]*source="external\w*"[^}]*\} (\S+)', re.MULTILINE)
"""vLLM 0.32.0: `vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`; the reference engine likewise."""


class _EngineRefused(LegFailed):
    """Raised when an engine does not answer a leg well."""

    def __init__(self, instance: Instance, why: str, summary: str) -> None:
        begin = f"the {instance.role} leg failed on {instance.id}"
        super().__init__(f"{begin}: {why}", another=False)
        self.summary: Final = f"{begin}: {summary}"
        """The message without the words of the engine."""


class PairTrial:
    """Sends one small request through one pair of engines. It is also the `Context` of its own plan."""

    def __init__(
        self,
        engines: Mapping[Instance, Upstream],
        dialects: Mapping[str, Dialect],
        places: Mapping[Instance, BootstrapInfo],
        prefill: Instance,
        decode: Instance,
        known: Mapping[Instance, EngineInfo],
        signer: Signer | None,
        pins: HandoffVerifier,
    ) -> None:
        self._signer = signer
        self._pins = pins
        self._engines = engines
        self._dialects = dialects
        self._places = places
        self._pair = {Role.PREFILL: prefill, Role.DECODE: decode}
        self._who = f"{prefill.id} -> {decode.id}"
        size = min(PROMPT_TOKENS, *(known[one].max_tokens // 2 for one in (prefill, decode)))
        self._prompt = Random(uuid4().int).choices(_TOKEN_IDS, k=max(1, size))
        self._model = known[prefill].model
        body: dict[str, object] = {"prompt": self._prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        self._body = json.dumps(body if self._model is None else {"model": self._model, **body}).encode()
        self._id = uuid4().hex
        self._said: object = None
        """What decode has answered."""

    def dialect(self, instance: Instance) -> Dialect:
        """See `ExecutionContext`."""
        return self._dialects[instance.dialect]

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        """See `ExecutionContext`."""
        return self._places.get(instance)

    def one_token_changes(self) -> Mapping[str, bytes | None]:
        """See `ExecutionContext`."""
        return one_token_changes("completions", self._body, find_members(self._body))

    def time_left(self) -> float | None:
        """See `ExecutionContext.time_left`. Legs of a check have time-outs of their own."""
        return None

    def can_split(self, request: RequestFacts) -> bool:
        """See `ExecutionContext.can_split`. The prompt of a check has no media."""
        return True

    def encode_changes(self, instance: Instance) -> Mapping[str, bytes | None]:
        """See `ExecutionContext`. The request of a check has no media."""
        return self.one_token_changes()

    def record_encoding(self, problem: str | None) -> None:
        """See `ExecutionContext`."""

    def verify_handoff(self, instance: Instance, said: Mapping[str, object]) -> None:
        """See `ExecutionContext`."""
        self._pins.verify(instance, said, self._engines[instance].peer_addresses)

    def peer_source(self, instance: Instance) -> str | None:
        """See `ExecutionContext`."""
        return None

    def now(self) -> float:
        """See `ExecutionContext`."""
        return asyncio.get_running_loop().time()

    def has_candidates(self, role: Role) -> bool:
        """See `ExecutionContext`."""
        return role in self._pair

    def should_fail_over(self, instance: Instance, failed: Sequence[str]) -> bool:
        """See `ExecutionContext`: it is this pair that is looked at."""
        return False

    def cached_tokens(self, role: Role) -> Mapping[str, int]:
        """See `ExecutionContext`: the prompt is a new one."""
        return {}

    def may_retry(self) -> bool:
        """See `ExecutionContext`: what goes wrong is what is looked for."""
        return False

    def next_transfer(self) -> str:
        """See `ExecutionContext`."""
        return uuid4().hex

    def hold_lease(self, lease: KVLease) -> None:
        """See `ExecutionContext`: it ends by itself."""

    def release_instance(self, instance: Instance) -> None:
        """See `ExecutionContext`."""

    async def run(self) -> CheckFinding:
        """Sends the request and returns what it shows."""
        decode = self._pair[Role.DECODE]
        before = await self._external()
        facts = RequestFacts(self._id, self._id, self._model, 1, 1, self._prompt, None)
        plan = PrefillThenDecode(self._signer).legs(facts, self)
        try:
            step = next(plan)
            while True:
                if isinstance(step, AcquireInstance):
                    step = plan.send(self._pair[step.role])
                    continue
                try:
                    answer = await (self._both(step) if isinstance(step, LegPair) else self._leg(step))
                except LegFailed as failure:
                    step = plan.throw(failure)
                else:
                    step = plan.send(answer)
        except StopIteration:
            pass
        except HandoffRefused as refused:
            said = f"{refused.detail}; declare it with `addresses`, or correct the engine's own setting"
            return CheckFinding("error", self._who, said, f"{refused}; {_SHOW}")
        except HandoffMissing as missing:
            return CheckFinding("error", self._who, str(missing))
        except LegFailed as failure:
            summary = failure.summary if isinstance(failure, _EngineRefused) else str(failure)
            return CheckFinding("error", self._who, str(failure), f"{summary}; {_SHOW}")
        except KVParamsError as error:
            broken = "the prefill engine's answer breaks the protocol"
            return CheckFinding("error", self._who, f"{broken}: {error}", f"{broken}; {_SHOW}")
        loaded = _loaded(self._said)
        if loaded is None:
            loaded = await self._counted(before)
        if loaded is None:
            return CheckFinding(
                "warning", self._who, f"{decode.id} answers, but does not report whether it loaded the prompt's KV"
            )
        if loaded <= 0:
            said = (
                f"{decode.id} computed the whole prompt itself: it did not get the KV of "
                f"{self._pair[Role.PREFILL].id}. Check that both engines run the connector {decode.dialect} with "
                "equal settings"
            )
            return CheckFinding("error", self._who, said)
        return CheckFinding("ok", self._who, f"{decode.id} loaded {loaded} of {len(self._prompt)} prompt tokens")

    async def _both(self, pair: LegPair) -> LegResult:
        legs = [asyncio.ensure_future(self._leg(leg)) for leg in (pair.prefill, pair.decode)]
        try:
            return (await asyncio.gather(*legs))[1]
        finally:
            for leg in legs:  # where one has failed, the other may wait for it
                leg.cancel()

    async def _leg(self, leg: Leg) -> LegResult:
        instance = leg.instance
        pool = self._engines[instance]
        body = edit(self._body, find_members(self._body), leg.changes)
        try:
            request = pool.request(_PATH, b"x-request-id: %b\r\n" % self._id.encode(), body)
            head, raw = await fetch(pool, request, once=leg.answers_client)
        except UpstreamError as error:
            raise _EngineRefused(instance, error.reason, error.reason) from error
        if head.status != 200:
            said = f"{head.status} {raw[:_SAID].decode('utf-8', 'replace')}"
            raise _EngineRefused(instance, said, f"it was answered {head.status}")
        try:
            document: object = json.loads(raw)
        except (ValueError, RecursionError):
            raise _EngineRefused(instance, "its answer is not JSON", "its answer is not JSON") from None
        params = cast("dict[str, object]", document).get("kv_transfer_params") if isinstance(document, dict) else None
        said = kv_transfer_members(params)
        if leg.answers_client:
            self._said = said
        return LegResult(said)

    async def _external(self) -> float | None:
        """Returns the prompt tokens that decode has had from outside so far; None where it does not count them."""
        pool = self._engines[self._pair[Role.DECODE]]
        try:
            head, raw = await fetch(pool, pool.get(b"/metrics"))
        except UpstreamError:
            return None
        try:
            counts = [float(count) for count in _EXTERNAL.findall(raw.decode("utf-8", "replace"))]
        except ValueError:
            return None
        return sum(counts) if head.status == 200 and counts else None

    async def _counted(self, before: float | None) -> int | None:
        until = self.now() + _TELLS_S
        while True:
            after = await self._external()
            if after is None:
                return None
            if after > (before or 0.0) or self.now() > until:
                return int(after - (before or 0.0))
            await asyncio.sleep(_LOOK_S)


def _loaded(said: object) -> int | None:
    """Returns how many tokens decode's own document says that it has loaded."""
    for name in ("kvparams", "usage", "loaded_tokens"):
        said = cast("dict[str, object]", said).get(name) if isinstance(said, dict) else None
    return said if isinstance(said, int) else None
