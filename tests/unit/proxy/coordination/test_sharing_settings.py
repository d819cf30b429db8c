"""Tests the keys that proxies have in common, and what carries their messages between the workers of one machine."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from valkey.asyncio import SSLConnection, Valkey

from kvparams.replication.entries import EngineFailed, LegQueued
from kvparams.replication.entry_codec import decode_entries, encode_entry
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import change_keyring, create_keyring
from kvparams_proxy.config.share_url import parse_share_url
from kvparams_proxy.config.sharing import share_directory, share_server, write_exchange_key
from kvparams_proxy.coordination.unix_transport import UnixTransport
from tests.support.waiting import until

_URL = parse_share_url("valkeys://127.0.0.1:1?prefix=a")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_key_whose_time_has_not_come_seals_nothing_and_changes_no_hash(tmp_path: Path) -> None:
    now, file = int(time.time()), tmp_path / "keys.json"
    old = SigningKey.new(now - 60)
    create_keyring(file, SigningKeyring([old]))
    before = share_server(_URL, file)
    (only,) = before.secrets()
    with change_keyring(file) as keyrings:
        keyrings[0] = SigningKeyring([old, SigningKey.new(now + 600)])
    assert before.secrets()[0] == only
    assert len(before.secrets()) == 2
    assert share_server(_URL, file).seed == before.seed
    with change_keyring(file) as keyrings:
        keyrings[0] = SigningKeyring([old, SigningKey.new(now - 1)])  # the control
    assert before.secrets()[0] != only
    assert before.secrets()[1] == only
    assert share_server(_URL, file).seed == before.seed


def test_the_key_of_workers_is_theirs_alone(tmp_path: Path) -> None:
    write_exchange_key(tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert share_directory(tmp_path).seed == share_directory(tmp_path).seed
    with pytest.raises(FileExistsError):
        write_exchange_key(tmp_path)


def test_valkeys_is_tls() -> None:
    connect: Any = Valkey
    assert connect.from_url(_URL.server).connection_pool.connection_class is SSLConnection
    assert connect.from_url("valkey://127.0.0.1:1").connection_pool.connection_class is not SSLConnection


def test_text_that_is_no_text_is_told_all_the_same() -> None:
    entries = [EngineFailed(1, True, "a\ud800"), LegQueued(1, "decode", 0, 1, "\ud800", "m")]
    assert list(decode_entries(b"".join(map(encode_entry, entries)))) == [
        EngineFailed(1, True, "a?"),
        LegQueued(1, "decode", 0, 1, "?", "m"),
    ]


async def test_workers_hear_each_other_and_forget_who_was_killed(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    heard: dict[int, list[bytes]] = {number: [] for number in (1, 2, 3)}
    transports = {number: UnixTransport(loop, tmp_path, number) for number in heard}
    for number, transport in transports.items():
        transport.start(heard[number].append)
    assert [name.rpartition(".")[2] for name in _names(tmp_path)] == ["sock"] * 3  # a name is one that can be reached
    await until(lambda: all(len(each._outgoing) == 2 for each in transports.values()))  # pyright: ignore[reportPrivateUsage]
    for number in range(500):
        transports[1].send(b"%d" % number + bytes(60_000))  # more than a socket takes at once
    transports[1].send(b"for one", 3)
    await until(lambda: b"for one" in heard[3])
    assert [int(each[:3].rstrip(b"\0")) for each in heard[2][:60]] == list(range(60))
    assert heard[1] == []
    await transports[2].close()
    (tmp_path / f"{9:016x}.sock").touch()  # of one that was killed
    await until(lambda: _names(tmp_path) == [f"{1:016x}.sock", f"{3:016x}.sock"])
    for number in (1, 3):
        await transports[number].close()
    assert not _names(tmp_path)
