"""Tests entries with several data-parallel ranks: how they are written, and the instances that they stand for."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import DataParallelRank, Role
from kvparams_proxy.cli.engine_flags import engine_specs
from kvparams_proxy.cli.production_stack_flags import StaticFleet
from kvparams_proxy.cli.shared_urls import notes_of_shared_urls
from kvparams_proxy.config.fleet_document import parse_fleet_document
from kvparams_proxy.config.settings import default_spec_rules
from kvparams_proxy.config.spec_fields import check_ranks
from kvparams_proxy.config.spec_parsing import parse_specs
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, RankRange, specs_by_rank
from kvparams_proxy.server.shared_admin import spec_document

RULES = default_spec_rules()
P0: dict[str, Any] = {"id": "p0", "url": "http://h:1", "role": "prefill"}


def fleet(*entries: dict[str, Any]) -> tuple[InstanceSpec, ...]:
    return parse_fleet_document(yaml.safe_dump({"instances": list(entries)}), RULES).entries


def problems_of(*entries: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        fleet(*entries)
    return caught.value.problems


def test_an_entry_with_ranks_is_an_instance_for_each() -> None:
    more = {"labels": {"zone": "a"}, "kv_events": "tcp://h:5557", "kv_events_replay": "tcp://[::1]:6000"}
    specs = fleet(P0 | more | {"ranks": 3, "key_file": "/key"})
    assert [spec.id for spec in specs] == ["p0-dp0", "p0-dp1", "p0-dp2"]
    assert [spec.rank for spec in specs] == [DataParallelRank(index, 3) for index in range(3)]
    assert [spec.kv_events for spec in specs] == ["tcp://h:5557", "tcp://h:5558", "tcp://h:5559"]
    assert [spec.kv_events_replay for spec in specs] == ["tcp://[::1]:6000", "tcp://[::1]:6001", "tcp://[::1]:6002"]
    for spec in specs:
        made = spec.make_instance()
        assert (made.url, made.role, made.labels, made.rank) == ("http://h:1", Role.PREFILL, {"zone": "a"}, spec.rank)
        assert spec.credential_sources.key_file == Path("/key")


def test_an_entry_without_ranks_is_one_engine() -> None:
    """The control."""
    (spec,) = fleet(P0)
    assert (spec.id, spec.rank) == ("p0", None)


def test_the_ranks_of_a_further_node_have_their_numbers() -> None:
    specs = fleet(P0 | {"ranks": "4-7", "kv_events": "tcp://h:5557"})
    assert [spec.id for spec in specs] == ["p0-dp4", "p0-dp5", "p0-dp6", "p0-dp7"]
    assert [(spec.rank.index, spec.rank.number) for spec in specs if spec.rank] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [spec.kv_events for spec in specs] == [f"tcp://h:{port}" for port in range(5561, 5565)]


@pytest.mark.parametrize(
    "value", [0, 257, -1, True, 2.0, "0", "\u0664", "7-4", "0-256", "4000-4096", "a-b", "1-2-3", [1], {}]
)
def test_other_ranks_are_refused(value: object) -> None:
    (problem,) = problems_of(P0 | {"ranks": value})
    assert problem.startswith("line ")
    assert "ranks: must be the number of data-parallel ranks behind the URL, from 1 to 256, or" in problem


def test_what_ranks_cannot_be_combined_with_is_refused() -> None:
    (problem,) = problems_of(P0 | {"ranks": 2, "kv_events": "ipc:///tmp/events"})
    assert "ranks: kv_events must be tcp://host:port" in problem
    (problem,) = problems_of(P0 | {"ranks": 2, "kv_events": "tcp://h:65535"})
    assert "ranks: the port of kv_events is too high" in problem
    near = {"kv_events": "tcp://h:5557", "kv_events_replay": "tcp://h:5558"}
    (problem,) = problems_of(P0 | near | {"ranks": 2})
    assert "ranks: the ports of kv_events and kv_events_replay must be 2 or more apart" in problem
    assert len(fleet(P0 | near | {"ranks": 1})) == 1  # the controls
    assert len(fleet(P0 | near | {"ranks": 2, "kv_events_replay": "tcp://h:5559"})) == 2
    (problem,) = problems_of(P0 | {"ranks": 200, "id": "x" * 125})
    assert "ranks: make the id shorter" in problem


def test_ids_that_collide_are_refused() -> None:
    other = {"url": "http://h:2", "role": "decode"}
    (problem,) = problems_of({"id": "p0-dp1", **other}, P0 | {"ranks": 2})
    assert "ranks: a rank would be called 'p0-dp1', which is already the id of instances[0]" in problem
    (problem,) = problems_of(P0 | {"ranks": 2}, {"id": "p0-dp1", **other})
    assert "id: 'p0-dp1' is already the id of instances[0]" in problem
    assert len(fleet(P0 | {"ranks": 2}, {"id": "p0-dp2", **other})) == 3  # the control
    (problem,) = problems_of(P0 | {"ranks": 2}, P0 | {"id": "p1"})
    assert "url: instances[0] is the same prefill engine" in problem


def test_so_many_instances_are_refused_at_once() -> None:
    entries = [{"id": f"p{number}", "url": f"http://h:{number + 1}", "role": "prefill"} for number in range(3000)]
    (problem,) = problems_of(*(entry | {"ranks": 256} for entry in entries))
    assert "there are more than 4096 instances with all ranks" in problem


@given(count=st.integers(1, 64), start=st.integers(0, 64), events=st.booleans())
def test_what_is_written_of_a_rank_is_the_entry_of_all(count: int, start: int, events: bool) -> None:
    """As proxies tell one another: whoever reads it has the same instances."""
    streams = {"kv_events": "tcp://h:5557"} if events else {}
    specs = fleet(P0 | {"ranks": f"{start}-{start + count - 1}"} | streams)
    assert check_ranks(f"{start}-{start + count - 1}") == RankRange(count, start)
    for spec in (specs[0], specs[-1]):
        problems = ConfigProblems()
        assert parse_specs(spec_document(spec), "", RULES, problems) == specs
        assert not problems


def flags(*prefill: str) -> tuple[tuple[InstanceSpec, ...], list[str]]:
    problems = ConfigProblems()
    arguments = Namespace(prefill=prefill, decode=[], aggregated=[], encode=[], bootstrap=["a=http://h:8998"])
    found = engine_specs(arguments, StaticFleet(), RULES, problems)
    try:
        problems.raise_if_any()
    except ConfigError as error:
        return found, [problem for problem in error.problems if not problem.startswith("--bootstrap: the connector")]
    return found, []


def test_flags_name_ranks_behind_the_url() -> None:
    specs, problems = flags("a=http://h:1?ranks=2", "http://h:2?ranks=2-3", "http://h:3")
    assert not problems
    assert [spec.id for spec in specs] == ["a-dp0", "a-dp1", "prefill-1-dp2", "prefill-1-dp3", "prefill-2"]
    assert {spec.url for spec in specs} == {"http://h:1", "http://h:2", "http://h:3"}
    assert [spec.bootstrap for spec in specs] == [*(["http://h:8998"] * 2), None, None, None]
    assert notes_of_shared_urls(specs) == []


@pytest.mark.parametrize("url", ["http://h:1?ranks=", "http://h:1?ranks=0", "http://h:1?ranks=" + "9" * 5000])
def test_wrong_ranks_of_flags_are_refused(url: str) -> None:
    specs, problems = flags(f"a={url}")
    assert specs == ()
    assert problems[0].startswith("--prefill number 1: [NAME=]URL ?ranks= must be the number of data-parallel ranks")


def test_a_url_is_still_refused_with_another_query() -> None:
    _, problems = flags("a=http://h:1?rank=2")
    assert "[NAME=]URL must be http://host:port" in problems[0]


def test_the_same_ranks_twice_are_noted() -> None:
    spec = InstanceSpec("p0", "http://h:1", Role.PREFILL, "nixl")
    ranks, again = (specs_by_rank(one, RankRange(2)) for one in (spec, InstanceSpec("p1", spec.url, spec.role, "nixl")))
    assert notes_of_shared_urls(ranks) == []
    assert "p0-dp0 and p1-dp0 are the same prefill engine" in notes_of_shared_urls([*ranks, *again])[0]
