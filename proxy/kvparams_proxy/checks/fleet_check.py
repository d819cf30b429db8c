"""`kvparams proxy --check` checks that every engine matches its entry, and that KV gets from prefill to decode.

Each engine is asked what it serves, each bootstrap server who its engine is; then one small request goes through each
pair of engines, by the same plan as a client's, and decode is asked where it had the prompt from. Nothing is guessed:
an engine that does not answer a question is reported as such.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

from kvparams.dialects.interface import BootstrapInfo, Dialect
from kvparams.dialects.registry import load_tables_and_errors
from kvparams.instances import Instance, Role
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.signing.signer import Signer
from kvparams_proxy.checks.engine_check import CheckFinding, EngineInfo, ask_bootstrap, ask_engine
from kvparams_proxy.checks.model_check import check_models
from kvparams_proxy.checks.pair_check import PairTrial
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.fleet.bootstrap_servers import BootstrapServers
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits

__all__ = ["check_fleet"]


async def check_fleet(
    entries: Sequence[InstanceSpec],
    dialects: Mapping[str, Dialect],
    limits: UpstreamLimits,
    signer: Signer | None = None,
    settings: Settings | None = None,
) -> AsyncGenerator[CheckFinding]:
    """Looks at every engine, the entries for models, and every pair, and yields what is found.

    Args:
        entries: the engines, their keys and certificates loaded.
        dialects: by name.
        limits: of their answers and connections.
        signer: signs what they are told of KV.
        settings: where entries for models are, if there are any.
    """
    async with _opened(entries, limits) as engines:
        known: dict[Instance, EngineInfo] = {}
        places: dict[Instance, BootstrapInfo] = {}
        bootstraps = BootstrapServers(dialects, limits)
        pins = HandoffVerifier(load_tables_and_errors()[0])
        served: dict[str, tuple[str, ...]] = {}
        for instance, pool in engines.items():
            finding, found = await ask_engine(instance, pool)
            yield finding
            if found is None:
                continue
            served[instance.id] = found.models
            server = bootstraps.for_instance(instance)
            if server is not None:
                finding, place = await ask_bootstrap(instance, server)
                yield finding
                if place is None:
                    continue
                places[instance] = place
            known[instance] = found
        for finding in () if settings is None else check_models(settings, served):
            yield finding
        for prefill, decode in _pairs(list(engines)):
            if decode is None:
                said = (
                    f"no decode engine has the connector {prefill.dialect}, so no engine could fetch its KV; "
                    "correct `connector`, or add a decode engine"
                )
                yield CheckFinding("error", prefill.id, said)
            elif prefill in known and decode in known:
                trial = PairTrial(engines, dialects, places, prefill, decode, known, signer, pins)
                yield await trial.run()


@asynccontextmanager
async def _opened(
    entries: Sequence[InstanceSpec], limits: UpstreamLimits
) -> AsyncGenerator[dict[Instance, UpstreamConnectionPool]]:
    pools = {
        entry.make_instance(): UpstreamConnectionPool(
            entry.url,
            limits,
            entry.credentials.tls,
            server_name=entry.credentials.server_name,
            key=entry.credentials.key,
            rank=None if entry.rank is None else entry.rank.index,
        )
        for entry in entries
    }
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def _pairs(instances: Sequence[Instance]) -> list[tuple[Instance, Instance | None]]:
    """Returns pairs that have each engine at least once; None where a prefill engine has no partner."""
    found: list[tuple[Instance, Instance | None]] = []
    for dialect in dict.fromkeys(instance.dialect for instance in instances):
        ours = [instance for instance in instances if instance.dialect == dialect]
        prefill = [instance for instance in ours if instance.role is Role.PREFILL]
        decode = [instance for instance in ours if instance.role is Role.DECODE]
        if not decode:
            found += ((instance, None) for instance in prefill)
        elif prefill:
            numbers = range(max(len(prefill), len(decode)))
            found += ((prefill[number % len(prefill)], decode[number % len(decode)]) for number in numbers)
    return found
