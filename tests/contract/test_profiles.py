"""Checks the profiles of the draft: their requirements and vectors exist, and the kit checks what they name."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvparams_conformance.checks import Check
from kvparams_conformance.engine_checks import engine_checks
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.reader_checks import reader_checks
from kvparams_conformance.requirements import UnknownProfile, load_specification
from tests.support.kvparams.spec_folder import ROOT

DRAFT = ROOT / "spec" / "draft"
SPECIFICATION = load_specification()
PROFILES: dict[str, dict[str, Any]] = json.loads((DRAFT / "profiles.json").read_text())["profiles"]
NOT_SEEN_FROM_OUTSIDE = {
    "store-proxy": {},
    "nixl-proxy": {"17.2": "with 17.3", "17.18": ""},
    "bootstrap-proxy": {},
    "content-proxy": {},
    "aggregated-proxy": {},
    "signed": {"13.1": "13.4 checks it", "17.30": "vectors/key_files.json"},
    "engine": {
        "2.2": "an engine forwards nothing",
        "3.6": "5.3 sends 2^64 - 1",
        "3.8": "inside an engine",
        "3.9": "inside an engine",
        "4.2": "needs the store",
        "4.5": "needs the store: the profile store checks pages",
        "6.4": "inside an engine",
        "6.10": "nothing is deprecated",
        "7.1": "an engine answers with one message",
        "12.5": "the kit does not see the log of an engine",
    },
    "events-reader": {},
    "translator": {},
    "signed-engine": {
        "13.1": "13.8 checks it",
        "13.15": "native to each engine",
        "18.2": "the profile engine checks it",
        "17.30": "vectors/key_files.json",
    },
}
"""Requirements of a profile for which the kit has no check, and why."""


def unchecked(checks: Iterable[Check], profile: str) -> set[str]:
    """Returns the requirements of a profile that no check of it is for."""
    checked = {check.requirement for check in checks if profile in check.profiles}
    return {*PROFILES[profile]["requirements"]} - checked


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_names_requirements_and_vectors_that_exist(name: str) -> None:
    profile = PROFILES[name]
    assert len(profile["requirements"]) == len({*profile["requirements"]}) >= 5
    assert {*profile["requirements"]} <= SPECIFICATION.texts.keys()
    assert profile["title"]
    assert profile["summary"].endswith(".")
    assert all((DRAFT / path).exists() for path in profile["vectors"])
    assert "page" not in profile or (DRAFT / profile["page"]).is_file()


@pytest.mark.parametrize("name", NOT_SEEN_FROM_OUTSIDE)
def test_the_kit_checks_what_a_profile_requires(name: str) -> None:
    checks = [*proxy_checks(), *engine_checks(), *reader_checks()]
    assert unchecked(checks, name) <= NOT_SEEN_FROM_OUTSIDE[name].keys()
    assert unchecked([check for check in checks if check.requirement != "12.1"], "store-proxy") == {"12.1"}


def test_a_check_is_for_a_requirement_of_its_profiles() -> None:
    for check in (*proxy_checks(), *engine_checks(), *reader_checks()):
        for profile in check.profiles:
            assert check.requirement in PROFILES[profile]["requirements"], check.id


def test_checks_have_ids_of_their_own_and_say_what_they_send_and_expect() -> None:
    checks = [*proxy_checks(), *engine_checks(), *reader_checks()]
    readers = [check.id for check in reader_checks()]
    assert len(readers) == len({*readers}) >= 40
    proxies, engines = ([check.id for check in one()] for one in (proxy_checks, engine_checks))
    assert len(proxies) == len({*proxies}) >= 80
    assert len(engines) == len({*engines}) >= 40
    assert all(check.sends and check.expects for check in checks)


def test_every_added_requirement_of_proxies_is_in_a_profile() -> None:
    named = {number for profile in PROFILES.values() for number in profile["requirements"]}
    assert {number for number in SPECIFICATION.texts if number.partition(".")[0] in ("17", "18", "19")} <= named


def test_the_core_of_a_store_proxy_names_its_requirements_and_fits_five_pages() -> None:
    text = (DRAFT / "store-proxy.md").read_text()
    named = set(re.findall(r"draft#(\d+\.\d+)", text))
    required = {*PROFILES["store-proxy"]["requirements"]}
    assert required - named <= {"2.1", "3.2", "17.8", "17.12"}  # in the tables and examples
    assert named <= SPECIFICATION.texts.keys()
    words = len(text.split())
    assert words < 5 * 500


def test_an_unknown_profile_is_named_with_those_that_exist() -> None:
    with pytest.raises(UnknownProfile, match=r"there is no profile 'x' for proxy; there are: .*store-proxy"):
        SPECIFICATION.profile("x", "proxy")
    with pytest.raises(UnknownProfile):
        SPECIFICATION.profile("store-proxy", "engine")
    assert SPECIFICATION.profile("engine", "engine").title == "Engine"


def test_the_vectors_of_the_draft_name_requirements() -> None:
    for path in Path(DRAFT / "vectors").glob("*.json"):
        content = json.loads(path.read_text())
        assert content["title"]
        names = [case["name"] for case in content["cases"]]
        assert len(names) == len({*names})
        for case in content["cases"]:
            assert {one.removeprefix("draft#") for one in case["requirements"]} <= SPECIFICATION.texts.keys()
