"""`kvparams proxy --check`: is every engine what its entry says, and does KV get from prefill to decode?

Each engine is asked what it serves, each bootstrap server who its engine is; then one small request goes through each
pair of engines, by the same plan as a client's, and decode is asked where it had the prompt from. The one rule: nothing
is guessed: an engine that does not tell is said to be one that does not tell.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Final, Literal, NamedTuple, cast
from uuid import uuid4

from kvparams.codec import kv_transfer_members
from kvparams.dialects.interface import BootstrapInfo, Dialect, HandoffMissing
from kvparams.dialects.registry import load_tables_and_errors
from kvparams.errors import KVParamsError
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.jsontext.document import find_members
from kvparams.jsontext.editing import edit
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, KVLease, Leg, LegFailed, LegPair, LegResult
from kvparams.signing.signer import Signer
from kvparams.versions import NoCommonVersion, negotiate_with_engine
from kvparams_proxy.fleet.bootstrap_servers import BootstrapServer, BootstrapServers
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec
from kvparams_proxy.requests.endpoints import one_token_changes
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    UpstreamError,
    UpstreamLimits,
    UpstreamRequest,
    UpstreamTimeout,
)

__all__ = ["CheckFinding", "check_fleet"]

FindingGrade = Literal["ok", "warning", "error"]

_PROMPT_TOKENS: Final = 520
"""Some blocks and pages of usual sizes, and a part of one."""
_TOKEN_IDS: Final = range(32, 127)
"""Every vocabulary has them."""
_PATH: Final = b"/v1/completions"
_TIMEOUT_S: Final = 60.0
"""For one question. An engine that is compiling something takes its time."""
_TELLS_S: Final = 3.0
"""An engine may count a request a little after it has answered it."""
_LOOK_S: Final = 0.1
_ANSWER_BYTES: Final = 16 << 20
_SAID: Final = 300
"""Characters of an engine's answer that are shown."""
_EXTERNAL: Final = re.compile(r'^\S*prompt_tokens\S*\{[^}]*source="external\w*"[^}]*\} (\S+)', re.MULTILINE)
"""vLLM 0.32.0: `vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`; the reference engine likewise."""


class CheckFinding(NamedTuple):
    """One thing that was found."""

    grade: FindingGrade
    who: str
    message: str


class _EngineInfo(NamedTuple):
    """What an engine says of itself."""

    model: str | None
    max_tokens: int


class _EngineRefused(LegFailed):
    """An engine did not answer a leg well."""

    def __init__(self, instance: Instance, why: str) -> None:
        super().__init__(f"the {instance.role} leg failed on {instance.id}: {why}", another=False)


async def check_fleet(
    entries: Sequence[InstanceSpec],
    dialects: Mapping[str, Dialect],
    limits: UpstreamLimits,
    signer: Signer | None = None,
) -> AsyncGenerator[CheckFinding]:
    """Look at every engine, then at every pair; what is found, as it is found.

    Args:
        entries: the engines, their keys and certificates loaded.
        dialects: by name.
        limits: of their answers and connections.
        signer: signs what they are told of KV.
    """
    async with _opened(entries, limits) as engines:
        known: dict[Instance, _EngineInfo] = {}
        places: dict[Instance, BootstrapInfo] = {}
        bootstraps = BootstrapServers(dialects, limits)
        pins = HandoffVerifier(load_tables_and_errors()[0])
        for instance, pool in engines.items():
            finding, found = await _look(instance, pool)
            yield finding
            if found is None:
                continue
            server = bootstraps.for_instance(instance)
            if server is not None:
                finding, place = await _ask_bootstrap(instance, server)
                yield finding
                if place is None:
                    continue
                places[instance] = place
            known[instance] = found
        for prefill, decode in _pairs(list(engines)):
            if decode is None:
                said = f"no decode engine has the connector {prefill.dialect}: nothing could be handed on"
                yield CheckFinding("error", prefill.id, said)
            elif prefill in known and decode in known:
                trial = _PairTrial(engines, dialects, places, prefill, decode, known, signer, pins)
                yield await trial.run()


@asynccontextmanager
async def _opened(
    entries: Sequence[InstanceSpec], limits: UpstreamLimits
) -> AsyncGenerator[dict[Instance, UpstreamConnectionPool]]:
    pools = {
        entry.make_instance(): UpstreamConnectionPool(
            entry.url,
            limits,
            entry.credentials.tls,
            server_name=entry.credentials.server_name,
            key=entry.credentials.key,
        )
        for entry in entries
    }
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def _pairs(instances: Sequence[Instance]) -> list[tuple[Instance, Instance | None]]:
    """Each engine at least once, with one that speaks the same; None where a prefill engine has nobody."""
    found: list[tuple[Instance, Instance | None]] = []
    for dialect in dict.fromkeys(instance.dialect for instance in instances):
        ours = [instance for instance in instances if instance.dialect == dialect]
        prefill = [instance for instance in ours if instance.role is Role.PREFILL]
        decode = [instance for instance in ours if instance.role is Role.DECODE]
        if not decode:
            found += ((instance, None) for instance in prefill)
        elif prefill:
            numbers = range(max(len(prefill), len(decode)))
            found += ((prefill[number % len(prefill)], decode[number % len(decode)]) for number in numbers)
    return found


async def _look(instance: Instance, pool: UpstreamConnectionPool) -> tuple[CheckFinding, _EngineInfo | None]:
    """Whether it is there, and what it serves."""
    declared = f"{instance.role}, {instance.dialect}"
    try:
        head, raw = await _fetch(pool, pool.get(b"/v1/models"))
    except UpstreamError as error:
        return CheckFinding(
            "error", instance.id, f"({declared}) does not answer at {instance.url}: {error.reason}"
        ), None
    if head.status in (401, 403):
        said = f"({declared}) refuses the proxy's credentials ({head.status}); see key_file and --engine-key-file"
        return CheckFinding("error", instance.id, said), None
    said = _object(raw) if head.status == 200 else {}
    try:
        negotiate_with_engine(said)
    except NoCommonVersion as none:
        return CheckFinding("error", instance.id, f"({declared}) {none}"), None
    models = _models(said)
    if not models:
        said = f"({declared}) answers, and does not say which models it serves (GET /v1/models: {head.status})"
        return CheckFinding("warning", instance.id, said), _EngineInfo(None, 2 * _PROMPT_TOKENS)
    name, longest = next(iter(models.items()))
    return CheckFinding("ok", instance.id, f"({declared}) answers and serves {', '.join(models)}"), _EngineInfo(
        name, longest
    )


def _object(raw: bytes) -> dict[str, object]:
    """Empty where it is none."""
    try:
        document: object = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}


def _models(said: Mapping[str, object]) -> dict[str, int]:
    """Names, and the longest prompt and answer that each takes."""
    data = said.get("data")
    found: dict[str, int] = {}
    for entry in cast("list[object]", data) if isinstance(data, list) else ():
        members = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
        name, longest = members.get("id"), members.get("max_model_len")
        if isinstance(name, str):
            found[name] = longest if isinstance(longest, int) and longest > 0 else 2 * _PROMPT_TOKENS
    return found


async def _ask_bootstrap(instance: Instance, server: BootstrapServer) -> tuple[CheckFinding, BootstrapInfo | None]:
    answer: asyncio.Future[tuple[BootstrapInfo | None, str]] = asyncio.get_running_loop().create_future()
    exchange = server.query(lambda place, why: answer.set_result((place, why)))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            place, why = await answer
    except TimeoutError:
        exchange.discard()
        place, why = None, "its bootstrap server does not answer"
    finally:
        server.close()
    if place is None:
        return CheckFinding("error", instance.id, f"{why}; see --bootstrap, or `bootstrap` in its entry"), None
    return CheckFinding("ok", instance.id, "its bootstrap server says who it is"), place


class _PairTrial:
    """One small request through one pair. The context of its plan, too: see `kvparams.routing.plan.Context`."""

    def __init__(
        self,
        engines: Mapping[Instance, UpstreamConnectionPool],
        dialects: Mapping[str, Dialect],
        places: Mapping[Instance, BootstrapInfo],
        prefill: Instance,
        decode: Instance,
        known: Mapping[Instance, _EngineInfo],
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
        size = min(_PROMPT_TOKENS, *(known[one].max_tokens // 2 for one in (prefill, decode)))
        self._prompt = Random(uuid4().int).choices(_TOKEN_IDS, k=max(1, size))
        self._model = known[prefill].model
        body: dict[str, object] = {"prompt": self._prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        self._body = json.dumps(body if self._model is None else {"model": self._model, **body}).encode()
        self._id = uuid4().hex
        self._said: object = None
        """What decode has answered."""

    def dialect(self, instance: Instance) -> Dialect:
        """See `Context`."""
        return self._dialects[instance.dialect]

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        """See `Context`."""
        return self._places.get(instance)

    def one_token_changes(self) -> Mapping[str, bytes | None]:
        """See `Context`."""
        return one_token_changes("completions", self._body, find_members(self._body))

    def verify_handoff(self, instance: Instance, said: Mapping[str, object]) -> None:
        """See `Context`."""
        self._pins.verify(instance, said, self._engines[instance].peer_addresses)

    def peer_source(self, instance: Instance) -> str | None:
        """See `Context`."""
        return None

    def now(self) -> float:
        """See `Context`."""
        return asyncio.get_running_loop().time()

    def has_candidates(self, role: Role) -> bool:
        """See `Context`."""
        return role in self._pair

    def should_fail_over(self, instance: Instance, failed: Sequence[str]) -> bool:
        """See `Context`: it is this pair that is looked at."""
        return False

    def cached_tokens(self, role: Role) -> Mapping[str, int]:
        """See `Context`: the prompt is a new one."""
        return {}

    def may_retry(self) -> bool:
        """See `Context`: what goes wrong is what is looked for."""
        return False

    def next_transfer(self) -> str:
        """See `Context`."""
        return uuid4().hex

    def hold_lease(self, lease: KVLease) -> None:
        """See `Context`: it ends by itself."""

    def release_instance(self, instance: Instance) -> None:
        """See `Context`."""

    async def run(self) -> CheckFinding:
        """Send it; what it shows."""
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
            said = f"{refused.detail}: declare it with `addresses`, or correct what the engine says of itself"
            return CheckFinding("error", self._who, said)
        except HandoffMissing as missing:
            return CheckFinding("error", self._who, str(missing))
        except LegFailed as failure:
            return CheckFinding("error", self._who, str(failure))
        except KVParamsError as error:
            said = f"the prefill engine's answer is not what the protocol asks for: {error}"
            return CheckFinding("error", self._who, said)
        loaded = _loaded(self._said)
        if loaded is None:
            loaded = await self._counted(before)
        if loaded is None:
            return CheckFinding(
                "warning", self._who, f"{decode.id} answers, and does not tell where it had the prompt from"
            )
        if loaded <= 0:
            said = (
                f"{decode.id} computed the whole prompt itself: the KV of {self._pair[Role.PREFILL].id} did not reach "
                f"it; is the connector of both really what {decode.dialect} stands for, with settings that agree?"
            )
            return CheckFinding("error", self._who, said)
        return CheckFinding(
            "ok", self._who, f"{loaded} of {len(self._prompt)} prompt tokens came from outside the engine"
        )

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
            head, raw = await _fetch(pool, request, once=leg.answers_client)
        except UpstreamError as error:
            raise _EngineRefused(instance, error.reason) from error
        if head.status != 200:
            raise _EngineRefused(instance, f"{head.status} {raw[:_SAID].decode('utf-8', 'replace')}")
        try:
            document: object = json.loads(raw)
        except (ValueError, RecursionError):
            raise _EngineRefused(instance, "its answer is not JSON") from None
        params = cast("dict[str, object]", document).get("kv_transfer_params") if isinstance(document, dict) else None
        said = kv_transfer_members(params)
        if leg.answers_client:
            self._said = said
        return LegResult(said)

    async def _external(self) -> float | None:
        """Prompt tokens that decode has had from outside so far; None where it does not count them."""
        pool = self._engines[self._pair[Role.DECODE]]
        try:
            head, raw = await _fetch(pool, pool.get(b"/metrics"))
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
    """What decode's own document says that it has loaded."""
    for name in ("kvparams", "usage", "loaded_tokens"):
        said = cast("dict[str, object]", said).get(name) if isinstance(said, dict) else None
    return said if isinstance(said, int) else None


async def _fetch(
    pool: UpstreamConnectionPool, request: UpstreamRequest, *, once: bool = False
) -> tuple[ResponseHead, bytes]:
    """Its answer, whole.

    Raises:
        UpstreamError: there was none, or not in time.
    """
    answer: asyncio.Future[tuple[ResponseHead, bytes, UpstreamError | None]] = (
        asyncio.get_running_loop().create_future()
    )

    def ended(head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        if not answer.done():  # or nobody waits for it any more
            answer.set_result((head, raw, error))

    exchange = pool.exchange(request, ResponseCollector(_ANSWER_BYTES, ended), once=once)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, raw, error = await answer
    except TimeoutError:
        exchange.discard()
        raise UpstreamTimeout(f"no answer in {_TIMEOUT_S:g} s") from None
    except asyncio.CancelledError:
        exchange.discard()
        raise
    if error is not None:
        raise error
    return head, raw
