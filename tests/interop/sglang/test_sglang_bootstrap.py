"""Tests the proxy's reading of SGLang's own bootstrap server, and SGLang's request class with the proxy's legs.

Engines themselves do not run in this mode without a GPU, so these tests do not show which of them meet in a room.
"""

import json
import urllib.error
import urllib.request
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.sglang import SGLANG, SGLangBootstrap
from kvparams.instances import DataParallelRank, RequestFacts
from kvparams.routing.managers.concurrent_legs import ConcurrentLegs
from kvparams.routing.plan import Leg, LegResult
from tests.support.kvparams.planning import Table
from tests.support.processes import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")
RANK: dict[str, object] = {
    **{f"attn_{kind}_size": 1 for kind in ("tp", "cp", "dp")},
    **{f"attn_{kind}_rank": 0 for kind in ("tp", "cp", "dp")},
    "pp_size": 1,
    "pp_rank": 0,
    "system_dp_size": 1,
    "system_dp_rank": 0,
    "rank_ip": "127.0.0.1",
    "rank_port": 20_000,
    "page_size": 16,
    "kv_cache_dtype": "auto",
}
"""How a prefill engine of one rank registers there."""


def ask(url: str, document: object = None) -> bytes:
    """GET, or PUT of a document, as soon as it listens."""
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, method="GET" if body is None else "PUT")
    said: list[bytes] = []

    def is_answered() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                said.append(answer.read())
        except urllib.error.HTTPError as error:
            said.append(b"%d" % error.code)
        except OSError:
            return False
        return True

    wait_until(is_answered, 20.0)
    return said[0]


def test_its_bootstrap_server_is_understood() -> None:
    """Not before every rank has registered."""
    common = import_module("sglang.srt.disaggregation.common.conn")
    (port,) = free_ports(1)
    server = common.CommonKVBootstrapServer("127.0.0.1", port)
    url, bootstrap = f"http://127.0.0.1:{port}", SGLangBootstrap()
    try:
        early = ask(url + bootstrap.path)
        assert early == b"503"
        with pytest.raises(HandoffMissing):
            bootstrap.parse_info(url, json.loads(early))
        assert ask(url + "/route", RANK) == b"OK"
        answer = json.loads(ask(url + bootstrap.path))
        assert bootstrap.parse_info(url, answer) == {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
    finally:
        server.close()


@pytest.mark.parametrize("prompts", [1, 2])
def test_its_request_class_reads_both_legs_alike(prompts: int) -> None:
    """The same room, as a number that SGLang takes, for each prompt one of its own."""
    io_struct = import_module("sglang.srt.managers.io_struct")
    table = Table(SGLANG)
    table.found = SGLangBootstrap().parse_info("http://10.0.0.7:8998", {"dp_size": 1})
    facts = RequestFacts("req", "tra", "m", prompts, 1, None, None)
    legs: list[Leg] = table.run(ConcurrentLegs().legs(facts, table), lambda leg: LegResult({}))
    room: Any = SGLANG.decode_keys({}, "tra", table.found)["bootstrap_room"]
    assert len(legs) == 2
    for leg in legs:
        told = {name: json.loads(value) for name, value in leg.changes.items() if value and "bootstrap" in name}
        text = "who is there" if prompts == 1 else ["who is there"] * prompts
        asked = io_struct.GenerateReqInput(text=text, **told)
        asked.normalize_batch_and_arguments()
        rooms = [room + number for number in range(prompts)]
        assert asked.bootstrap_room == (room if prompts == 1 else rooms)
        assert asked.bootstrap_host == ("10.0.0.7" if prompts == 1 else ["10.0.0.7"] * prompts)
        assert asked.bootstrap_port == (8998 if prompts == 1 else [8998] * prompts)
        assert not leg.changes.keys() & {"max_tokens", "n", "min_tokens"}, "both have the client's own"


class Manager:
    """What a sender of a prefill engine's rank 2 of 4 asks of its manager."""

    sender_trace_module = deferred_bootstrap = None
    is_dummy_cp_rank = False
    attn_dp_rank = 2

    def __init__(self) -> None:
        self.failures: list[str] = []

    def record_failure(self, room: int, why: str) -> None:
        self.failures.append(why)

    def update_status(self, room: int, status: object) -> None:
        pass


@pytest.mark.parametrize("is_told", [True, False])
def test_a_pinned_prefill_rank_must_hear_that_decode_knows_it(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    """By default a prefill engine wants the rank that the room implies; the control is a leg that does not say it."""
    common = import_module("sglang.srt.disaggregation.common.conn")
    by_room = SimpleNamespace(num_dp_ranks=4, load_balance_method="follow_bootstrap_room")
    monkeypatch.setattr(common, "get_parallel", lambda: by_room)
    monkeypatch.setattr(common, "get_observability", lambda: SimpleNamespace(enable_trace=False))
    sender = type("Sender", (common.CommonKVSender,), {"poll": None, "failure_exception": None})
    sender.__abstractmethods__ = frozenset()
    manager = Manager()
    sender(manager, "127.0.0.1:8998", 1, req_has_disagg_prefill_dp_rank=is_told)
    assert bool(manager.failures) is not is_told
    place = SGLangBootstrap().parse_info("http://10.0.0.7:8998", {"dp_size": 4}, DataParallelRank(2, 4))
    assert place["disagg_prefill_dp_rank"] == 2  # on both legs: tests/system/proxy/fleet/test_ranks.py
