"""Tests that names for viewers contain no address."""

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.ui.public_names import public_engine_name, store_name


def instance(id: str, url: str, *addresses: str) -> Instance:
    return Instance(id, "boot-1", Role.DECODE, url, "nixl", addresses=addresses)


@pytest.mark.parametrize(
    ("id", "url", "addresses"),
    [
        ("decode-10.1.2.3-8000", "http://10.1.2.3:8000", ()),
        ("decode-10-1-2-3-8000", "http://10.1.2.3:8000", ()),
        ("decode-fd00--1-80", "http://[fd00::1]:80", ()),
        ("d-gpu7.rack.example-1", "http://gpu7.rack.example:1", ()),
        ("d-10.9.9.9", "http://engine:8000", ("10.9.9.9",)),
    ],
)
def test_an_id_that_contains_the_address_gets_another_name(id: str, url: str, addresses: tuple[str, ...]) -> None:
    name = public_engine_name(instance(id, url, *addresses))
    assert name != id
    assert name.startswith("decode-")
    assert name == public_engine_name(instance(id, url, *addresses))  # the same for everybody


@pytest.mark.parametrize("id", ["d0", "llama-decode-7f9c", "decode-1"])
def test_another_id_stays(id: str) -> None:
    assert public_engine_name(instance(id, "http://10.1.2.3:8000")) == id


def test_two_engines_do_not_get_the_same_name() -> None:
    names = {public_engine_name(instance(f"d-10.0.0.{n}", f"http://10.0.0.{n}:80")) for n in range(1, 200)}
    assert len(names) == 199


@pytest.mark.parametrize("name", ["10.0.0.5", "mooncake.prod.example"])
def test_the_address_of_a_store_is_not_shown(name: str) -> None:
    assert store_name("shared") == "shared"
    assert name not in store_name(name)
