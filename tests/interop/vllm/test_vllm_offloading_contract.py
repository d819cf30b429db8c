"""Checks that the installed vLLM calls a tier as `vllm_tier/interface_check.py` states; another one fails here.

The failure names the difference.
"""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvparams_connectors.engines.vllm_tier.chunk_keys import KEY_BYTES
from kvparams_connectors.engines.vllm_tier.interface_check import (
    ABSTRACT_SIGNATURES,
    HOOK_SIGNATURES,
    MEMBER_NAMES,
    find_differences,
)
from tests.interop.vllm.offloading_engine import KVParamsTier, base, config, factory, tiering_base

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

_BASE: Any = tiering_base.SecondaryTierManager
_CLASSES: dict[str, Any] = {**vars(config), **vars(base), **vars(tiering_base)}
_MODULE = "kvparams_connectors.engines.vllm_tier.tier"


def test_nothing_differs() -> None:
    assert find_differences(_BASE, _CLASSES) == []
    assert set(ABSTRACT_SIGNATURES) == set(_BASE.__abstractmethods__)


@pytest.mark.parametrize("name", [*ABSTRACT_SIGNATURES, *HOOK_SIGNATURES])
def test_ours_takes_what_vllm_passes(name: str) -> None:
    taken = {
        kind: [
            (one.name, one.kind)
            for one in inspect.signature(getattr(kind, name)).parameters.values()
            if one.name not in ("self", "settings")
        ]
        for kind in (_BASE, KVParamsTier)
    }
    assert taken[KVParamsTier] == taken[_BASE]
    assert not KVParamsTier.__abstractmethods__


def test_methods_that_are_new_are_looked_at() -> None:
    """What we leave to the base class is known; one that another vLLM adds must be judged before it is."""
    left = {"block_size_bytes", "bp_detector", "has_pending_work", "take_events", "touch", "serve_external_requests"}
    kinds = (property, classmethod)
    members: dict[str, Any] = {name: vars(_BASE)[name] for name in dir(_BASE) if name in vars(_BASE)}
    public = {
        name
        for name, value in members.items()
        if not name.startswith("_") and (callable(value) or isinstance(value, kinds))
    }
    assert public == left | (set(ABSTRACT_SIGNATURES) | set(HOOK_SIGNATURES)) - {"__init__"}


def test_jobs_mean_what_they_meant() -> None:
    """Fields that we do not know could change what a job asks for."""
    fields = {
        kind: [field.name for field in dataclasses.fields(kind)]
        for kind in (tiering_base.TransferJob, tiering_base.JobResult)
    }
    assert fields[tiering_base.TransferJob] == [
        "job_id",
        "keys",
        "chunk_ids",
        "is_promotion",
        "req_context",
        "submit_time",
    ]
    assert fields[tiering_base.JobResult] == ["job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"]
    assert [one.name for one in base.LookupResult] == ["MISS", "HIT", "HIT_PENDING", "RETRY"]
    assert "req_id" in [field.name for field in dataclasses.fields(base.ReqContext)]
    assert set(MEMBER_NAMES) <= set(_CLASSES)


def test_keys_are_a_hash_and_a_group() -> None:
    key = base.make_offload_key(bytes(32), 258)
    assert len(key) == KEY_BYTES
    assert base.get_offload_group_idx(key) == int.from_bytes(key[-4:], "big") == 258


def test_a_spec_says_what_is_read_of_it() -> None:
    source = inspect.getsource(base.OffloadingSpec.__init__)
    assert "self.config = config" in source
    assert "self.replicated_layout" in source


def test_vllm_loads_the_tier_by_its_module_path() -> None:
    told = {"type": "KVParamsTier", "module_path": _MODULE, "store": "memory:"}
    assert factory.SecondaryTierFactory.get_tier_class(told) is KVParamsTier


def test_another_vllm_is_refused_when_it_loads_the_tier(tmp_path: Path) -> None:
    """vLLM with one more abstract method: no TypeError, a sentence."""
    program = f"""
import abc
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as Base
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
Base.cancel = abc.abstractmethod(lambda self, job_id: None)
Base.__abstractmethods__ |= {{"cancel"}}
SecondaryTierFactory.get_tier_class({{"type": "KVParamsTier", "module_path": "{_MODULE}"}})
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "has another tier interface than the supported version 0.32" in last
    assert "a tier must have cancel as well" in last


def test_counters_are_of_vllms_kind() -> None:
    found: dict[str, Any] = KVParamsTier.build_metric_definitions({})
    assert all(isinstance(one, base.OffloadingCounterMetadata) for one in found.values())
    assert found["vllm:kvparams_tier_chunks_refused"].labelnames == ("reason",)
