"""Faults of this project's proxy, for the profiles and checks that the reference proxy in JavaScript does not have."""

from typing import Final

from tests.system.conformance.mutants.faults import ENGINES, Mutant

__all__ = ["BOOTSTRAP", "NIXL", "PROXY_MUTANTS", "SIGNED", "STORE", "STORE_DROP"]

STORE: Final = f"--connector store {ENGINES}"
STORE_DROP: Final = f"--connector store-drop {ENGINES}"
NIXL: Final = f"--connector nixl {ENGINES}"
BOOTSTRAP: Final = (
    f"--connector sglang --mode concurrent_legs --bootstrap prefill-0={{prefill0}} --bootstrap prefill-1={{prefill1}} {ENGINES}"
)
SIGNED: Final = f"--connector store --sign-with {{keys}} --audience {{audience}} {ENGINES}"
_PROFILES: Final = {STORE: "store-proxy", STORE_DROP: "store-proxy", NIXL: "nixl-proxy", BOOTSTRAP: "bootstrap-proxy", SIGNED: "signed"}


def _fault(options: str, check: str, fault: str, file: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(check, fault, file, changes, _PROFILES[options], options)


_FIELDS: Final = "kvparams_proxy/requests/forbidden_fields.py"
_ENDPOINTS: Final = "kvparams_proxy/requests/endpoints.py"
_NIXL: Final = "kvparams/dialects/nixl.py"
_VERIFIER: Final = "kvparams/routing/handoff_verifier.py"
_RELEASER: Final = "kvparams_proxy/execution/kv_releaser.py"
_ERRORS: Final = "kvparams_proxy/execution/engine_errors.py"
_SIGNER: Final = "kvparams/signing/signer.py"
_KEYRING: Final = "kvparams/signing/keyring.py"
_CANONICAL: Final = "kvparams/signing/canonical_json.py"
_DOCUMENTS: Final = "kvparams/routing/managers/leg_documents.py"
_SGLANG: Final = "kvparams/dialects/sglang.py"
_KNOWN_ANSWER: Final = "        if DOCUMENT_KEY not in answer:\n            return answer\n"

PROXY_MUTANTS: Final = (
    _fault(STORE, "12.1/generate", "does not look into `sampling_params`", _FIELDS, ('("vllm_xargs", "sampling_params", "nvext")', '("vllm_xargs", "nvext")')),
    _fault(STORE_DROP, "17.26/release", "releases with the phase `decode`", _RELEASER, ('"decode" if held.abandon.leg else "release"', '"decode"')),
    _fault(STORE_DROP, "17.26/release", "releases twice", _RELEASER, ("        release.exchange = pool.exchange(", "        pool.exchange(request, ResponseCollector(_ANSWER_BYTES, lambda *_: None))\n        release.exchange = pool.exchange(")),
    _fault(NIXL, "4.3/claimed-blocks", "lets two engines fetch the same blocks", _NIXL, ("has_reusable_kv = False", "has_reusable_kv = True")),
    _fault(NIXL, "12.6/native-address", "believes every address", _VERIFIER, ("        known = canonical_host(host)\n        if (ports", "        return True\n        known = canonical_host(host)\n        if (ports")),
    _fault(NIXL, "12.7/bounds", "does not hold values against the table", _VERIFIER, ("            fault = form.find_problem(value, (name,))", "            fault = None")),
    _fault(NIXL, "17.5/same-header", "sends the request id in another header", "kvparams_proxy/execution/plan_context.py", ('b"x-request-id: " + inbound', 'b"x-correlation-id: " + inbound')),
    _fault(NIXL, "17.6/steering-headers", "passes on the rank of a client", _FIELDS, ('(b"traceparent", b"tracestate")', '(b"traceparent", b"tracestate", b"x-data-parallel-rank")')),
    _fault(NIXL, "17.1/values", "changes the seed at prefill", _ENDPOINTS, ('"ignore_eos": b"true"}', '"ignore_eos": b"true", "seed": b"0"}')),
    _fault(NIXL, "17.1/unknown-members", "drops a member at prefill", _ENDPOINTS, ('"n", "best_of", "echo"),', '"n", "best_of", "echo", "x_later"),')),
    _fault(NIXL, "17.3/min-tokens", "leaves `min_tokens` at prefill", _ENDPOINTS, ('"stop_token_ids", "min_tokens", "n"', '"stop_token_ids", "n"')),
    _fault(NIXL, "17.3/stream-options", "leaves `stream_options` at prefill", _ENDPOINTS, ('frozenset(("stream_options",))', "frozenset(())")),
    _fault(NIXL, "17.21/addresses", "passes on what an engine says of its own trouble", _ERRORS, ("    if not 400 <= status < 500:\n        return failed", "    if not 400 <= status < 500:\n        failed.message = str(message)\n        return failed")),
    _fault(NIXL, "17.26/given-back", "leaves blocks to their lease", _NIXL, ("return None if native is None else ReleaseRequest(_DECODE, native, True)", "return None")),
    _fault(NIXL, "17.27/prefill-keys", "does not ask prefill to keep the KV", _NIXL, ("return self._prefill.fill(transfer_id)", 'return self._prefill.fill(transfer_id).replace(b"true", b"false")')),
    _fault(NIXL, "17.27/prefill-keys", "names an engine at prefill", _NIXL, ("return self._prefill.fill(transfer_id)", 'return self._prefill.fill(transfer_id).replace(b\'"remote_engine_id":null\', b\'"remote_engine_id":"x"\')')),
    _fault(NIXL, "17.28/decode-keys", "drops nulls of the answer", _NIXL, (_KNOWN_ANSWER, "        if DOCUMENT_KEY not in answer:\n            return {name: value for name, value in answer.items() if value is not None}\n")),
    _fault(NIXL, "17.28/unknown-keys", "hands on only what its table has", _NIXL, (_KNOWN_ANSWER, "        if DOCUMENT_KEY not in answer:\n            return {row.name: answer[row.name] for row in NIXL_TABLE.native_keys if row.name in answer}\n")),
    _fault(BOOTSTRAP, "17.29/meeting-place", "tells decode no room", "kvparams/routing/managers/concurrent_attempt.py", ("Leg(decode, {**beside, **second}", "Leg(decode, {**second}")),
    _fault(BOOTSTRAP, "17.29/rooms", "makes rooms of few bits", _SGLANG, ('"big") >> 2) + 1', '"big") % 1000003) + 1')),
    _fault(BOOTSTRAP, "12.1/sglang-members", "keeps `rid`", _FIELDS, ('    ForbiddenField("body", "rid", f"{_SGLANG}: the id of a request"),\n', "")),
    _fault(SIGNED, "13.12/signed-legs", "names no consumer", _DOCUMENTS, ("    if consumer is not None:\n        members", "    if False and consumer is not None:\n        members")),
    _fault(SIGNED, "13.4/value", "computes another signature", _KEYRING, ('b"kvparams signature 1\\n"', 'b"kvparams signature 2\\n"')),
    _fault(SIGNED, "13.3/unknown-members", "does not sort inner members", _CANONICAL, ("for name in sorted(members):", "for name in sorted(members, reverse=True):"), ("if NATIVE is not None and kind is dict:", "if False and NATIVE is not None:")),
    _fault(SIGNED, "13.5/native", "computes another digest of native keys", _SIGNER, ("sha256(canonical).hexdigest().encode()", 'sha256(canonical + b" ").hexdigest().encode()')),
    _fault(SIGNED, "13.6/times", "signs for two hours", _SIGNER, ("            second + self._lifetime_s,", "            second + 7200,")),
    _fault(SIGNED, "13.6/times", "signs with an old time", _SIGNER, ("            second,\n            key.kid.encode(),", "            second - 200,\n            key.kid.encode(),")),
    _fault(SIGNED, "13.6/next-try", "uses one nonce for all", _SIGNER, ("self._run, next(self._numbers))", "self._run, 0)")),
    _fault(SIGNED, "13.7/key", "signs with the last key of the file", _KEYRING, ("able = [key for key in self if key.is_valid_at(at)]", "able = [*self]")),
    _fault(SIGNED, "13.8/audience", "signs for another pool", _SIGNER, ("self._audience = to_json(audience)", 'self._audience = to_json("another")')),
    _fault(SIGNED, "13.2/uncanonical", "signs fractions", _CANONICAL, ("        if fractions is None:\n            raise NotCanonical(path, \"a number that is no integer has no canonical form, and cannot be signed\")", "        if fractions is None:\n            return to_json(value)")),
)
