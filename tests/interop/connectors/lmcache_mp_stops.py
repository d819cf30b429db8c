"""Tests the store while LMCache's multi-process server is stopped for long.

LMCache's interpreter runs it, from test_lmcache_mp.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvparams_connectors.store import open_store
from tests.support.connectors.lmcache_mp_server import MPServer
from tests.support.connectors.stopping import Case, stopped_for_long


@pytest.mark.timeout(300)
def test_a_multi_process_server_that_is_stopped_for_long_costs_no_more_than_deadlines(
    tmp_path: Path, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    with MPServer(tmp_path) as server:
        store = open_store(server.url())
        try:
            stopped_for_long(Case(store, server.stop, server.go_on), effort(5, 40), record)
        finally:
            store.close()
