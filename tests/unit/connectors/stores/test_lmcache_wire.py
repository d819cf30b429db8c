"""Tests the codec of the `lm://` protocol, against LMCache's own classes and against bytes that are no replies."""

import json
import struct
import subprocess
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_connectors.stores.lmcache.wire import (
    MAX_VALUE_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    LMCacheCommand,
    LMCacheEntry,
    LMCacheEntryKind,
    LMCacheNames,
    LMCacheProtocolError,
    decode_replies,
    decode_reply,
    encode_request,
)
from tests.support.connectors.lmcache_env import environment, python

THEIRS = """
import json, sys, torch
from lmcache.utils import parse_cache_key
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import ClientCommand, ClientMetaMessage, ServerMetaMessage, ServerReturnCode
answers = []
for command, name, nbytes, shape in json.load(sys.stdin):
    key = parse_cache_key(name)
    sent = ClientMetaMessage(
        ClientCommand[command], key, nbytes, MemoryFormat.BINARY, torch.uint8, torch.Size(shape)
    ).serialize()
    kept = ClientMetaMessage.deserialize(sent)
    replies = [
        ServerMetaMessage(ServerReturnCode.SUCCESS, kept.length, kept.fmt, kept.dtype, kept.shape),
        ServerMetaMessage(ServerReturnCode.SUCCESS, 0, MemoryFormat(1), torch.float16, torch.Size((0, 0, 0, 0))),
        ServerMetaMessage(ServerReturnCode.FAIL, 0, MemoryFormat(1), torch.float16, torch.Size((0, 0, 0, 0))),
    ]
    answers.append([sent.hex(), [reply.serialize().hex() for reply in replies], hash(key) == hash(kept.key)])
json.dump({"answers": answers, "request": ClientMetaMessage.packlength(), "reply": ServerMetaMessage.packlength()},
          sys.stdout)
"""
KEYS = st.text("ABCabc019._-", min_size=1, max_size=128)
ENTRIES = [
    (LMCacheEntryKind.VALUE, 4096, 2**62 - 1),
    (LMCacheEntryKind.RECORD, MAX_VALUE_BYTES, 2**31),
    (LMCacheEntryKind.GONE, 0, 0),
]
NUMBERS = st.integers(0, 2**31 - 1)


@pytest.mark.slow  # LMCache takes seconds to import; the tests against its server say the same in other words
def test_the_messages_are_those_of_lmcaches_own_classes() -> None:
    names = [LMCacheNames(prefix) for prefix in ("", "p", "x" * LMCacheNames.LONGEST_PREFIX)]
    asked = [
        (command, named(key), nbytes, LMCacheEntry(kind, nbytes, tag))
        for one in names
        for named in (one.value, one.record)
        for key in ("key", "k" * 128, "..")
        for kind, nbytes, tag in (
            (LMCacheEntryKind.VALUE, 4096, 2**62 - 1),
            (LMCacheEntryKind.RECORD, MAX_VALUE_BYTES, 2**31),
            (LMCacheEntryKind.GONE, 0, 0),
        )
        for command in LMCacheCommand
    ]
    words = [[command.name, name.decode().strip(), nbytes, entry.shape()] for command, name, nbytes, entry in asked]
    done = subprocess.run(
        [python(), "-c", THEIRS],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    theirs: dict[str, Any] = json.loads(done.stdout)
    assert (theirs["request"], theirs["reply"]) == (REQUEST_BYTES, REPLY_BYTES) == (186, 36)
    for (command, name, nbytes, entry), (sent, replies, same_key) in zip(asked, theirs["answers"], strict=True):
        assert encode_request(command, name, nbytes, entry).hex() == sent
        assert same_key
        kept, exists, missing = (decode_reply(bytes.fromhex(reply)) for reply in replies)
        whole = entry.kind is LMCacheEntryKind.VALUE or not nbytes
        assert (kept.found, kept.nbytes, kept.entry) == (True, nbytes, entry if whole else None)
        assert (exists.found, exists.nbytes, exists.entry) == (True, 0, None)
        assert (missing.found, missing.nbytes, missing.entry) == (False, 0, None)


@given(kind=st.sampled_from(LMCacheEntryKind), size=NUMBERS, tag=st.integers(0, 2**62 - 1))
def test_an_entry_comes_back_as_it_was_put(kind: LMCacheEntryKind, size: int, tag: int) -> None:
    entry = LMCacheEntry(kind, size, tag)
    nbytes = size if kind is LMCacheEntryKind.VALUE else 0
    reply = decode_reply(struct.pack("=9i", 200, nbytes, 4, 6, *entry.shape(), 0))
    assert (reply.found, reply.nbytes, reply.entry) == (True, nbytes, entry)


@given(st.binary(max_size=5 * REPLY_BYTES))
def test_bytes_from_a_stranger_are_replies_or_a_protocol_error(data: bytes) -> None:
    whole = data[: len(data) // REPLY_BYTES * REPLY_BYTES]
    try:
        replies = list(decode_replies(whole))
    except LMCacheProtocolError:
        return
    assert len(replies) == len(whole) // REPLY_BYTES
    assert all(reply.nbytes >= 0 for reply in replies)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 0, 4, 6, 0, 0, 0, 0, 0),
        (404, 0, 4, 6, 0, 0, 0, 0, 0),
        (200, -1, 4, 6, LMCacheEntryKind.VALUE, -1, 0, 0, 0),
        (400, 5, 1, 2, 0, 0, 0, 0, 0),
        struct.unpack("=9i", b"HTTP/1.1 400 Bad Request\r\nContent-Le"),
        struct.unpack("=9i", b"-ERR unknown command '\\x01', with ar"),
    ],
)
def test_what_no_lm_server_says_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(LMCacheProtocolError):
        decode_reply(struct.pack("=9i", *numbers))


@pytest.mark.parametrize(
    "numbers",
    [
        (200, 10, 5, 6, LMCacheEntryKind.VALUE, 10, 0, 0, 0),  # another format
        (200, 10, 4, 6, 77, 10, 0, 0, 0),  # another kind
        (200, 10, 4, 6, LMCacheEntryKind.VALUE, 11, 0, 0, 0),  # it says two sizes
        (200, 10, 4, 6, LMCacheEntryKind.RECORD, 10, 0, 0, 0),  # a record has no bytes
        (200, 0, 4, 6, LMCacheEntryKind.RECORD, -10, 0, 0, 0),
        (200, 0, 4, 6, LMCacheEntryKind.RECORD, 10, -1, 0, 0),
    ],
)
def test_what_somebody_else_has_stored_is_no_entry_of_ours(numbers: tuple[int, ...]) -> None:
    reply = decode_reply(struct.pack("=9i", *numbers))
    assert (reply.found, reply.entry) == (True, None)


@given(st.lists(KEYS, min_size=2, max_size=6, unique=True), st.sampled_from(["", "a", "b", "kvparams"]))
def test_every_key_and_prefix_has_names_of_its_own(keys: list[str], prefix: str) -> None:
    names = [
        named(key)
        for one in (LMCacheNames(prefix), LMCacheNames(f"{prefix}x"))
        for named in (one.value, one.record)
        for key in keys
    ]
    assert all(one != other for one, other in combinations(names, 2))
    assert {len(name) for name in names} == {150}
    for name in names:
        model, world, worker, digest, kind = name.decode().strip().split("@")
        assert model.split(":")[0] == "kvparams"
        assert (world, kind) == ("1", "uint8")
        assert worker in "01"
        assert f"{int(digest, 16):x}" == digest
