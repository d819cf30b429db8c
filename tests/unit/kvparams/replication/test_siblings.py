"""Tests the table of siblings: who lives, and which of their messages count."""

from kvparams.replication.siblings import Arrival, SiblingTable

_LEASE_S = 2.0


def _table() -> SiblingTable:
    return SiblingTable(1, _LEASE_S)


def test_messages_in_order_are_told_from_gaps_and_repetitions() -> None:
    table = _table()
    heard = [table.hear(2, number, 0.0)[0] for number in (5, 6, 8, 7, 8, 9)]
    assert heard == [
        Arrival.IN_ORDER,
        Arrival.IN_ORDER,
        Arrival.AFTER_GAP,
        Arrival.REPEATED,
        Arrival.REPEATED,
        Arrival.IN_ORDER,
    ]


def test_a_sibling_lives_as_long_as_it_is_heard() -> None:
    table = _table()
    table.hear(2, 1, 0.0)
    table.hear(3, 1, 0.0)
    table.hear(2, 2, 1.5)
    assert [each.id for each in table.expire(2.5)] == [3]
    assert list(table.alive) == [2]
    assert not table.expire(3.5)
    assert [each.id for each in table.expire(3.6)] == [2]


def test_its_own_messages_are_ignored() -> None:
    assert _table().hear(1, 1, 0.0) == (Arrival.IGNORED, None)


def test_a_message_outside_the_order_makes_no_sibling_and_extends_no_lease() -> None:
    table = _table()
    assert table.hear(2, 0, 0.0) == (Arrival.IGNORED, None)
    table.hear(2, 1, 0.0)
    arrival, sibling = table.hear(2, 0, 1.9)
    assert arrival is Arrival.IN_ORDER
    assert sibling is not None
    assert [each.id for each in table.expire(2.1)] == [2]


def test_what_a_sibling_sent_before_its_lease_ended_cannot_be_replayed() -> None:
    table = _table()
    for number in (1, 2, 3):
        table.hear(2, number, 0.0)
    table.expire(5.0)
    assert table.hear(2, 3, 6.0) == (Arrival.REPEATED, None)
    assert not table.alive
    arrival, _ = table.hear(2, 9, 6.0)  # it was out of reach
    assert arrival is Arrival.AFTER_GAP
    assert list(table.alive) == [2]


def test_one_that_said_goodbye_is_never_believed_again() -> None:
    table = _table()
    table.hear(2, 1, 0.0)
    assert table.end(2) is not None
    assert table.end(2) is None
    assert table.hear(2, 5, 0.1) == (Arrival.IGNORED, None)


def test_there_are_only_so_many() -> None:
    table = _table()
    for number in range(2, 2 + 300):
        table.hear(number, 1, 0.0)
    assert len(table) == 256
    assert table.refused == 44
    table.expire(10.0)
    assert not len(table)
    for number in range(10_000):
        table.hear(1000 + number, 1, 20.0 + number)
        table.expire(20.0 + number + 3.0)
    assert len(table._gone) <= 4096  # pyright: ignore[reportPrivateUsage]
