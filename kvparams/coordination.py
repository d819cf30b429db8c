"""How prefill and decode work together for one request: a manager yields legs, somebody else runs them.

The one rule: no I/O here. A manager is a generator of legs; it is told how each ended and says what comes next. What a
leg costs (connections, load, time) belongs to the executor that runs it.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Final, NamedTuple, Protocol

from pydantic_core import to_json

from kvparams.codec import DOCUMENT_KEY, Template, dump_json, parse, read_request
from kvparams.dialects import Dialect, NotSplittable
from kvparams.params import PROTOCOL_VERSION, Isolation, KVTransferParams, Mode, Phase
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.tokens import TokenPrefix

__all__ = ["Leg", "LegAnswer", "Legs", "PrefillThenDecode", "RequestManager"]

_PREFILL_LIMITS: Final[Mapping[str, bytes | None]] = {
    "max_tokens": b"1",
    "stream": b"false",
    "stream_options": None,
    "min_tokens": None,
    "n": None,
    "best_of": None,
}
"""What a prefill leg changes in the client's body: one token, one answer, no stream (a streaming answer carries no
`kv_transfer_params`: vLLM 0.32.0 completion/protocol.py)."""

_HANDED_ON: Final = ("producer", "prefix", "load_keys", "lease")
"""What a decode leg is told of prefill's result."""
_REMEMBERED: Final = 4096
"""Templates kept at most: one for each pair of instances that ever met, and each incarnation."""


class Leg(NamedTuple):
    """One request to one engine."""

    instance: Instance
    changes: Mapping[str, bytes | None]
    """To the client's body, as for `kvparams.jsontext.edit`."""
    answers_client: bool
    """Whether its answer goes to the client; otherwise the manager is told it."""


class LegAnswer(NamedTuple):
    """What an engine said at the end of a leg that does not answer the client."""

    kv_transfer_params: Mapping[str, object]
    """That object of the answer; empty where there was none."""


Legs = Generator[Leg, LegAnswer, None]


class RequestManager(Protocol):
    """One way to coordinate. Third parties register theirs in the entry-point group `kvparams.managers`."""

    roles: tuple[Role, ...]
    """The roles its legs need: a request is refused before its first leg where one of them is missing."""

    def legs(
        self,
        request: RequestFacts,
        members: Mapping[str, object],
        choose: Callable[[Role], Instance],
        dialect: Callable[[Instance], Dialect],
    ) -> Legs:
        """The legs of one request.

        Args:
            request: what is known about it.
            members: the names in the client's body; only their presence matters.
            choose: takes an instance of a role, now; its load counts from here on.
            dialect: how an instance is spoken to.

        Raises (from the generator):
            NotSplittable: the connector cannot carry this request.
            HandoffMissing: the prefill answer cannot be handed on.
            InvalidParams: the prefill engine's own document breaks the protocol.
        """
        ...


class PrefillThenDecode:
    """Prefill with one token, then decode with the client's own limits; decode is chosen when prefill is done."""

    roles = (Role.PREFILL, Role.DECODE)

    def __init__(self) -> None:
        self._templates: dict[tuple[Phase, Mode, Instance, Instance | None], Template] = {}

    def legs(
        self,
        request: RequestFacts,
        members: Mapping[str, object],
        choose: Callable[[Role], Instance],
        dialect: Callable[[Instance], Dialect],
    ) -> Legs:
        """See `RequestManager.legs`."""
        prefill = choose(Role.PREFILL)
        speech = dialect(prefill)
        if (why := speech.refuse(request)) is not None:
            raise NotSplittable(why)
        known: dict[str, object] = {}
        if request.token_ids is not None:
            known["prefix"] = TokenPrefix.by_digest(request.token_ids)
        if request.cache_salt is not None:
            known["isolation"] = Isolation(cache_salt=request.cache_salt)
        asked = self._document(request, "prefill", speech.mode, prefill, None, known)
        limits = {name: value for name, value in _PREFILL_LIMITS.items() if value is not None or name in members}
        if "max_completion_tokens" in members:
            limits["max_completion_tokens"] = b"1"
        limits["kv_transfer_params"] = _beside(speech.prefill_keys(), asked)
        answer = yield Leg(prefill, limits, answers_client=False)

        native = to_json(speech.decode_keys(answer.kv_transfer_params))
        result = read_request(answer.kv_transfer_params, request_id=request.request_id)
        if result is not None:
            known |= {name: getattr(result, name) for name in _HANDED_ON if name in result.model_fields_set}
        decode = choose(Role.DECODE)
        wanted = self._document(request, "decode", speech.mode, prefill, decode, known)
        yield Leg(decode, {"kv_transfer_params": _beside(native, wanted)}, answers_client=True)

    def _document(
        self,
        request: RequestFacts,
        phase: Phase,
        mode: Mode,
        producer: Instance,
        consumer: Instance | None,
        known: dict[str, object],
    ) -> bytes:
        """Our document for one leg, as JSON text; `known` are the members that this request alone has."""
        if known:
            return dump_json(_params(request, phase, mode, producer, consumer, known))
        kind = phase, mode, producer, consumer
        template = self._templates.get(kind)
        if template is None:
            if len(self._templates) >= _REMEMBERED:
                self._templates.clear()
            template = self._templates[kind] = Template(_params(request, phase, mode, producer, consumer, {}))
        return template.fill(request.request_id, request.transfer_id)


def _params(
    request: RequestFacts,
    phase: Phase,
    mode: Mode,
    producer: Instance,
    consumer: Instance | None,
    known: dict[str, object],
) -> KVTransferParams:
    members: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "request_id": request.request_id,
        "transfer": {"id": request.transfer_id, "attempt": 1},
        "phase": phase,
        "mode": mode,
        "producer": {"id": producer.id},  # which run of it, only the engine itself can say
    }
    if consumer is not None:
        members["consumer"] = {"id": consumer.id}
    return parse(members | known)


def _beside(native: bytes, document: bytes) -> bytes:
    """The text of `kv_transfer_params`: our document beside native members."""
    return b'%b%b"%b":%b}' % (native[:-1], b"" if native == b"{}" else b",", DOCUMENT_KEY.encode(), document)
