"""Tests the registry: operators' entries, the precedence of sources, and a fleet file that changes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvparams.errors import PluginError
from kvparams.instances import Instance, Role, RoundRobin
from kvparams.routing.model_settings import ModelSettings
from kvparams_proxy.config.fleet_document import FleetDocument, parse_fleet_document
from kvparams_proxy.config.fleet_file import FleetFileProvider
from kvparams_proxy.config.settings import default_spec_rules
from kvparams_proxy.config.spec_parsing import parse_specs
from kvparams_proxy.config.yaml_reader import MAX_YAML_BYTES, read_yaml
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.registry.credentials import CredentialSources, EngineCredentials
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules
from kvparams_proxy.fleet.registry.providers import run_provider, run_providers
from kvparams_proxy.fleet.registry.reconcile import rollout_steps
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.secret import Secret
from tests.support.processor import is_within
from tests.support.waiting import until

RULES = SpecRules(frozenset(("nixl", "store")))
EXAMPLE = Path(__file__).parents[4] / "examples" / "fleet.yaml"


class NoTimer:
    def cancel(self) -> None: ...


def a_fleet() -> Fleet:
    return Fleet((), {role: RoundRobin() for role in Role}, lambda: 0.0, lambda delay_s, callback: NoTimer())


def problems_of(text: str, rules: SpecRules = RULES) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_fleet_document(text, rules)
    return caught.value.problems


def fleet_text(*ids: str, url: str = "http://h", role: str = "prefill", more: str = "") -> str:
    lines = (f"- {{id: {id}, url: '{url}:{number + 1}', role: {role}{more}}}" for number, id in enumerate(ids))
    return "instances:\n" + "\n".join(lines) + "\n"


# YAML


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' appears twice"),
        ("a: {b: 1, b: 2}", "the key 'b' appears twice"),
        ("a: &x [1]\nb: *x", "anchors"),
        ("a: *nothing", "anchors"),
        ("<<: {a: 1}", "merge keys"),
        ("a: !!python/object/apply:os.system [ls]", "tags"),
        ("a: !!str 5", "tags"),
        ("a: no", "'no' has different meanings"),
        ("a: On", "'On' has different meanings"),
        ("a: 010", "'010' has different meanings"),
        ("a: 0x1f", "has different meanings"),
        ("a: 1:30", "has different meanings"),
        ("a: .inf", "has different meanings"),
        ("a: .nan", "has different meanings"),
        ("a: " + "9" * 400, "has different meanings"),
        ("? [a]\n: b", "a key must be text"),
        ("a: 1\n---\nb: 2", "several YAML documents"),
        ("a: [1,", "not valid YAML"),
        ("a: 'x", "not valid YAML"),
        ("\ta: 1", "not valid YAML"),
        ("a: 1\nb: \x00", "line 2: not valid YAML: it holds a character"),
        ("[" * 100_000, "nested deeper"),
        ("a: " * 30 + "1", "not valid YAML"),
        ("- " * 60_000, "nested deeper"),
        ("a: [" + "1," * 50_000 + "]", "more than 50000 values"),
    ],
)
def test_yaml_that_is_not_plain_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="line") as caught:
        read_yaml(text)
    assert said in str(caught.value)


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    layers = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    with pytest.raises(ConfigError, match="anchors"):
        read_yaml("a0: &a0 lol\n" + layers)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


class NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


@given(st.dictionaries(st.text(max_size=10), PLAIN, max_size=4), st.sampled_from([None, True, False]))
def test_plain_documents_are_read_as_they_were_written(document: dict[str, object], flow: bool | None) -> None:
    text = yaml.dump(document, Dumper=NoAliases, default_flow_style=flow)
    assert read_yaml(text).value == document


def hostile_texts(parts: int) -> dict[str, str]:
    """Texts of 1 MiB divided by `parts`. Whole ones that are not refused early cost one to three seconds of CPU."""

    def repeated(unit: str, times: int) -> str:
        return unit * (times // parts)

    unknown = ", ".join(f"prt{number}: 1" for number in range(24_000 // parts))
    return {
        "words": "a: " + repeated("x ", 500_000),
        "a quoted text": 'a: "' + repeated("x", 1_000_000) + '"',
        "a comment": "#" + repeated("x", 1_000_000),
        "empty lines": repeated("\n", 1_000_000),
        "directives": repeated("%x y\n", 200_000),
        "brackets": "z: " + repeated("[", 1_000_000),
        "dashes": repeated("- ", 500_000),
        "values": f"[{repeated('1,', 49_000)}]",
        "objects": repeated("- {a: b}\n", 12_000),
        "keys that occur twice": repeated("k: 1\n", 24_000),
        "names that are not known": f"proxy: {{{unknown}}}",
        "instances that are wrong": "instances:\n" + repeated("- {idd: x, url: y, role: z}\n", 4096),
        "addresses that are wrong": "defaults: {addresses: [" + repeated("'1.2.3.4.5/9',", 45_000) + "]}",
        "words on lines": "a: " + repeated("x\n ", 300_000),
        "escapes": 'a: "' + repeated("\\n", 500_000) + '"',
        "a block of text": "a: |\n" + repeated(" x\n", 300_000),
        "a tag": "a: !" + repeated("x", 1_000_000),
        "an anchor": "a: &" + repeated("x", 1_000_000),
        "a number in a directive": "%YAML 1." + "1" * 5_000 + "\n---\na: 1\n",
        "an escape that is no character": 'a: "\\UFFFFFFFF"',
        "a directive that stands twice": f"%TAG !{repeated('a', 500_000)}! b\n" * 2,
        "a character that YAML does not allow": repeated(" ", 1_000_000) + "\x00",
    }


WHOLE = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.parametrize("parts", [8, WHOLE])
@pytest.mark.parametrize("name", hostile_texts(1_000))
def test_a_hostile_text_is_read_or_refused_within_seconds(name: str, parts: int) -> None:
    text = hostile_texts(parts)[name]
    began = time.thread_time()
    problems: tuple[str, ...] = ()
    try:
        parse_fleet_document(text, RULES)
    except ConfigError as error:
        problems = error.problems
    assert all(len(problem) < 10_000 for problem in problems), "nobody reads a message as long as the file"
    assert is_within(time.thread_time() - began, 5 / parts)


@pytest.mark.parametrize(
    "text", ['a: "\\UFFFFFFFF"', "%YAML 1." + "1" * 5_000 + "\n---\na: 1\n", 'a: 1\nb: "\\UFFFFFFFF"']
)
def test_what_pyyaml_itself_cannot_convert_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"line \d: not valid YAML: a number or an escape is too large"):
        read_yaml(text)


def test_one_wrong_name_among_roles_is_the_only_problem() -> None:
    entry = "{id: a, url: 'http://h', labels: {model: y}}"
    assert problems_of(f"roles: {{prefil: {{model: x}}, decode: {{model: y}}}}\ninstances: [{entry}]") == (
        "line 1: roles.prefil: is not known here; did you mean prefill? known: prefill, decode, aggregated, encode",
    )
    control = problems_of(f"roles: {{decode: {{model: z}}}}\ninstances: [{entry}]")
    assert "the labels match no role" in str(control)


async def longest_turn(work: Awaitable[object]) -> float:
    """Processor time of the whole process between two turns of the event loop, at most, while `work` goes on."""
    done = asyncio.ensure_future(work)
    longest_s, last = 0.0, time.process_time()
    while not done.done():
        await asyncio.sleep(0)
        now = time.process_time()
        longest_s, last = max(longest_s, now - last), now
    return longest_s


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((name, 8) for name in ("words", "empty lines", "values", "objects", "a character that YAML does not allow")),
        *((name, 8) for name in ("names that are not known", "instances that are wrong", "addresses that are wrong")),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("values", "objects", "names that are not known")),
    ],
)
async def test_the_event_loop_has_its_turns_while_a_hostile_file_is_read(
    followed: "Followed", name: str, parts: int
) -> None:
    """The control: the same work on the loop is one turn. Threads change every 5 ms, however slow the machine is."""
    text = hostile_texts(parts)[name]

    async def on_the_loop() -> None:
        with contextlib.suppress(ConfigError):
            parse_fleet_document(text, RULES)

    control_s = await longest_turn(on_the_loop())
    longest_s: list[float] = []
    for number in range(3):  # a processor that is shared may be slow once
        followed.rename(text + "\n" * number)
        longest_s.append(await longest_turn(followed.look()))
        assert followed.registry.sources["file"].refused_count == number + 1, "it was read"
        if longest_s[-1] < max(0.02, control_s / 10):
            break
    assert min(longest_s) < max(0.02, control_s / 10), (control_s, longest_s)


def test_comments_may_be_as_long_as_anybody_writes() -> None:
    text = "# what an operator has to say\n" * 5_000 + "a: 1  # more\n\n\n" + "  # and more\n" * 5_000 + "b: 2\n"
    assert read_yaml(text).value == {"a": 1, "b": 2}


@given(st.text(st.sampled_from("ab:-[]{}#&*!|>'\"?,% \n\t0.~"), max_size=60))
def test_no_text_does_anything_but_be_read_or_refused(text: str) -> None:
    try:
        found = read_yaml(text).value
    except ConfigError:
        return
    assert found is None or isinstance(found, str | bool | int | float | list | dict)


# entries


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("id", "", "1 to 128"),
        ("id", "a b", "1 to 128"),
        ("id", "..", "1 to 128"),
        ("id", "a/b", "1 to 128"),
        ("id", "a\n", "1 to 128"),
        ("id", 7, "1 to 128"),
        ("url", "h:1", "http://host:port"),
        ("url", "ftp://h:1", "http://host:port"),
        ("url", "http://h:1/v1", "http://host:port"),
        ("url", "http://h:1?x", "http://host:port"),
        ("url", "http://h:1#", "http://host:port"),
        ("url", "http://h:99999", "http://host:port"),
        ("url", "http://h:0", "http://host:port"),
        ("url", "http://[::1", "http://host:port"),
        ("url", "http://h\n:1", "http://host:port"),
        ("url", "http://h:1\r\nx: y", "http://host:port"),
        ("url", "http://" + "h" * 4000, "http://host:port"),
        ("url", None, "http://host:port"),
        ("role", "both", "two instances with one URL"),
        ("role", ["prefill"], "prefill, decode"),
        ("role", 1, "prefill, decode"),
        ("connector", "mooncake", "nixl, store"),
        ("connector", ["nixl"], "nixl, store"),
        ("labels", ["a"], "an object"),
        ("labels", {"a": 1}, "put quotes around it"),
        ("labels", {"a b": "x"}, "must be a label"),
        ("labels", {"a": "x\ny"}, "put quotes around it"),
        ("labels", {str(n): "x" for n in range(65)}, "at most 64"),
        ("drain", "yes", "true or false"),
        ("drain", 1, "true or false"),
        ("key_file", 5, "path of a file"),
        ("kv_events", "http://h:1", "tcp://host:port"),
        ("kv_events", "tcp://h", "tcp://host:port"),
        ("kv_events", "tcp://h:0", "tcp://host:port"),
        ("kv_events", "tcp://*:70000", "tcp://host:port"),
        ("kv_events", ["tcp://h:1"], "tcp://host:port"),
        ("kv_events", "tcp://-:5557", "tcp://host:port"),
        ("kv_events_replay", "tcp://.h:5557", "tcp://host:port"),
        ("store", True, "or false"),
        ("store", "a b", "or false"),
        ("tls", {}, "one or more of"),
        ("tls", {"verify": False}, "known: ca, certificate, key"),
        ("tls", {"certificate": "c.pem"}, "both certificate and key"),
        ("tls", {"server_name": 5}, "server_name: must be text"),
        ("api_key", "sk-secret", "not known here; known: id, url, labels, role"),
        ("Role", "prefill", "not known here; did you mean role? known: "),
        ("kv-events", "tcp://h:1", "did you mean kv_events?"),
        ("role", "decod", "did you mean decode?"),
        ("connector", "nixel", "did you mean nixl?"),
    ],
)
def test_a_wrong_member_is_named_with_what_it_must_be(member: str, value: object, said: str) -> None:
    problems = ConfigProblems()
    good: dict[str, object] = {"id": "p0", "url": "https://h:1", "role": "prefill"}
    parse_specs(good, "instances[3]", RULES, problems)
    assert not problems
    parse_specs(good | {member: value}, "instances[3]", RULES, problems)
    with pytest.raises(ConfigError) as caught:
        problems.raise_if_any()
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith((f"instances[3].{member}: ", f"instances[3].{member}."))
    assert said in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_events_are_for_engines_that_prefill_and_a_replay_belongs_to_them() -> None:
    common = "instances:\n- {id: a, url: 'http://h:1', "
    text = f"{common}role: prefill, kv_events: 'tcp://h:5557', kv_events_replay: 'tcp://[::1]:5558'}}"
    [entry] = parse_fleet_document(text, RULES).entries
    assert (entry.make_instance().kv_events, entry.make_instance().kv_events_replay) == (
        "tcp://h:5557",
        "tcp://[::1]:5558",
    )
    [said] = problems_of(f"{common}role: decode, kv_events: 'tcp://h:5557'}}")
    assert "for engines that prefill" in said
    [said] = problems_of(f"{common}role: prefill, kv_events_replay: 'tcp://h:5557'}}")
    assert "kv_events_replay: is given, but kv_events is missing" in said
    files = f"{common}role: prefill, kv_events: 'ipc:///run/events'}}"
    assert parse_fleet_document(files, RULES).entries[0].kv_events == "ipc:///run/events"
    [said] = problems_of(files, replace(RULES, may_name_credentials=False))
    assert "tcp://host:port" in said
    [said] = problems_of(files, replace(RULES, kv_events_installed=False))
    assert "instances[0].kv_events: needs pyzmq" in said
    assert parse_fleet_document(f"{common}role: prefill}}", replace(RULES, kv_events_installed=False)).entries


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_what_events_need_is_looked_for(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_spec_rules().kv_events_installed

    def find(name: str) -> object:
        return None if name == package else find_spec(name)

    monkeypatch.setattr("kvparams_proxy.config.settings.find_spec", find)
    assert not default_spec_rules().kv_events_installed


def test_engines_whose_connector_saves_share_a_store_unless_they_say_otherwise() -> None:
    rules = replace(RULES, store_connectors=frozenset(("store",)))
    members = {
        "a": "connector: store",
        "b": "connector: store, store: other",
        "c": "connector: store, store: false",
        "d": "connector: nixl",
        "e": "connector: nixl, store: other",
    }
    text = "instances:\n" + "".join(
        f"- {{id: {id}, url: 'http://{id}', role: prefill, {said}}}\n" for id, said in members.items()
    )
    entries = parse_fleet_document(text, rules).entries
    assert [entry.make_instance().store for entry in entries] == ["store", "other", None, None, "other"]
    assert default_spec_rules().store_connectors == {"content", "legacy", "store", "store-drop"}


def test_encode_engines_have_a_dialect_of_their_own_whatever_the_default() -> None:
    for said in ("", ", connector: ec"):
        text = f"defaults: {{connector: nixl}}\n{fleet_text('e', role='encode', more=said)}"
        (entry,) = parse_fleet_document(text, RULES).entries
        assert (entry.role, entry.dialect, entry.store) == (Role.ENCODE, "ec", None)
    found = parse_fleet_document(
        "roles: {encode: {kind: e}}\ninstances: [{id: e, url: 'http://h', labels: {kind: e}}]", RULES
    )
    assert [entry.role for entry in found.entries] == [Role.ENCODE]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fleet_text("e", role="encode", more=", connector: nixl"), "leave it out for an encode engine"),
        (fleet_text("p", role="prefill", more=", connector: ec"), "ec is only for encode engines"),
        (fleet_text("e", role="encode", more=", kv_events: 'tcp://h:1'"), "only for engines that prefill"),
        (fleet_text("e", role="encode", more=", bootstrap: 'http://h:1'"), "only for prefill engines"),
        ("defaults: {connector: ec}\n" + fleet_text("p"), "defaults.connector"),
    ],
)
def test_what_makes_no_sense_for_an_encode_engine_is_refused(text: str, said: str) -> None:
    (problem,) = problems_of(text)
    assert said in problem


def test_the_common_key_is_not_for_who_has_one_of_its_own() -> None:
    everybody = EngineCredentials(key=Secret("sk-all"))
    rules = SpecRules(
        RULES.connectors, credential_sources=CredentialSources(key_file=Path("all")), credentials=everybody
    )
    problems = ConfigProblems()
    plain = {"id": "a", "url": "http://h:1", "role": "prefill"}
    (silent,), (own,) = (parse_specs(plain | more, "", rules, problems) for more in ({}, {"key_file": "own"}))
    assert not problems
    assert silent.credentials is everybody
    assert own.credentials == EngineCredentials(), "it is still to be read"


def test_everything_wrong_is_said_at_once_and_passwords_are_not_repeated() -> None:
    found = problems_of(
        """
        proxy: {port: 70000, no-such: 1, probe: 0}
        roles: {prefil: {a: b}, decode: {}}
        defaults: {role: prefill, connector: x}
        extra: 1
        instances:
          - {id: a, url: "http://user:hunter2@h:1", role: prefill}
          - {id: b, url: "http://h:1", role: decode, key_fil: k}
          - {id: b, url: "http://h:2", role: decode}
          - {id: c, url: "http://h:2", role: decode}
          - {id: d, url: "http://h:2", role: prefill, tls: {ca: x}}
          - {url: "http://h:3"}
          - nothing
        """.replace("\n        ", "\n")
    )
    text = "\n".join(found)
    for place in (
        *("extra:", "proxy.no-such:", "proxy.port:", "proxy.probe:", "roles.prefil:", "roles.decode:"),
        *("defaults.role:", "defaults.connector:", "instances[0].url:", "instances[1].key_fil:", "instances[2].id:"),
        *("instances[3].url:", "instances[4].tls:", "instances[5].id:", "instances[6]:"),
    ):
        assert place in text, place
    assert "hunter2" not in text


def test_very_many_problems_are_counted() -> None:
    found = problems_of("instances: [" + ", ".join(["{}"] * 100) + "]")
    assert len(found) == 21
    assert found[-1] == "and 280 more"


@pytest.mark.parametrize("text", ["", "[]", "text", "5"])
def test_a_file_that_is_no_object_is_refused(text: str) -> None:
    assert "must be an object with proxy, roles, defaults, modes, models, instances" in problems_of(text)[0]


def test_a_role_is_found_by_labels_and_by_nothing_else() -> None:
    text = """
    roles: {prefill: {model: [p1, p2], zone: a}, decode: {model: d}}
    defaults: {labels: {zone: a}}
    instances:
      - {id: one, url: "http://h:1", labels: {model: p2}}
      - {id: two, url: "http://h:2", labels: {model: d, zone: z}}
      - {id: three, url: "http://h:3", labels: {model: d}, role: prefill}
    """.replace("\n    ", "\n")
    document = parse_fleet_document(text, RULES)
    assert [entry.role for entry in document.entries] == [Role.PREFILL, Role.DECODE, Role.PREFILL]
    assert document.entries[0].labels == {"zone": "a", "model": "p2"}
    assert document.entries[0].make_instance().labels == {"zone": "a", "model": "p2"}
    (nobody,) = problems_of(text + "  - {id: four, url: 'http://h:4', labels: {model: p1, zone: z}}\n")
    assert nobody == "line 8: instances[3].role: is missing, and the labels match no role"
    both = text.replace("{model: d}}", "{zone: a}}", 1) + "  - {id: four, url: 'http://h:4', labels: {model: p1}}\n"
    several = "line 8: instances[3].role: is missing, and the labels match several roles: prefill and decode"
    assert several in problems_of(both)


def test_flags_go_before_the_file() -> None:
    rules = SpecRules(RULES.connectors, selectors={Role.PREFILL: {"model": frozenset("x")}})
    text = "roles: {prefill: {model: y}, decode: {model: z}}\n"
    document = parse_fleet_document(text, rules)
    assert document.rules.selectors == {Role.PREFILL: {"model": frozenset("x")}, Role.DECODE: {"model": frozenset("z")}}


def test_the_example_is_a_fleet() -> None:
    document = parse_fleet_document(EXAMPLE.read_text(), SpecRules(frozenset(("nixl",))))
    assert [(entry.id, entry.role, entry.drain) for entry in document.entries] == [
        ("p0", Role.PREFILL, False),
        ("p1", Role.PREFILL, False),
        ("d0", Role.DECODE, False),
        ("d1", Role.DECODE, True),
    ]
    assert document.settings.prefill_requests == 64
    known = [line.strip("# ").split(":")[0] for line in EXAMPLE.read_text().splitlines()]
    assert {"proxy", "roles", "defaults", "instances", "key_file", "tls", "labels", "connector", "drain"} <= set(known)


def test_what_the_example_says_in_comments_is_right_too() -> None:
    text = EXAMPLE.read_text()
    for name in (
        "client-keys",
        "admin-token-file",
        "key_file",
        "tls",
        "  ca",
        "  certificate",
        "  key",
        "  server_name",
        "kv_events",
        "kv_events_replay",
        "store",
    ):
        commented = f"  # {name}:"
        assert commented in text, name
        text = text.replace(commented, f"  {name}:")
    document = parse_fleet_document(text, SpecRules(frozenset(("nixl",))))
    assert document.settings.client_keys == Path("keys.jsonl")
    assert document.rules.credential_sources.tls is not None
    assert document.rules.credential_sources.tls.server_name == "engines"
    first = document.entries[0]
    assert (first.kv_events, first.store) == ("tcp://10.0.0.1:5557", "west")


# sources


def entry(id: str, port: int = 1, role: Role = Role.PREFILL, drain: bool = False) -> InstanceSpec:
    return InstanceSpec(id, f"http://h:{port}", role, "nixl", drain=drain)


ENTRIES = st.builds(entry, st.sampled_from("abcd"), st.integers(1, 2), st.sampled_from(list(Role)), st.booleans())
WORDS = st.tuples(st.sampled_from(["flags", "file", "admin"]), st.lists(ENTRIES, unique_by=lambda one: one.id))


@given(st.lists(WORDS, max_size=12))
def test_the_fleet_is_what_the_sources_want(words: list[tuple[str, list[InstanceSpec]]]) -> None:
    """After every word: nobody else's instances have changed, and every id that is wanted is there."""
    registry = Registry(a_fleet(), RULES)
    wanted: dict[str, list[InstanceSpec]] = {}
    for source, desired in words:
        wanted[source] = desired
        before = dict(registry.owned)
        members = {member.instance.id: member for member in registry.fleet.members}
        registry.publish(source, desired)
        now = {member.instance.id: member for member in registry.fleet.members}
        assert now.keys() == registry.owned.keys() == {one.id for entries in wanted.values() for one in entries}
        for id, owned in registry.owned.items():
            assert owned.spec in wanted[owned.source]
            instance = now[id].instance
            assert (instance.url, instance.role) == (owned.spec.url, owned.spec.role)
            assert now[id].draining is owned.spec.drain
            if id in before and (before[id].source != source or before[id].spec == owned.spec):
                if before[id].source == owned.source:
                    assert now[id] is members[id]
                else:
                    assert before[id].source == source  # it gave the id up, and somebody had waited for it
        for name, state in registry.sources.items():
            assert set(state.conflicts) == {one.id for one in wanted[name] if registry.owned[one.id].source != name}
        again = dict(now)
        changes = registry.publish(source, desired)
        assert not any(changes[:4])
        assert {member.instance.id: member for member in registry.fleet.members} == again


SETS = st.lists(ENTRIES, unique_by=lambda one: one.id)


@given(SETS, SETS, st.integers(1, 3))
def test_a_long_way_is_gone_in_small_steps(before: list[InstanceSpec], after: list[InstanceSpec], most: int) -> None:
    way = [before, *rollout_steps(before, after, most), after]
    for now, then in pairwise(way):
        former, latter = ({one.id: one for one in entries} for entries in (now, then))
        assert sum(former.get(id) != latter.get(id) for id in former.keys() | latter.keys()) <= most
        assert {one.id for one in then} >= {one.id for one in before} & {one.id for one in after}
    different = len({one.id: one for one in before if one not in after} | {o.id: o for o in after if o not in before})
    assert len(way) - 1 == max(1, -(-different // most))


def members(registry: Registry) -> dict[str, Member]:
    return {member.instance.id: member for member in registry.fleet.members}


def test_an_operators_drain_outlives_a_change_and_ends_when_the_source_speaks_of_it() -> None:
    registry = Registry(a_fleet(), RULES)
    registry.publish("file", [entry("a"), entry("b")])
    registry.drain("a", True)
    registry.publish("file", [entry("a", port=2), entry("b", port=2)])
    assert members(registry)["a"].draining
    assert not members(registry)["b"].draining
    registry.publish("file", [entry("a", port=2, drain=True), entry("b", port=2)])
    registry.publish("file", [entry("a", port=2), entry("b", port=2)])
    assert not members(registry)["a"].draining
    registry.drain("a", True)
    registry.publish("file", [entry("b", port=2)])
    registry.publish("file", [entry("a"), entry("b", port=2)])
    assert not members(registry)["a"].draining, "another instance of that name"
    with pytest.raises(KeyError):
        registry.drain("nobody", True)


def test_the_access_of_an_instance_is_known_when_it_joins() -> None:
    seen: dict[str, bool] = {}

    class Listener:
        def joined(self, member: Member) -> None:
            seen[member.instance.url] = (
                registry.credentials_for(member.instance.id) == registry.owned["a"].spec.credentials
            )

        def left(self, member: Member) -> None: ...

    registry = Registry(a_fleet(), RULES)
    registry.fleet.add_listener(Listener())
    registry.publish("file", [entry("a", port=1)])
    registry.publish("file", [entry("a", port=2)])
    assert seen == {"http://h:1": True, "http://h:2": True}


# the file


class Followed:
    """A fleet file that is looked at when the test says so."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        path.write_text(text)
        self.provider = FleetFileProvider(path, RULES)
        self.registry = Registry(a_fleet(), RULES)
        self.provider.publish_initial(self.registry)

    def rename(self, text: str) -> None:
        """Write it anew and put it in place, as careful editors do."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.provider.reload_if_changed(self.registry)

    @property
    def ids(self) -> set[str]:
        return set(members(self.registry))

    @property
    def problems(self) -> str:
        return "; ".join(self.registry.sources["file"].problems)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "fleet.yaml", fleet_text("a", "b"))


async def test_a_new_version_is_followed_however_it_was_written(followed: Followed) -> None:
    kept = members(followed.registry)["a"]
    followed.rename(fleet_text("a", "c"))
    await followed.look()
    assert followed.ids == {"a", "c"}
    assert members(followed.registry)["a"] is kept
    followed.path.write_text(fleet_text("a", "c", "d"))
    await followed.look()
    assert followed.ids == {"a", "c", "d"}
    real = followed.path.with_name("real.yaml")
    real.write_text(fleet_text("z"))
    followed.path.unlink()
    followed.path.symlink_to(real)
    await followed.look()
    assert followed.ids == {"z"}
    assert followed.registry.sources["file"].applied_count == 4
    await followed.look(5)
    assert followed.registry.sources["file"].applied_count == 4, "nothing has changed"


async def test_modes_that_cannot_be_made_leave_the_fleet_and_are_tried_again(followed: Followed) -> None:
    """A plugin can refuse what the file's own check has accepted."""
    usable = False
    heard: list[str] = []

    def switch(source: str, models: Mapping[str, ModelSettings]) -> None:
        if not usable:
            raise PluginError("the manager is gone")
        heard.append(source)

    followed.registry = Registry(a_fleet(), RULES, switch_models=switch)
    followed.provider.publish_initial(followed.registry)
    text = "models: {m: {modes: [{use: aggregated}]}}\n" + fleet_text("a", "c")
    followed.rename(text)
    await followed.look()
    assert (followed.ids, followed.problems) == ({"a", "b"}, "the manager is gone")
    usable = True
    followed.rename(text + "# again\n")
    await followed.look()
    assert (followed.ids, heard, followed.problems) == ({"a", "c"}, ["file"], "")


async def test_a_file_that_is_being_written_is_not_a_smaller_fleet(followed: Followed) -> None:
    """Every look finds more of it; each state alone would be a fleet."""
    text = fleet_text(*(f"n{number}" for number in range(20)))
    pieces = text.splitlines(keepends=True)
    with followed.path.open("w") as file:
        for piece in pieces:
            file.write(piece)
            file.flush()
            await followed.look(1)
            assert followed.ids == {"a", "b"}
    await followed.look(2)
    assert len(followed.ids) == 20


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("instances: [", "not valid YAML"),
        (fleet_text("a", "a"), "already"),
        (fleet_text("x", more=", key_file: nowhere"), "nowhere cannot be read"),
        (fleet_text("x", url="https://h", more=", tls: {ca: nowhere}"), "nowhere: No such file"),
        ("#" * (MAX_YAML_BYTES + 1), "larger than"),
        ("instances: []\nproxy: {port: x}", "proxy.port"),
    ],
)
async def test_a_broken_version_changes_nothing_and_is_reported(
    followed: Followed, broken: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = members(followed.registry)
    followed.rename(broken)
    await followed.look(4)
    assert members(followed.registry) == before
    assert said in followed.problems
    assert followed.registry.sources["file"].refused_count == 1, "one version is refused once"
    assert said in caplog.text
    followed.rename(fleet_text("a"))
    await followed.look()
    assert followed.ids == {"a"}
    assert followed.problems == ""


async def test_a_file_that_goes_or_is_no_text_changes_nothing(followed: Followed) -> None:
    followed.path.unlink()
    await followed.look()
    assert followed.ids == {"a", "b"}
    assert "cannot be read: No such file" in followed.problems
    followed.path.write_bytes(b"\xff\xfe")
    await followed.look()
    assert "not text in UTF-8" in followed.problems
    assert followed.ids == {"a", "b"}


def test_a_file_that_is_broken_at_the_start_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        FleetFileProvider(tmp_path / "nothing.yaml", RULES)
    (tmp_path / "fleet.yaml").write_text("instances: 5")
    with pytest.raises(ConfigError, match="must be a list"):
        FleetFileProvider(tmp_path / "fleet.yaml", RULES)


async def test_keys_are_read_from_their_files_and_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "one.key").write_text("sk-first\n")
    (tmp_path / "all.key").write_text("sk-everybody\n")
    text = "defaults: {key_file: all.key}\n" + fleet_text("a", more=", key_file: one.key")
    followed = Followed(tmp_path / "fleet.yaml", text + "- {id: b, url: 'http://h:9', role: decode}\n")

    def key(id: str) -> str:
        secret = followed.registry.credentials_for(id).key
        return "" if secret is None else secret.reveal()

    assert (key("a"), key("b")) == ("sk-first", "sk-everybody")
    first = members(followed.registry)
    (tmp_path / "one.key").write_text("sk-second\n")
    await followed.look()
    assert key("a") == "sk-second"
    assert members(followed.registry)["a"] is not first["a"]
    assert members(followed.registry)["b"] is first["b"]
    (tmp_path / "one.key").unlink()
    await followed.look()
    assert key("a") == "sk-second"
    assert "one.key" in followed.problems
    for shown in (repr(followed.registry.owned), repr(followed.provider.document), followed.problems, caplog.text):
        assert "sk-" not in shown


async def test_certificates_are_followed_by_what_they_hold(tmp_path: Path) -> None:
    def authority() -> None:
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")

    authority()
    more = ", tls: {ca: ca.pem, server_name: engines}"
    followed = Followed(tmp_path / "fleet.yaml", fleet_text("a", "b", url="https://h", more=more))
    access = followed.registry.credentials_for("a")
    assert access.tls is not None
    assert access.tls is followed.registry.credentials_for("b").tls, "the same files are read once"
    assert access.server_name == "engines"
    first = members(followed.registry)
    (tmp_path / "ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    await followed.look()
    assert followed.registry.sources["file"].applied_count == 2
    assert members(followed.registry) == first, "written again, but the same"
    authority()
    await followed.look()
    assert members(followed.registry)["a"] is not first["a"]


async def test_settings_that_change_wait_for_the_next_start(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.rename("proxy: {port: 9}\n" + fleet_text("c"))
    await followed.look()
    assert followed.ids == {"c"}
    assert "at the next start" in caplog.text


async def test_a_provider_that_fails_leaves_the_fleet_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        source = "failing"

        def publish_initial(self, registry: Registry) -> None:
            registry.publish(self.source, [entry("a")])

        async def watch(self, registry: Registry) -> None:
            raise OSError("no such service")

    registry = Registry(a_fleet(), RULES)
    async with run_provider(Failing(), registry):
        await until(lambda: "no longer followed" in caplog.text)
        assert set(members(registry)) == {"a"}


async def test_flags_come_first_and_the_file_after_them(followed: Followed) -> None:
    registry = Registry(a_fleet(), RULES)
    given = Instance("a", "boot", Role.DECODE, "http://flag:1", "store", {"x": "y"})
    async with run_providers(registry, [given], [followed.provider]):
        assert members(registry)["a"].instance.url == "http://flag:1"
        assert members(registry)["a"].instance.labels == {"x": "y"}
        assert registry.owned["b"].source == "file"
        assert registry.sources["file"].conflicts == ("a",)
    assert len([task for task in asyncio.all_tasks() if task.get_name() == "follow file"]) == 0


def test_documents_compare_by_what_they_say() -> None:
    """What is the same version is the same value: nothing in it is compared by identity."""
    first, again = (parse_fleet_document(fleet_text("a", "b"), RULES) for _ in range(2))
    assert first == again
    assert isinstance(first, FleetDocument)
    other: Any = parse_fleet_document(fleet_text("a", "c"), RULES)
    assert first != other


def test_what_belongs_to_instances_is_sent_there() -> None:
    (said,) = problems_of("proxy: {connector: store}\ninstances: []")
    assert (
        said == "line 1: proxy.connector: is not an option of the proxy; it belongs under `defaults` or to an instance"
    )


def test_a_problem_has_its_line_or_that_of_what_is_around_it() -> None:
    text = """
    # a comment
    proxy:
      port: 1
      prot: 2
    instances:
      - id: a
        url: http://h:1
        role: prefill
        labels:
          model: x
          "a b": y
      -
        id: b
        role: decode
    """.replace("\n    ", "\n")
    first, label, url = problems_of(text)
    assert first.startswith("line 5: proxy.prot: is not known here; did you mean port? known: host, port, ")
    assert label.startswith("line 12: instances[0].labels.a b: must be a label")
    assert url == "line 14: instances[1].url: is missing"


def test_a_null_is_no_setting() -> None:
    """A name with nothing behind it must not mean that clients need no key."""
    assert problems_of("proxy: {client-keys: }") == ("line 1: proxy.client-keys: must be the path of a file",)
    assert not parse_fleet_document("proxy:\ninstances:\n", RULES).entries
