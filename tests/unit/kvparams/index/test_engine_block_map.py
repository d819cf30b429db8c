"""Tests the map of engines' names of blocks where it is full."""

import numpy as np

from kvparams.index.block_hashes import HashStates
from kvparams.index.engine_block_map import EngineBlockMap
from kvparams.index.prefix_index import PrefixIndex


def _put(names: EngineBlockMap, *keys: int) -> None:
    hashes = np.array(keys, np.uint64) + np.uint64(100)
    behind = HashStates(hashes, hashes, np.arange(1, len(keys) + 1))
    names.put(np.array(keys, np.uint64), behind, np.ones(len(keys), bool), 7)


def _known(names: EngineBlockMap, *keys: int) -> list[int]:
    return names.lookup_hashes(np.array(keys, np.uint64)).tolist()


def test_names_that_are_put_do_not_make_room_for_each_other() -> None:
    names = EngineBlockMap(PrefixIndex(10), 4)
    _put(names, 1, 2)
    _put(names, 3, 4)
    _put(names, 1, 5)
    assert _known(names, 1, 2, 3, 4, 5) == [101, 0, 103, 104, 105]
    _put(names, 6, 1)
    assert _known(names, 1, 3, 4, 5, 6) == [101, 0, 104, 105, 106]


def test_a_name_makes_no_room_while_the_index_has_its_block() -> None:
    index = PrefixIndex(10)
    names = EngineBlockMap(index, 4)
    index.stored("engine", np.array([101, 102], np.uint64))
    _put(names, 1, 2)
    _put(names, 3, 4)
    _put(names, 5, 6)
    assert _known(names, 1, 2, 3, 4, 5, 6) == [101, 102, 0, 0, 105, 106]


def test_of_a_name_that_occurs_twice_the_first_is_kept() -> None:
    names = EngineBlockMap(PrefixIndex(10), 8)
    _put(names, 9, 8, 9, 8)
    assert len(names) == 2
    found = names.lookup_state(9)
    assert found is not None
    assert found[0].tokens == 1
