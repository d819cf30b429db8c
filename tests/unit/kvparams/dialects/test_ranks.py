"""Tests how each dialect names the data-parallel rank of a leg, and that an answer of another rank is refused."""

import pytest

from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.mooncake import MOONCAKE
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.registry import load_tables
from kvparams.dialects.sglang import SGLANG
from kvparams.instances import DataParallelRank, Instance, Role, ranks_key
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier

PINS = HandoffVerifier(load_tables().values())
URL = "http://10.0.0.7:8998"
PARTS = {str(rank): {"engine_id": f"e_dp{rank}", "worker_addr": {"0": {"0": "tcp://10.0.0.7:1"}}} for rank in range(3)}
SIXTH = DataParallelRank(2, 4, 4)
"""The third of four ranks behind a URL, and the seventh of all."""


def engine(rank: DataParallelRank | None, dialect: str = "nixl", role: Role = Role.PREFILL) -> Instance:
    return Instance("p0", "b", role, "http://10.0.0.7:8000", dialect, rank=rank)


def test_the_ranks_of_one_engine_are_known_by_their_url_and_role() -> None:
    assert ranks_key(engine(None)) is None
    assert ranks_key(engine(DataParallelRank(0, 2))) == ranks_key(engine(DataParallelRank(1, 2)))
    assert ranks_key(engine(SIXTH)) != ranks_key(engine(SIXTH, role=Role.DECODE))


@pytest.mark.parametrize("dialect", ["nixl", "mooncake"])
@pytest.mark.parametrize("name", ["e_dp6", "kv_dp1_dp6"])
def test_the_engine_that_answers_must_have_the_rank_that_was_asked(dialect: str, name: str) -> None:
    PINS.verify(engine(SIXTH, dialect), {"remote_engine_id": name})


@pytest.mark.parametrize("dialect", ["nixl", "mooncake"])
@pytest.mark.parametrize("name", ["e_dp2", "e_dp7", "e_dp16", "e_dp6x", "e", "e_dp6_dp5", "e_dp", "6"])
def test_an_answer_of_another_rank_is_refused(dialect: str, name: str) -> None:
    with pytest.raises(HandoffRefused) as caught:
        PINS.verify(engine(SIXTH, dialect), {"remote_engine_id": name})
    assert caught.value.reason == "rank"
    assert "'_dp6'" in caught.value.detail
    # the controls: no rank was asked, or the engine is known not to look
    PINS.verify(engine(None, dialect), {"remote_engine_id": name})
    PINS.verify(engine(SIXTH, dialect), {"remote_engine_id": name}, is_pinned=False)


def test_a_rank_is_looked_for_in_answers_that_look_like_the_last_one() -> None:
    """The verifier compares an answer with the form of the last good one first."""
    pins, asked = HandoffVerifier(load_tables().values()), engine(SIXTH)
    good = {"remote_engine_id": "e_dp6", "remote_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 1}
    for number in range(4):
        pins.verify(asked, good | {"remote_request_id": f"r{number}"})
    with pytest.raises(HandoffRefused):
        pins.verify(asked, good | {"remote_engine_id": "e_dp5"})


@pytest.mark.parametrize("rank", [0, 2])
def test_mooncake_tells_decode_of_the_rank_that_was_asked(rank: int) -> None:
    assert MOONCAKE.bootstrap is not None
    place = MOONCAKE.bootstrap.parse_info(URL, PARTS, DataParallelRank(rank, 3))
    assert place == {"remote_engine_id": f"e_dp{rank}", "remote_bootstrap_addr": URL}


def test_mooncake_without_the_rank_is_not_ready() -> None:
    assert MOONCAKE.bootstrap is not None
    with pytest.raises(HandoffMissing, match="no data-parallel rank 3 yet"):
        MOONCAKE.bootstrap.parse_info(URL, PARTS, DataParallelRank(3, 4))
    with pytest.raises(HandoffMissing, match="3 data-parallel ranks; say so with `ranks: 3`"):
        MOONCAKE.bootstrap.parse_info(URL, PARTS)


def test_sglang_names_both_ranks_in_the_bodies() -> None:
    assert (SGLANG.rank_key, NIXL.rank_key, MOONCAKE.rank_key) == ("routed_dp_rank", None, None)
    assert SGLANG.bootstrap is not None
    place = SGLANG.bootstrap.parse_info(URL, {"dp_size": 4}, DataParallelRank(3, 4))
    assert place == {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998, "disagg_prefill_dp_rank": 3}
    assert "disagg_prefill_dp_rank" not in SGLANG.bootstrap.parse_info(URL, {"dp_size": 4})
