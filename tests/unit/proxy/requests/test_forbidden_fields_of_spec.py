"""Tests that what proxy.md of the spec lists is taken out of a request, whatever the proxy's own table says."""

import json
import re
from typing import Any

import pytest

from kvparams.jsontext.document import JSONLimits
from kvparams_proxy.requests.forbidden_fields import FORWARDED_HEADERS
from tests.support.kvparams.spec_folder import SPEC
from tests.support.proxy.steps import read_all

EVIL = "evil-7f3c.example"
ROWS = dict(re.findall(r"^\| (.+) \| (`.+|all but .+) \|$", (SPEC / "proxy.md").read_text(), re.MULTILINE))
ANYWHERE = next(what for where, what in ROWS.items() if where.startswith("members of the body"))
PLACES: tuple[tuple[str, ...], ...] = ((), ("vllm_xargs",), ("sampling_params", "extra_args"), ("nvext",))
NAMED = re.findall(r"`([a-z_]+)`", ANYWHERE)
HINTS = re.findall(r"`(\*?[a-z_]+)`", ROWS["members of `nvext`"])


def read(path: tuple[str, ...], name: str) -> bytes:
    """Returns the body that is left of a request with this member in this object."""
    body: dict[str, Any] = {"model": "m", "prompt": "Who", "max_tokens": 9}
    at = body
    for step in path:
        at = at.setdefault(step, {})
    at[name] = EVIL
    at["kept"] = "word"
    return bytes(read_all("completions", json.dumps(body).encode(), "req", "tra", JSONLimits()).body)


@pytest.mark.parametrize("name", NAMED)
def test_a_member_that_the_spec_lists_is_taken_out_of_every_object(name: str) -> None:
    """Spec-mandated, 1.0#12.1; the control is the member beside it."""
    for path in PLACES:
        left = read(path, name)
        assert EVIL.encode() not in left
        assert b'"kept"' in left


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_that_the_spec_lists_is_taken_out_of_nvext(name: str) -> None:
    """Spec-mandated, 1.0#12.1: a star stands for anything."""
    for filling in ("", "decode_"):
        assert EVIL.encode() not in read(("nvext",), name.replace("*", filling))


def test_the_spec_lists_as_much_as_it_did_and_two_headers_pass() -> None:
    """Spec-mandated, 1.0#12.1: guards the tests above against an empty list."""
    assert (len(NAMED), len(HINTS)) == (25, 8)
    assert ROWS["headers"].startswith("all but `traceparent` and `tracestate`")
    assert {b"traceparent", b"tracestate"} == FORWARDED_HEADERS
