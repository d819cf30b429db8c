"""The terms in which a plan is spoken of: choices, legs, how they end, and KV that is held meanwhile.

A manager (`kvparams.routing.managers`) is a generator of steps; an executor runs them. A step says what is wanted,
never how: connections, load, queues and clocks belong to the executor. Nothing changes a step once it is made.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, final

from kvparams.dialects.interface import BootstrapInfo, Dialect, ReleaseRequest
from kvparams.errors import KVParamsError
from kvparams.instances import Instance, RequestFacts, Role

__all__ = [
    "AcquireInstance",
    "ExecutionContext",
    "KVLease",
    "Leg",
    "LegFailed",
    "LegPair",
    "LegResult",
    "Plan",
    "StreamProgress",
    "as_instance",
    "as_result",
]


@final
@dataclass(slots=True)
class AcquireInstance:
    """Requests an instance of a role, as soon as one has room.

    The plan is sent an `Instance`, whose load counts from then on until its leg ends or it is given back. `LegFailed`
    is raised in the plan if the KV that it holds is given up before there is room, or if no instance is left that may
    be paired with `paired_with` while other pairs are. For an encode instance, which a request can do without, it is
    raised whenever none is granted.
    """

    role: Role
    avoid: Sequence[str] = ()
    """Ids of instances that have failed this request: taken only where there is nobody else."""
    paired_with: Instance | Role | None = None
    """Who runs the other leg: only instances that may be paired with it are taken. Of a role: somebody of it will be
    chosen later, and only instances are taken for which there is one, who is not to be avoided either where possible.
    See `kvparams.routing.pairing`."""
    prefer: Sequence[str] = ()
    """Ids of instances that are taken before others as long as they have room and have not twice as much to do."""


@final
@dataclass(slots=True)
class Leg:
    """Wanted: one request to one engine. The plan is sent a `LegResult`, or `LegFailed` is raised in it."""

    instance: Instance
    changes: Mapping[str, bytes | None]
    """To the client's body, as for `kvparams.jsontext.editing.edit`."""
    answers_client: bool
    """Whether its answer goes to the client; otherwise the manager is told it."""
    resume_from: "StreamProgress | None" = None
    """What the client has of the answer already: this leg goes on from there, as a completion of token ids."""
    limit_s: float | None = None
    """The most time that it may take, where that may be less than the executor gives to others."""


@final
class LegPair(NamedTuple):
    """Requests two legs at once, of engines that meet.

    Decode's answer is held until prefill has ended well. The plan is sent a `LegResult` when both have, or `LegFailed`
    is raised in it for the first that has failed; then the other one is aborted.
    """

    prefill: Leg
    decode: Leg
    kv: "KVLease"
    """What is held for the request from when prefill has ended until decode has fetched it."""


@dataclass(slots=True)
class LegResult:
    """A `LegResult` is the answer of an engine at the end of a leg, empty for a leg that answered the client."""

    kv_transfer_params: Mapping[str, object]
    """That object of the answer; empty where there was none."""
    ec_transfer_params: Mapping[str, object] = field(default_factory=dict[str, object])
    """The same of an encode leg's answer."""


class StreamProgress(NamedTuple):
    """A `StreamProgress` is the part of a stream that was sent when its engine failed."""

    prompt_ids: Sequence[int]
    """The prompt, as the engine had tokenised it."""
    answer_ids: Sequence[int]
    """What the client has been sent, in tokens."""


class LegFailed(KVParamsError):
    """A leg did not come to its end. Raised in the plan, which goes on in another way or lets it pass."""

    def __init__(
        self,
        message: str,
        *,
        another: bool,
        claimed: bool = True,
        begun: bool = False,
        sent: StreamProgress | None = None,
    ) -> None:
        super().__init__(message)
        self.retryable = another
        """Whether another instance might do better: false where the request itself is at fault."""
        self.may_have_acted = claimed
        """Whether the engine may have acted on the leg; false when it cannot have seen it."""
        self.response_started = begun
        """Whether the client has a part of the answer."""
        self.instance: Instance | None = None
        """Whose leg it was, where the executor says."""
        self.evidence = ""
        """The way in which it failed, in the executor's words, for the log: never an engine's or a client's."""
        self.progress = sent
        """With `response_started`: from where another engine could go on; None where none can."""


@dataclass(slots=True)
class KVLease:
    """KV that an engine holds for somebody who has not come for it yet."""

    producer: Instance
    until_s: float
    """On the executor's clock."""
    transfer_id: str
    attempt: int
    release_request: ReleaseRequest | None
    """How to give it back if nobody comes; None where it may stay: a store's pages, which others may use."""


class ExecutionContext(Protocol):
    """An `ExecutionContext` answers the questions of a plan, each of them at once."""

    def dialect(self, instance: Instance) -> Dialect:
        """Returns the dialect of an instance."""
        ...

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        """Returns the answer of a prefill engine's bootstrap server; None before it has answered.

        It is also None where the engine's dialect has no bootstrap server.
        """
        ...

    def verify_handoff(self, instance: Instance, said: Mapping[str, object]) -> None:
        """Hold what a prefill engine has said against what is known of it, before another engine is told.

        Raises:
            HandoffRefused: it names an address that is not its own, or a value out of bounds.
        """
        ...

    def peer_source(self, instance: Instance) -> str | None:
        """Returns the address from which this instance's prefill leg should read a prefix of its prompt, or None.

        The address is the one that the other engine has named, checked against the known facts about that engine.
        """
        ...

    def one_token_changes(self) -> Mapping[str, bytes | None]:
        """The changes that make the client's body ask for its prompt to be computed, and one token."""
        ...

    def time_left(self) -> float | None:
        """Returns the seconds until the whole request has to have ended; None where there is no such limit."""
        ...

    def can_split(self, request: RequestFacts) -> bool:
        """Returns True if every prefill instance that may be chosen for this request can carry it to decode."""
        ...

    def encode_changes(self, instance: Instance) -> Mapping[str, bytes | None]:
        """The changes that make the client's body ask for encodings of its images, audio and video alone.

        `instance`: the encode engine. One that does not serve the LoRA adapter of the request encodes for its base
        model.
        """
        ...

    def record_encoding(self, problem: str | None) -> None:
        """Records how the encode step of this request ended.

        Args:
            problem: why the engine that computes the prompt has to encode all media itself, for the operator; None
                where an encode engine has done it.
        """
        ...

    def now(self) -> float:
        """Seconds, on a clock that only goes forward."""
        ...

    def has_candidates(self, role: Role) -> bool:
        """Returns True if an instance of this role may be given a leg of this request, room aside."""
        ...

    def should_fail_over(self, instance: Instance, failed: Sequence[str]) -> bool:
        """Returns True if the request should leave this instance for another pair.

        Every compatible instance, of which there is at least one, has then already failed this request, and another
        prefill and decode engine that may be paired have not.
        """
        ...

    def cached_tokens(self, role: Role) -> Mapping[str, int]:
        """Returns the tokens of the prompt's prefix that instances of this role are believed to hold, by id.

        An instance that is not named holds none. The caches of decode engines are learnt only for requests whose plans
        ask this.
        """
        ...

    def may_retry(self) -> bool:
        """Returns True if the request may have one more attempt, and takes it."""
        ...

    def next_transfer(self) -> str:
        """A transfer id for a further attempt; never the same twice."""
        ...

    def hold_lease(self, lease: KVLease) -> None:
        """Holds KV for this request from now on, in place of the KV that another transfer held before.

        It counts as fetched with the first byte of the answer. If the request or its plan ends before that, it is given
        back.
        """
        ...

    def release_instance(self, instance: Instance) -> None:
        """An instance that was chosen is not needed after all."""
        ...


Plan = Generator[AcquireInstance | Leg | LegPair, object, None]
"""The steps of one request. Each is answered as its class says; `as_instance` and `as_result` give it the type."""


def as_instance(answer: object) -> Instance:
    """Returns what a plan is sent for `AcquireInstance`, with its type: `as_instance((yield AcquireInstance(...)))`.

    Raises:
        TypeError: the executor has sent something else.
    """
    if not isinstance(answer, Instance):
        raise TypeError(f"a plan that has asked for an instance was sent {type(answer).__name__}")
    return answer


def as_result(answer: object) -> LegResult:
    """Returns what a plan is sent for `Leg`, with its type: `as_result((yield Leg(...)))`.

    Raises:
        TypeError: the executor has sent something else.
    """
    if not isinstance(answer, LegResult):
        raise TypeError(f"a plan that has asked for a leg was sent {type(answer).__name__}")
    return answer
