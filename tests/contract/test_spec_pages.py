"""Tests that the code does what engine.md, store.md and proxy.md show."""

import json
import re
from typing import Any

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.store import STORE
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.jsontext.document import JSONLimits, find_members
from kvparams.jsontext.editing import edit
from kvparams.keys import KVShard, chain_pages, page_key
from kvparams.pages import HEADER_BYTES
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import Leg, LegFailed, LegResult
from kvparams.versions import SUPPORTED_VERSIONS
from kvparams_proxy.requests.forbidden_fields import FORBIDDEN_FIELDS, FORWARDED_HEADERS, is_safe_request_id
from kvparams_proxy.requests.intake import parse_request
from kvparams_proxy.requests.one_token_changes import one_token_changes
from tests.contract.test_vectors import namespace_of
from tests.support.kvparams.planning import Table
from tests.support.kvparams.spec_folder import SPEC


def examples(name: str) -> dict[str, Any]:
    """The examples of a page, by what they are called; each name stands once."""
    found = re.findall(r"^```([^\n]+)\n(.*?)^```$", (SPEC / name).read_text(), re.MULTILINE | re.DOTALL)
    kinds = [info.removeprefix("json ") for info, _ in found]
    assert len(kinds) == len(set(kinds)) > 0
    assert all(info.startswith("json ") for info, _ in found)
    return {kind: json.loads(text) for kind, (_, text) in zip(kinds, found, strict=True)}


def facts(prompt: list[int]) -> RequestFacts:
    return RequestFacts("7f3c9a", "0192a1c8-7f3c", "m", 1, 1, prompt, None)


def fleet() -> list[Instance]:
    named = ((Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-1"))
    return [Instance(name, "seen by the proxy alone", role, "http://h:1", "store") for role, name in named]


def params(leg: Leg) -> Any:
    """A leg's `kv_transfer_params`."""
    sent = leg.changes["kv_transfer_params"]
    assert sent is not None
    return json.loads(sent)


def test_the_legs_in_the_engine_page_are_those_that_are_planned() -> None:
    """Ours: what an engine is told to expect is made by the code that a proxy runs."""
    legs = examples("engine.md")
    client = {name: value for name, value in legs["decode"].items() if name != "kv_transfer_params"}
    body = json.dumps(client | {"n": 1, "best_of": 1, "min_tokens": 1, "stream_options": {}}).encode()
    table = Table(STORE, fleet(), one_token=one_token_changes("completions", body, find_members(body)))
    table.waits_s = 0.05
    answer = LegResult(legs["answer"]["kv_transfer_params"])
    prefill, decode = table.run(PrefillThenDecode().legs(facts(client["prompt"]), table), lambda _: answer)
    assert json.loads(edit(body, find_members(body), prefill.changes)) == legs["prefill"]
    plain = json.dumps(client).encode()
    assert json.loads(edit(plain, find_members(plain), decode.changes)) == legs["decode"]


def test_the_engine_page_says_which_versions_there_are() -> None:
    assert examples("engine.md")["models"]["kvparams_versions"] == list(SUPPORTED_VERSIONS)


def test_the_page_in_the_store_page_has_this_key_and_this_length() -> None:
    shown = examples("store.md")["page"]
    namespace, rectangle = namespace_of(shown["namespace"]), KVShard(**shown["rectangle"])
    (page,) = chain_pages(namespace, shown["token_ids"])
    assert shown["key"] == page_key(namespace, page, rectangle)
    assert shown["bytes"] == HEADER_BYTES + namespace.payload_bytes(page.tokens, rectangle)


def test_what_the_proxy_page_takes_away_is_taken_away() -> None:
    shown = examples("proxy.md")
    body = json.dumps(shown["client"]).encode()
    inbound = parse_request("completions", body, "r", "t", JSONLimits())
    assert inbound is not None
    assert json.loads(inbound.body) == shown["stripped"]


def test_the_proxy_page_names_everything_by_which_a_client_could_steer() -> None:
    section = (SPEC / "proxy.md").read_text().split("## 1. ")[1].split("```")[0]
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[1:]
    body, nvext, headers, ids = (set(re.findall(r"`([^`]+)`", what)) for _, what in cells)
    assert body <= {
        row.name for row in FORBIDDEN_FIELDS if row.location == "body"
    }  # 1.0 is frozen, and engines learn more ways
    assert nvext == {row.name for row in FORBIDDEN_FIELDS if row.location == "nvext"}
    assert headers == {name.decode() for name in FORWARDED_HEADERS} | {"Authorization"}
    assert ids >= {row.name for row in FORBIDDEN_FIELDS if row.location == "request id"}
    for id in (b"a" * 128, b"7f3c.9-a_"):
        assert is_safe_request_id(id)
    for id in (b"a" * 129, b"a/b", b"x___decode_addr_h:1", b"x___prefill_addr_h:1"):
        assert not is_safe_request_id(id)


def test_the_legs_in_the_proxy_page_are_those_that_are_planned() -> None:
    """What prefill answers is handed on as it came; another try has another transfer, and is counted."""
    shown = examples("proxy.md")
    answers = [LegResult(shown["pulled"]), LegFailed("gone", another=True), LegResult(shown["pulled"]), LegResult({})]
    table = Table(NIXL, fleet(), retries=1)
    legs = table.run(PrefillThenDecode().legs(facts([1, 2, 3]), table), lambda _: answers.pop(0))
    assert [leg.instance.role for leg in legs] == [Role.PREFILL, Role.DECODE] * 2
    assert params(legs[1]) == shown["handed"]
    assert shown["again"]["transfer"]["id"] != shown["handed"][DOCUMENT_KEY]["transfer"]["id"]
    shown["again"]["transfer"]["id"] = "transfer-1"
    assert params(legs[2])[DOCUMENT_KEY] == shown["again"]
