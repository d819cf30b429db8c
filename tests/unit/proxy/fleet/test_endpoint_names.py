"""Tests how instances are named for gateways: each URL is parsed once, and nothing is kept of instances that left."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.fleet import endpoint_names
from kvparams_proxy.fleet.endpoint_names import EndpointNames


class Site:
    """A fleet whose hosts have led to addresses."""

    def __init__(self, *urls: str) -> None:
        self.instances = [Instance(f"e{n}", "1", Role.DECODE, url, "nixl") for n, url in enumerate(urls)]
        self.peers: dict[str, tuple[str, ...]] = {}
        fleet = SimpleNamespace(members=[SimpleNamespace(instance=each) for each in self.instances])

        def pool(name: str) -> SimpleNamespace:
            return SimpleNamespace(peer_addresses=self.peers.get(name, ()))

        pools = SimpleNamespace(get=pool)
        self.names = EndpointNames(cast("Any", fleet), cast("Any", pools))


def test_an_endpoint_is_the_address_of_the_url_or_the_last_one_that_its_name_led_to() -> None:
    site = Site("http://10.0.0.1:8000", "https://[2001:db8::1]", "http://decode-0:8000")
    assert [site.names.endpoint(each) for each in site.instances] == ["10.0.0.1:8000", "[2001:db8::1]:443", None]
    site.peers["e2"] = ("10.0.0.2", "10.0.0.3")
    assert site.names.endpoint(site.instances[2]) == "10.0.0.3:8000"
    assert site.names.find("10.0.0.3:8000", Role.DECODE) is site.instances[2]
    assert site.names.find("10.0.0.3:8000", Role.PREFILL) is None
    assert site.names.ids(["10.0.0.1:8000", "10.0.0.9:1"]) == {"e0"}


def test_all_ranks_behind_one_url_are_found_there() -> None:
    site = Site("http://10.0.0.1:8000", "http://10.0.0.1:8000", "http://10.0.0.2:8000")
    assert site.names.ids(["10.0.0.1:8000"]) == {"e0", "e1"}
    assert site.names.ids(["10.0.0.1:8000"], Role.DECODE) == {"e0", "e1"}
    assert site.names.ids(["10.0.0.1:8000"], Role.PREFILL) == frozenset()
    assert site.names.find("10.0.0.1:8000") is site.instances[0]


def test_an_address_of_ipv6_is_found_in_any_form() -> None:
    site = Site("http://[2001:0DB8:0:0::1]:8000")
    assert site.names.endpoint(site.instances[0]) == "[2001:db8::1]:8000"
    for written in ("[2001:db8::1]:8000", "[2001:DB8:0:0:0:0:0:1]:8000"):
        assert site.names.find(written) is site.instances[0]
        assert site.names.ids([written]) == {"e0"}
    for wrong in ("[2001:db8::1]:8001", "[2001:db8::2]:8000", "[x]:8000", "[2001:db8::1"):
        assert site.names.find(wrong) is None


def test_each_url_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(*(f"http://decode-{n}:8000" for n in range(500)), *(f"http://10.0.0.{n}:1" for n in range(200)))
    parsed: list[str] = []

    def split(url: str) -> Any:
        parsed.append(url)
        return known(url)

    known = endpoint_names.urlsplit
    monkeypatch.setattr(endpoint_names, "urlsplit", split)
    for _ in range(3):
        site.names.ids(["10.0.0.1:1"])
    assert sorted(parsed) == sorted(each.url for each in site.instances)


def test_instances_that_have_left_are_forgotten() -> None:
    site = Site("http://10.0.0.1:8000")
    for number in range(1000):
        site.names.endpoint(Instance(f"gone-{number}", "1", Role.DECODE, "http://10.0.0.2:8000", "nixl"))
    assert len(vars(site.names)["_parts"]) < 200
