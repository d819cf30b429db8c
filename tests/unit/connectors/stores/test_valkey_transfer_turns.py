"""Tests that batches transfer values one after the other, and that one that waits too long does not."""

import threading
import time

import pytest

from kvparams_connectors.stores.valkey.transfer_turns import TransferTurns

WAIT_S = 20.0


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_than_so_many_hold_a_turn(count: int) -> None:
    turns = TransferTurns(count)
    held, most = 0, 0
    guard = threading.Lock()
    full = threading.Barrier(count, timeout=WAIT_S)

    def work() -> None:
        nonlocal held, most
        for _ in range(6):
            with turns.held(time.monotonic() + WAIT_S):
                with guard:
                    held += 1
                    most = max(most, held)
                full.wait()  # as many as there are turns hold one at the same time
                with guard:
                    held -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert most == count


def test_a_turn_that_does_not_come_free_is_a_time_out_and_takes_no_turn() -> None:
    turns = TransferTurns(1)
    with (
        turns.held(time.monotonic() + WAIT_S),
        pytest.raises(TimeoutError),
        turns.held(time.monotonic() - 1),
    ):
        pytest.fail("there was no turn")
    with turns.held(time.monotonic() + WAIT_S):
        pass


def test_a_turn_is_given_back_when_a_transfer_fails() -> None:
    turns = TransferTurns(1)
    with pytest.raises(ConnectionError), turns.held(time.monotonic() + WAIT_S):
        raise ConnectionError
    with turns.held(time.monotonic() + WAIT_S):
        pass
