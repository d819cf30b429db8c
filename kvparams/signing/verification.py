"""Verifies that a request's KV parameters come from a holder of the key, are for this engine, and are new.

An engine calls `verify_params` before it acts on an address, a block or a key in `kv_transfer_params`. No member is
trusted before the signature fits, and a nonce is used up only by a document that is valid in every other respect.
"""

from collections.abc import Mapping
from hmac import compare_digest
from typing import Final, Literal, cast, get_args

from kvparams.codec import DOCUMENT_KEY, read_request
from kvparams.errors import KVParamsError
from kvparams.params import KVTransferParams, Signature
from kvparams.signing.canonical_json import (
    NotCanonical,
    canonical_document,
    canonical_json,
    native_members,
    sha256_digest,
)
from kvparams.signing.keyring import SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.signer import ALGORITHM, MAX_LIFETIME_S
from kvparams.validation import parse_json_object

__all__ = ["CLOCK_SKEW_S", "UNTRUSTED_REASONS", "UntrustedParams", "UntrustedReason", "verify_params"]

CLOCK_SKEW_S: Final = 30.0
"""By how much two clocks may differ."""

UntrustedReason = Literal[
    "unsigned",  # native keys without a document, or a document without a signature
    "algorithm",  # not one that is known here
    "key",  # no key of this name here, or not one that was valid when the document was signed
    "uncanonical",  # a float in the document, or an integer of more than 64 bits: nobody can have signed it
    "forged",  # the document is not the one that was signed
    "native",  # the native keys are not those that were signed, or the prompt beside them is not
    "audience",  # for another pool
    "instance",  # for another instance of the pool
    "lifetime",  # it may be used for longer than is allowed, or for no time
    "early",  # it was made in the future
    "expired",
    "replayed",  # used before; or older than what is remembered
]
"""In the order in which they are looked for."""
UNTRUSTED_REASONS: Final[tuple[UntrustedReason, ...]] = get_args(UntrustedReason)

_SAID: Final[Mapping[UntrustedReason, str]] = {
    "unsigned": "carries no signature, and this engine wants one",
    "algorithm": f"is signed in a way that is not known here; {ALGORITHM} is",
    "key": "is signed with a key that is not known here, or was not valid then",
    "uncanonical": "holds a number that cannot be signed",
    "forged": "is not what was signed",
    "native": "stands beside native keys, or ids of a prompt, that are not those that were signed",
    "audience": "is for another pool of engines",
    "instance": "is for another engine",
    "lifetime": f"is good for longer than {MAX_LIFETIME_S} seconds, or for none",
    "early": "was made in the future: the clocks here and there differ by too much",
    "expired": "has expired",
    "replayed": "was used before, or is older than what is remembered here",
}


class UntrustedParams(KVParamsError):
    """KV parameters that must not be acted on. Callers tell why by `reason`; the message repeats nothing of them."""

    def __init__(self, reason: UntrustedReason) -> None:
        super().__init__(reason)
        self.reason: UntrustedReason = reason

    def __str__(self) -> str:
        return f"the document {_SAID[self.reason]} [{self.reason}]"


def verify_params(
    kv_transfer_params: Mapping[str, object] | str | None,
    keyring: SigningKeyring,
    audience: str,
    now: float,
    replay: ReplayWindow,
    *,
    instance: str | None = None,
    arrived: float | None = None,
    part: str = "",
    skew_s: float = CLOCK_SKEW_S,
) -> KVTransferParams | None:
    """The document, if it may be acted on, and the native keys beside it; None where there is nothing to act on.

    Args:
        kv_transfer_params: as it came, before anything has changed it. Never modified.
        keyring: the keys that are believed.
        audience: the pool that this engine belongs to.
        now: the time, in seconds since 1970.
        replay: what was used already, in this engine.
        instance: this engine's own name in the deployment, where it knows it: then what is for another is refused.
        arrived: when the request arrived, if it has waited since; now, if not said.
        part: which part of its request this is, where an engine is handed several (prompts, choices) with one and the
            same document: each may use it once.
        skew_s: by how much two clocks may differ.

    Raises:
        UntrustedParams: it must not be acted on.
        InvalidParams: it breaks the protocol.
    """
    if isinstance(kv_transfer_params, str) and kv_transfer_params.strip(" \t\r\n") != "null":
        kv_transfer_params = parse_json_object(kv_transfer_params)
    if not isinstance(kv_transfer_params, Mapping):
        return read_request(kv_transfer_params)
    carrier = kv_transfer_params
    native = native_members(carrier)
    if DOCUMENT_KEY not in carrier:
        if native:
            raise UntrustedParams("unsigned")
        return None
    params = cast("KVTransferParams", read_request(carrier))
    signature = params.signature
    if signature is None:
        raise UntrustedParams("unsigned")
    _judge(params, signature, native, keyring, skew_s)
    if not _same_prompt(params, carrier.get("prompt_token_ids")):
        raise UntrustedParams("native")
    if signature.aud != audience:
        raise UntrustedParams("audience")
    if instance is not None and _addressee(params) not in (instance, None):
        raise UntrustedParams("instance")
    came = now if arrived is None else arrived
    _check_period(signature, came, skew_s)
    if signature.iat - skew_s < replay.since:
        raise UntrustedParams("replayed")
    if not replay.try_use(f"{signature.kid} {signature.nonce} {part}", signature.exp + skew_s, min(now, came)):
        raise UntrustedParams("replayed")
    return params


def _check_period(signature: Signature, came: float, skew_s: float) -> None:
    """Checks that a request which came at this time is within the time that its signature allows.

    Raises:
        UntrustedParams: it is not, or that time is too long.
    """
    if not 0 < signature.exp - signature.iat <= MAX_LIFETIME_S:
        raise UntrustedParams("lifetime")
    if signature.iat > came + skew_s:
        raise UntrustedParams("early")
    if signature.exp <= came - skew_s:
        raise UntrustedParams("expired")


def _judge(
    params: KVTransferParams, signature: Signature, native: Mapping[str, object], keyring: SigningKeyring, skew_s: float
) -> None:
    """Refuse what nobody with a key has signed."""
    if signature.alg != ALGORITHM:
        raise UntrustedParams("algorithm")
    key = keyring.find(signature.kid)
    if key is None or not key.is_valid_at(signature.iat, skew_s):
        raise UntrustedParams("key")
    try:
        document, beside = canonical_document(params), canonical_json(native, fractions=[])
    except NotCanonical:
        raise UntrustedParams("uncanonical") from None
    if not compare_digest(key.tag(document), signature.value):
        raise UntrustedParams("forged")
    if not compare_digest(sha256_digest(beside), signature.native):
        raise UntrustedParams("native")


def _same_prompt(params: KVTransferParams, ids: object) -> bool:
    """Returns True if unsigned ids beside a document begin with the prefix that the signature covers."""
    if ids is None:
        return True
    if params.prefix is None or type(ids) is not list or not {int}.issuperset(map(type, cast("list[object]", ids))):
        return False
    try:
        return params.prefix.covers(cast("list[int]", ids))
    except OverflowError:  # no token ids
        return False


def _addressee(params: KVTransferParams) -> str | None:
    """Returns the engine that shall act on the document, if it names one."""
    if params.phase == "prefill":
        return None if params.producer is None else params.producer.id
    if params.phase == "decode":
        return None if params.consumer is None else params.consumer.id
    return None
