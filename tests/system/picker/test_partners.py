"""Tests prefill partners: the picker's choice reaches the sidecar, and nobody else's does."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.partner_claim import PARTNER_HEADER, PartnerClaim, PartnerSigner
from tests.support.gateway import Gateway, Picker, start_envoy, start_picker
from tests.support.processes import Processes, free_ports
from tests.support.stub_engine import Engine, StubEngines
from tests.support.waiting import until

LONG = "The quick brown fox jumps over the lazy dog. " * 200
AUDIENCE = "pool-a"
LLM_D = "x-prefiller-host-port"
FOLLOWED = 'kvparams_sidecar_partners_total{result="followed"}'


@dataclass(frozen=True, slots=True)
class PairSite:
    """Two prefill engines, a decode engine with a sidecar, a picker and Envoy."""

    stubs: tuple[StubEngines, StubEngines]
    sidecar_url: str
    picker: Picker
    gateway: Gateway
    client: httpx.AsyncClient
    keyring: SigningKeyring

    @property
    def engines(self) -> list[Engine]:
        """Returns all engines."""
        return [engine for stub in self.stubs for engine in stub.engines]

    @property
    def prefills(self) -> list[int]:
        """Returns the number of prompts that each prefill engine has computed."""
        return [each.counters.prefill for each in self.engines if each.role == "prefill"]

    @property
    def decoded(self) -> int:
        """Returns the number of requests for which the decode engine has fetched KV."""
        return sum(each.counters.decode_with_kv for each in self.engines if each.role == "decode")

    def prefill_endpoint(self, number: int) -> str:
        """Returns a prefill engine as claims name it."""
        return [f"127.0.0.1:{each.port}" for each in self.engines if each.role == "prefill"][number]

    def claim(self, endpoint: str, request_id: str, *, audience: str = AUDIENCE, at: float | None = None) -> str:
        """Returns the header value of a claim that is signed with the site's keys."""
        now = time.time() if at is None else at
        return PartnerSigner(lambda: self.keyring, audience, lambda: now).sign(PartnerClaim(request_id, endpoint))

    async def ask(self, url: str, number: int, headers: dict[str, str] | None = None) -> httpx.Response:
        """Sends a completion request whose prompt shares its beginning with all others."""
        body = {"model": "stub", "prompt": f"{LONG}{number}", "max_tokens": 2}
        return await self.client.post(f"{url}/v1/completions", json=body, headers=headers)

    async def metric(self, url: str, name: str) -> float:
        """Returns the value of a sample."""
        text = (await self.client.get(f"{url}/metrics")).text
        return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).rpartition(" ")[2])


StartPairSite = Callable[..., Awaitable[PairSite]]


@pytest.fixture
async def start_pair_site(processes: Processes, tmp_path: Path) -> AsyncIterator[StartPairSite]:
    """Starts a site whose sidecar and picker have these flags."""
    keys = tmp_path / "keys.json"
    keyring = SigningKeyring([SigningKey.new(int(time.time()) - 600)])
    keys.write_text(keyring.text())
    keys.chmod(0o600)
    signed = ("--sign-with", str(keys), "--audience", AUDIENCE)
    first = await StubEngines.start(prefill=[0], decode=[])
    second = await StubEngines.start(prefill=[0], decode=[0])
    engines = [*first.engines, *second.engines]
    client = httpx.AsyncClient(trust_env=False, timeout=20.0)
    prefill = [part for each in engines if each.role == "prefill" for part in ("--prefill", each.url)]
    decode = next(each.url for each in engines if each.role == "decode")

    async def start(
        partner: str, picker: tuple[str, ...] = (), *, known: int = 2, sidecar: tuple[str, ...] = ()
    ) -> PairSite:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).with_name("kvparams")), "sidecar", "--role", "decode", "--engine", decode]
        command += ["--port", str(port), *prefill[: 2 * known], *signed, "--prefill-partner", partner]
        command += ["--log-requests", "off", "--startup-check", "off", *sidecar]
        await asyncio.to_thread(processes.start, "sidecar", command, ready=[f"{url}/health"])
        flags = ("--policy", "cache_aware", "--tokenizer", "bytes", *signed, *prefill, "--decode", url, *picker)
        started = await asyncio.to_thread(start_picker, processes, "picker", *flags)
        gateway = await asyncio.to_thread(start_envoy, processes, tmp_path, "envoy", started.grpc_port, [port])
        return PairSite((first, second), url, started, gateway, client, keyring)

    yield start
    await client.aclose()
    await first.close()
    await second.close()


async def test_the_sidecar_uses_the_prefill_engine_that_the_picker_has_chosen(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("prefer")
    for number in range(6):
        assert (await site.ask(site.gateway.url, number)).status_code == 200
    assert sorted(site.prefills) == [0, 6]
    assert site.decoded == 6
    assert await site.metric(site.sidecar_url, FOLLOWED) == 6
    assert await site.metric(site.picker.url, "kvparams_picker_partners_total") == 6
    await until(lambda: _has_ended(site, 6))


async def test_a_sidecar_that_reads_no_header_chooses_itself(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("off")
    for number in range(6):
        assert (await site.ask(site.gateway.url, number)).status_code == 200
    assert site.prefills == [3, 3]  # control of the test above


async def test_a_forged_header_leads_nowhere(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("prefer")
    good = site.claim(site.prefill_endpoint(0), "good")
    payload, tag = good.split(".")
    other = SigningKeyring([SigningKey.new(int(time.time()) - 600)])
    forger = PartnerSigner(lambda: other, AUDIENCE, time.time)
    first = site.prefill_endpoint(0)
    forged = {
        "format": "127.0.0.1:1",
        "key": forger.sign(PartnerClaim("r-key", first)),
        "signature": f"{payload}.{tag[:-1]}{'0' if tag[-1] != '0' else '1'}",
        "audience": site.claim(first, "r-audience", audience="pool-b"),
        "expired": site.claim(first, "r-expired", at=time.time() - 120),
        "request": site.claim(first, "another"),
        "unknown": site.claim("127.0.0.1:1", "r-unknown"),
    }
    for number, (reason, value) in enumerate(forged.items()):
        headers = {PARTNER_HEADER: value, "x-request-id": f"r-{reason}"}
        assert (await site.ask(site.sidecar_url, number, headers)).status_code == 200, reason
        name = f'kvparams_sidecar_partners_total{{result="{reason}"}}'
        assert await site.metric(site.sidecar_url, name) == 1, reason
    assert min(site.prefills) == 3  # the sidecar's own choice, in turn
    # Control: what is signed is followed, once.
    headers = {PARTNER_HEADER: good, "x-request-id": "good"}
    before = site.prefills
    assert (await site.ask(site.sidecar_url, 10, headers)).status_code == 200
    assert site.prefills == [before[0] + 1, before[1]]
    assert (await site.ask(site.sidecar_url, 11, headers)).status_code == 200
    assert await site.metric(site.sidecar_url, 'kvparams_sidecar_partners_total{result="replay"}') == 1


async def test_a_sidecar_may_require_the_picker(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("require")
    refused = await site.ask(site.sidecar_url, 0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "partner_required")
    forged = await site.ask(site.sidecar_url, 0, {PARTNER_HEADER: "x.y"})
    assert forged.status_code == 403
    assert sum(site.prefills) == 0
    assert (await site.ask(site.gateway.url, 0)).status_code == 200  # control


async def test_a_client_of_the_gateway_cannot_name_a_partner(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("llm-d", ("--partner-header", "llm-d"))
    assert (await site.ask(site.gateway.url, 0)).status_code == 200
    chosen = site.prefills.index(1)
    named = site.prefill_endpoint(1 - chosen)
    for number in range(3):
        assert (await site.ask(site.gateway.url, number, {LLM_D: named})).status_code == 200
    assert site.prefills[chosen] == 4
    # Control: whoever reaches the sidecar itself can, since llm-d's header is not signed.
    assert (await site.ask(site.sidecar_url, 9, {LLM_D: named})).status_code == 200
    assert site.prefills[1 - chosen] == 1


async def test_a_partner_that_the_sidecar_does_not_know_is_not_used(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("prefer", known=1)
    value = site.claim(site.prefill_endpoint(1), "r1")
    answer = await site.ask(site.sidecar_url, 0, {PARTNER_HEADER: value, "x-request-id": "r1"})
    assert answer.status_code == 200
    assert site.prefills == [1, 0]


async def test_another_engine_computes_the_prompt_if_the_partner_fails(start_pair_site: StartPairSite) -> None:
    site = await start_pair_site("prefer", sidecar=("--probe", "300"))
    value = site.claim(site.prefill_endpoint(0), "r1")
    await site.stubs[0].close()
    answer = await site.ask(site.sidecar_url, 0, {PARTNER_HEADER: value, "x-request-id": "r1"})
    assert answer.status_code == 200
    assert site.prefills == [0, 1]
    assert await site.metric(site.sidecar_url, FOLLOWED) == 1


async def _has_ended(site: PairSite, requests: int) -> bool:
    return await site.metric(site.picker.url, 'kvparams_proxy_requests_total{outcome="ok"}') == requests
