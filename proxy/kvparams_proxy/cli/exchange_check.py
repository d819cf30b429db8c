"""`kvparams proxy --check` looks at where the proxies of a site meet: who is there, and whether they fit together."""

import asyncio
from collections.abc import AsyncGenerator
from secrets import randbits
from time import time
from typing import Final

from kvparams.replication.entry_codec import decode_heartbeat
from kvparams.replication.messages import (
    AuthenticationError,
    MessageAuthenticator,
    MessageKind,
)
from kvparams_proxy.checks.engine_check import CheckFinding
from kvparams_proxy.config.share_url import ShareURL
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.coordination.exchange import HEARTBEAT_S

__all__ = ["check_exchange"]

_LISTEN_S: Final = 3 * HEARTBEAT_S
_CONNECT_S: Final = 5.0


async def check_exchange(sharing: SharingSettings, policy: str, models: str = "") -> AsyncGenerator[CheckFinding]:
    """Listens for a while, and yields what is found.

    Args:
        sharing: where the proxies meet.
        policy: that of this proxy.
        models: the mark of what holds for single models here, see `mark_of_models`.
    """
    url = sharing.place
    if not isinstance(url, ShareURL):
        return
    from kvparams_proxy.coordination.valkey_transport import ValkeyTransport

    loop = asyncio.get_running_loop()
    transport = ValkeyTransport(loop, url, randbits(63) + 1)
    heard = _Heard(MessageAuthenticator(sharing.site, sharing.secrets()))
    transport.start(heard.take)
    who = str(url)
    try:
        deadline = loop.time() + _CONNECT_S
        while not transport.is_connected:
            if loop.time() > deadline:
                said = f"the server cannot be reached ({transport.problem}); proxies go on without it, each by itself"
                yield CheckFinding("error", who, said)
                return
            await asyncio.sleep(0.05)
        await asyncio.sleep(_LISTEN_S)
    finally:
        await transport.close()
    if heard.strangers:
        said = (
            f"{heard.strangers} messages were made with keys that this proxy does not have: another site uses this "
            "prefix, or its proxies have another --share-keys file"
        )
        yield CheckFinding("error", who, said)
    if heard.unreadable:
        said = f"{heard.unreadable} messages cannot be read: clocks differ by more than a minute, or others write there"
        yield CheckFinding("error", who, said)
    others = {str(info.get("policy")) for info in heard.infos.values()} - {policy}
    if others:
        said = (
            f"other proxies route by {', '.join(sorted(others))} and this one by {policy}: give all the same --policy"
        )
        yield CheckFinding("error", who, said)
    if any(info.get("models", "") != models for info in heard.infos.values()):
        said = (
            "other settings of single models are in force at other proxies: give all the same `models` in the fleet "
            "file, and restart those whose file has changed a `policy` there"
        )
        yield CheckFinding("error", who, said)
    versions = {str(info.get("version")) for info in heard.infos.values()}
    said = f"the server answers; {len(heard.infos)} proxies are heard"
    if versions:
        said += f", of version {', '.join(sorted(versions))}"
    yield CheckFinding("ok", who, said)


class _Heard:
    """Collects the messages that are heard."""

    def __init__(self, authenticator: MessageAuthenticator) -> None:
        self._authenticator = authenticator
        self.infos: dict[int, dict[str, object]] = {}
        self.strangers = 0
        self.unreadable = 0

    def take(self, data: bytes) -> None:
        """Takes one message."""
        try:
            message = self._authenticator.open(data, time())
            if message.kind == MessageKind.HEARTBEAT:
                self.infos[message.sender] = decode_heartbeat(message.payload)[0]
        except AuthenticationError:
            self.strangers += 1
        except ValueError:
            self.unreadable += 1
