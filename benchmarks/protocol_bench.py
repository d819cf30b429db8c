"""Measures the cost of the protocol on the request path: `make bench-protocol`.

One request with a prompt of 8,000 tokens (or `--tokens`), both legs: the document and the native keys of prefill, those
of decode with the 500 blocks that prefill has answered with, and their way into the client's body. Then what the other
side pays: reading a document, judging it, verifying its signature. msgspec is the yardstick beside pydantic: the same
members with the same bounds, as a C library for schemas reads and writes them.

The figures are CPU time of this process, in rounds in which every row has its turn; of each row the median round is
shown, and the fastest. Bars: both legs, signed, 60 us with ids by digest and 250 us with ids packed.
"""

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from kvparams import TokenPrefix, dump_json, parse
from kvparams.codec import DocumentTemplate
from kvparams.dialects.interface import BootstrapInfo, Dialect
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.registry import load_tables
from kvparams.dialects.store import STORE
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.jsontext.document import load_object
from kvparams.jsontext.editing import edit
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import AcquireInstance, KVLease, LegResult
from kvparams.signing.canonical_json import canonical_document, canonical_json
from kvparams.signing.document_outline import DocumentOutline, encode_prefix_digest, encode_prefix_verbatim
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.signer import Signer
from kvparams.signing.verification import verify_params

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

__all__ = ["main"]

BARS: Final = {"both legs, ids by digest, signed": 60.0, "both legs, ids packed, signed": 250.0}
"""Microseconds."""
BLOCK: Final = 16
PAIR: Final = {
    role: Instance(f"{role}-0", "boot", role, f"http://10.0.0.{n}:8000", "nixl") for n, role in enumerate(Role, 7)
}
PINS: Final = HandoffVerifier(load_tables().values())
CUT: Final[dict[str, bytes | None]] = {"max_tokens": b"1", "stream": b"false"}


class Path:
    """A `kvparams.routing.plan.ExecutionContext` that looks at addresses, and is asked for nothing else."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def dialect(self, instance: Instance) -> Dialect:
        return self._dialect

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        return None

    def verify_handoff(self, instance: Instance, said: Mapping[str, object]) -> None:
        PINS.verify(instance, said)

    def peer_source(self, instance: Instance) -> str | None:
        return None

    def time_left(self) -> float | None:
        return None

    def can_split(self, request: RequestFacts) -> bool:
        return True

    def encode_changes(self, instance: Instance) -> dict[str, bytes | None]:
        return {}

    def record_encoding(self, problem: str | None) -> None: ...

    def one_token_changes(self) -> dict[str, bytes | None]:
        return CUT

    def now(self) -> float:
        return 0.0

    def has_candidates(self, role: Role) -> bool:
        return True

    def should_fail_over(self, instance: Instance, failed: Sequence[str]) -> bool:
        return False

    def cached_tokens(self, role: Role) -> dict[str, int]:
        return {}

    def may_retry(self) -> bool:
        return False

    def next_transfer(self) -> str:
        return "t"

    def hold_lease(self, lease: KVLease) -> None:
        pass

    def release_instance(self, instance: Instance) -> None:
        pass


def planned(manager: PrefillThenDecode, path: Path, facts: RequestFacts, answer: LegResult) -> list[Any]:
    """The changes of both legs, as a proxy's plan yields them."""
    plan = manager.legs(facts, path)
    step = next(plan)
    changes: list[object] = []
    try:
        while True:
            if type(step) is AcquireInstance:
                step = plan.send(PAIR[step.role])
            else:
                changes.append(step.changes)  # pyright: ignore[reportAttributeAccessIssue]
                step = plan.send(answer)
    except StopIteration:
        return changes


class Legs:
    """Both legs of one request over NIXL, put together as the plan does, with a prefix of any form."""

    def __init__(self, ids: "array[int]", handoff: dict[str, object], signer: Signer) -> None:
        self._ids = ids
        self._handoff = handoff
        self._signer = signer
        self._prefill = NIXL.prefill_keys("tra-1")
        base: dict[str, object] = {
            "version": "1.0",
            "request_id": "r",
            "transfer": {"id": "t", "attempt": 1},
            "mode": "pull",
            "producer": {"id": "prefill-0"},
        }
        self._first = DocumentOutline(parse({**base, "phase": "prefill"}))
        self._second = DocumentOutline(parse({**base, "phase": "decode", "consumer": {"id": "decode-0"}}))

    def signed(self, form: Callable[["array[int]"], TokenPrefix] | None) -> tuple[bytes, bytes]:
        """Both texts of `kv_transfer_params`. What is signed is the digest in any case, made of the ids at hand."""
        signer = self._signer
        text = encode_prefix_digest(self._ids)
        sent = None if form is None else encode_prefix_verbatim(form(self._ids))
        members = self._first.members("req-1", "tra-1", None)
        members["prefix"] = text
        first = signer.encode_carrier(signer.encode_native(self._prefill), members, sent)
        members = self._second.members("req-1", "tra-1", None)
        members["prefix"] = text
        return first, signer.encode_carrier(signer.encode_native(self._handoff), members, sent)


# the yardstick: the same document for msgspec

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._~-]*$")]
Seen = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[!-~]*$")]


class _Transfer(msgspec.Struct, frozen=True):
    id: Id
    attempt: Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class _Endpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    id: Seen
    incarnation: Id | msgspec.UnsetType = msgspec.UNSET


class _Prefix(msgspec.Struct, frozen=True, omit_defaults=True):
    count: Annotated[int, msgspec.Meta(ge=0, le=2_097_152)]
    packed: Annotated[str, msgspec.Meta(max_length=11_184_812)] | msgspec.UnsetType = msgspec.UNSET
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")] | msgspec.UnsetType = msgspec.UNSET


class _Document(msgspec.Struct, frozen=True, omit_defaults=True):
    version: Annotated[str, msgspec.Meta(pattern=r"^1\.(?:0|[1-9][0-9]{0,3})$")]
    request_id: Seen
    transfer: _Transfer
    phase: Literal["prefill", "prefill_result", "decode", "decode_result", "release", "cancel"]
    mode: Literal["store", "pull", "push", "rendezvous"]
    prefix: _Prefix | msgspec.UnsetType = msgspec.UNSET
    producer: _Endpoint | msgspec.UnsetType = msgspec.UNSET
    consumer: _Endpoint | msgspec.UnsetType = msgspec.UNSET
    signature: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


Row = tuple[str, Callable[[], object]]


def rows(tokens: int) -> list[Row]:
    """Returns all measured rows."""
    draw = random.Random(1)
    ids = array("I", (draw.randrange(128_000) for _ in range(tokens)))
    blocks = [draw.randrange(100_000) for _ in range(-(-tokens // BLOCK))]
    handoff: dict[str, object] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [blocks],
        "remote_engine_id": "5b5fb28f-3f30-4bdd-9a36-958d52459200",
        "remote_request_id": "cmpl-7f3c9a52-0-9be1c0d2",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 4,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 512,
    }
    result = {
        "version": "1.0",
        "request_id": "req-1",
        "transfer": {"id": "tra-1", "attempt": 1},
        "phase": "prefill_result",
        "mode": "store",
        "prefix": {"count": tokens, "digest": TokenPrefix.by_digest(ids).digest_text()},
        "load_keys": [f"kv1.a6f0a6f0a6f0a6f0.{n:064x}.1024.L0-32.H0-8" for n in range(-(-tokens // 1024))],
        "producer": {"id": "prefill-0", "incarnation": "1763640000-12"},
        "lease": {"ttl_ms": 30000},
    }
    ring = SigningKeyring([SigningKey.new(0)])
    signer = Signer(ring, "pool-a", time.time)
    legs = Legs(ids, handoff, signer)
    with_ids = RequestFacts("req-1", "tra-1", "m", 1, 1, ids, None)
    as_text = with_ids._replace(token_ids=None)
    nixl, store = Path(NIXL), Path(STORE)
    handed, stored = LegResult(handoff), LegResult({"kvparams": result})
    plain, signing = PrefillThenDecode(), PrefillThenDecode(signer)
    body = json.dumps({"model": "m", "max_tokens": 64, "prompt": ids.tolist()}).encode()
    _, spans = load_object(body)
    changes = planned(signing, nixl, with_ids, handed)
    found: list[Row] = [
        ("both legs, ids by digest, signed", lambda: legs.signed(None)),
        ("both legs, ids packed, signed", lambda: legs.signed(TokenPrefix.pack)),
        ("  of that: SHA-256 over the ids", lambda: encode_prefix_digest(ids)),
        ("  of that: 500 blocks in canonical form", lambda: signer.encode_native(handoff)),
        ("addresses and bounds of prefill's answer", lambda: PINS.verify(PAIR[Role.PREFILL], handoff)),
        ("the whole plan over NIXL, text, unsigned", lambda: planned(plain, nixl, as_text, handed)),
        ("the whole plan over NIXL, text, signed", lambda: planned(signing, nixl, as_text, handed)),
        ("the whole plan over NIXL, ids, unsigned", lambda: planned(plain, nixl, with_ids, handed)),
        ("the whole plan over NIXL, ids, signed", lambda: planned(signing, nixl, with_ids, handed)),
        ("the whole plan with a store, ids, unsigned", lambda: planned(plain, store, with_ids, stored)),
        ("the whole plan with a store, ids, signed", lambda: planned(signing, store, with_ids, stored)),
        ("attach both, a body of token ids", lambda: [edit(body, spans, each) for each in changes]),
    ]
    for form, make in (("digest", None), ("packed", TokenPrefix.pack)):
        _, second = legs.signed(make)
        carrier: dict[str, Any] = json.loads(second)
        document = json.dumps(carrier["kvparams"], separators=(",", ":")).encode()
        params = parse(document)
        reading = msgspec.json.Decoder(_Document)
        struct: _Document = reading.decode(document)
        writing = msgspec.json.Encoder()

        def written(struct: _Document = struct, writing: msgspec.json.Encoder = writing) -> object:
            return writing.encode(struct)

        def verified(carrier: dict[str, Any] = carrier) -> object:
            return verify_params(carrier, ring, "pool-a", time.time(), ReplayWindow(0.0))

        validate = type(params).__pydantic_validator__.validate_json
        found += [
            (f"parse text, {form}", lambda document=document: parse(document)),
            (f"parse a dictionary, {form}", lambda carrier=carrier: parse(carrier["kvparams"])),
            (f"  pydantic alone, {form}", lambda document=document, validate=validate: validate(document)),
            (f"  msgspec, {form}", lambda document=document, reading=reading: reading.decode(document)),
            (f"dump_json, {form}", lambda params=params: dump_json(params)),
            (f"  msgspec, {form}", written),
            (f"canonical form, {form}", lambda params=params: canonical_document(params)),
            (f"verify a leg, {form}", verified),
        ]
    template = DocumentTemplate(parse({**result, "phase": "decode", "prefix": None}))
    found += [
        ("one document from a template, unsigned", lambda: template.fill("req-1", "tra-1")),
        ("canonical form of 14 native keys", lambda: canonical_json(handoff)),
        ("  msgspec, the same keys in its own order", lambda: msgspec.json.encode(handoff)),
    ]
    return found


def measured(found: Sequence[Row], rounds: int) -> dict[int, list[float]]:
    """CPU microseconds of each row, round by round."""
    turns: list[int] = []
    for _, work in found:
        began = time.process_time()
        for _ in range(20):
            work()
        turns.append(max(20, int(0.01 / max(1e-7, (time.process_time() - began) / 20))))
    seen: dict[int, list[float]] = {index: [] for index in range(len(found))}
    for _ in range(rounds):
        for index, (_, work) in enumerate(found):
            began = time.process_time()
            for _ in range(turns[index]):
                work()
            seen[index].append((time.process_time() - began) / turns[index] * 1e6)
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; status 1 if a bar is not reached by the fastest round."""
    parser = argparse.ArgumentParser(description="CPU of the protocol on the request path.")
    parser.add_argument("--tokens", type=int, default=8000, help="of the prompt (default: 8000)")
    parser.add_argument("--rounds", type=int, default=30, help="how often every row has its turn (default: 30)")
    arguments = parser.parse_args(argv)
    found = rows(arguments.tokens)
    seen = measured(found, arguments.rounds)
    print(f"{'CPU, microseconds':46s} {'median':>8s} {'fastest':>8s}")
    missed = 0
    for index, (name, _) in enumerate(found):
        median, fastest = statistics.median(seen[index]), min(seen[index])
        bar = BARS.get(name)
        note = "" if bar is None else f"   bar {bar:.0f}: {'reached' if fastest <= bar else 'MISSED'}"
        missed += bar is not None and fastest > bar
        print(f"{name:46s} {median:8.2f} {fastest:8.2f}{note}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
