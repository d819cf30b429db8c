"""engine.md, store.md and proxy.md: what they show is what the code does."""

import json
import re
from typing import Any

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.store import STORE
from kvparams.jsontext import JSONLimits, edit, fields
from kvparams.keys import Rectangle, page_chain, page_key
from kvparams.managers.prefill_then_decode import PrefillThenDecode
from kvparams.pages import HEADER_BYTES
from kvparams.plan import Leg, LegAnswer, LegFailed
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.versions import SPOKEN
from kvparams_proxy.clients.endpoints import one_token
from kvparams_proxy.clients.intake import read
from kvparams_proxy.clients.strip_list import FORWARDED, STEERING, harmless
from tests.kvparams.planning import Table
from tests.kvparams.spec_folder import SPEC
from tests.kvparams.test_vectors import namespace_of


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
    table = Table(STORE, fleet(), one_token=one_token("completions", body, fields(body)))
    table.waits_s = 0.05
    answer = LegAnswer(legs["answer"]["kv_transfer_params"])
    prefill, decode = table.run(PrefillThenDecode().legs(facts(client["prompt"]), table), lambda _: answer)
    assert json.loads(edit(body, fields(body), prefill.changes)) == legs["prefill"]
    plain = json.dumps(client).encode()
    assert json.loads(edit(plain, fields(plain), decode.changes)) == legs["decode"]


def test_the_engine_page_says_which_versions_there_are() -> None:
    assert examples("engine.md")["models"]["kvparams_versions"] == list(SPOKEN)


def test_the_page_in_the_store_page_has_this_key_and_this_length() -> None:
    shown = examples("store.md")["page"]
    namespace, rectangle = namespace_of(shown["namespace"]), Rectangle(**shown["rectangle"])
    (page,) = page_chain(namespace, shown["token_ids"])
    assert shown["key"] == page_key(namespace, page, rectangle)
    assert shown["bytes"] == HEADER_BYTES + namespace.payload_bytes(page.tokens, rectangle)


def test_what_the_proxy_page_takes_away_is_taken_away() -> None:
    shown = examples("proxy.md")
    body = json.dumps(shown["client"]).encode()
    inbound = read("completions", body, "r", "t", JSONLimits())
    assert inbound is not None
    assert json.loads(inbound.body) == shown["stripped"]


def test_the_proxy_page_names_everything_by_which_a_client_could_steer() -> None:
    section = (SPEC / "proxy.md").read_text().split("## 1. ")[1].split("```")[0]
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[1:]
    body, nvext, headers, ids = (set(re.findall(r"`([^`]+)`", what)) for _, what in cells)
    assert body <= {row.name for row in STEERING if row.where == "body"}  # 1.0 is frozen, and engines learn more ways
    assert nvext == {row.name for row in STEERING if row.where == "nvext"}
    assert headers == {name.decode() for name in FORWARDED} | {"Authorization"}
    assert ids >= {row.name for row in STEERING if row.where == "request id"}
    for id in (b"a" * 128, b"7f3c.9-a_"):
        assert harmless(id)
    for id in (b"a" * 129, b"a/b", b"x___decode_addr_h:1", b"x___prefill_addr_h:1"):
        assert not harmless(id)


def test_the_legs_in_the_proxy_page_are_those_that_are_planned() -> None:
    """What prefill answers is handed on as it came; another try has another transfer, and is counted."""
    shown = examples("proxy.md")
    answers = [LegAnswer(shown["pulled"]), LegFailed("gone", another=True), LegAnswer(shown["pulled"]), LegAnswer({})]
    table = Table(NIXL, fleet(), retries=1)
    legs = table.run(PrefillThenDecode().legs(facts([1, 2, 3]), table), lambda _: answers.pop(0))
    assert [leg.instance.role for leg in legs] == [Role.PREFILL, Role.DECODE] * 2
    assert params(legs[1]) == shown["handed"]
    assert shown["again"]["transfer"]["id"] != shown["handed"][DOCUMENT_KEY]["transfer"]["id"]
    shown["again"]["transfer"]["id"] = "transfer-1"
    assert params(legs[2])[DOCUMENT_KEY] == shown["again"]
