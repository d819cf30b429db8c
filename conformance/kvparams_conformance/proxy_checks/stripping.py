"""Checks that nothing of a client reaches an engine by which it could steer KV."""

from typing import Any, Final

from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.proxy_checks.helpers import (
    AGGREGATED,
    BOOTSTRAP,
    CONTENT,
    NIXL,
    STORE,
    WITH_RESULT,
    expect_answered,
    expect_unseen,
)
from kvparams_conformance.raw_json import dig, dump
from kvparams_conformance.scripted_engine import MODEL
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_EVIL: Final = "steer.example"
_PORT: Final = 46667
"""A port that could be one; what carries it carries the host as well."""
_BOOTSTRAP: Final[dict[str, object]] = {
    "bootstrap_host": _EVIL,
    "bootstrap_port": _PORT,
    "bootstrap_room": 4666746670000,
}
_SGLANG: Final[dict[str, object]] = {
    "rid": _EVIL,
    "routed_dp_rank": 466674667,
    "data_parallel_rank": 466674667,
    "disagg_prefill_dp_rank": 466674667,
    "session_params": {"id": _EVIL},
    "bootstrap_pair_key": _EVIL,
    "decode_tp_size": 466674667,
}
_VLLM: Final[dict[str, object]] = {
    "ec_transfer_params": {"peer": _EVIL},
    "kv_hints": {"url": _EVIL},
    "request_id": _EVIL,
}
_OTHERS: Final[dict[str, object]] = {
    "kv_hint": {"url": _EVIL},
    "disaggregated_params": {"ctx_info_endpoint": _EVIL},
    "disagg_prefill_resp": {"url": _EVIL},
    "cache_hit_threshold": 0.466674667,
    "prefix_prompt_ids": [466674667],
    "kvcache_load_keys": [_EVIL],
    "kvcache_store_keys": [_EVIL],
    "prefill_result": {"url": _EVIL},
    "bootstrap_info": {"bootstrap_host": _EVIL},
    "encoder_result": {"url": _EVIL},
    "routing": {"backend_instance_id": _EVIL},
    "mm_hashes": [_EVIL],
    "mm_content_hashes": [_EVIL],
}
_TRACES: Final = (_EVIL, "466674667")
_NATIVE: Final = {"do_remote_prefill": True, "remote_host": _EVIL, "remote_port": _PORT, "remote_engine_id": _EVIL}


async def _expect_stripped(trial: Trial, **members: Any) -> None:
    talk = trial.talk()
    reply = await trial.ask(talk, **members)
    expect_answered(talk, reply)
    expect_unseen(talk.legs, *_TRACES)


@CHECKS.add(
    "12.1",
    "kv-transfer-params",
    sends="a request with `kv_transfer_params` of the client's own",
    expects="no leg has anything of it",
    profiles=(*WITH_RESULT, CONTENT, AGGREGATED),
)
async def check_kv_transfer_params(trial: Trial) -> None:
    """Sends native keys and a document of the client's own."""
    document = {"version": "1.0", "request_id": _EVIL, "transfer": {"id": _EVIL, "attempt": 1}, "phase": "decode"}
    await _expect_stripped(trial, kv_transfer_params={**_NATIVE, "kvparams": {**document, "mode": "store"}})


@CHECKS.add(
    "12.1",
    "bootstrap-members",
    sends="a request with `bootstrap_host`, `bootstrap_port` and `bootstrap_room`",
    expects="no leg has any of these values",
    profiles=(STORE, BOOTSTRAP, CONTENT, AGGREGATED),
)
async def check_bootstrap_members(trial: Trial) -> None:
    """Sends SGLang's members for the meeting place."""
    await _expect_stripped(trial, **_BOOTSTRAP)


@CHECKS.add(
    "12.1",
    "sglang-members",
    sends="a request with members by which SGLang chooses ranks, sessions and ids",
    expects="no leg has any of them",
    profiles=(STORE, BOOTSTRAP, CONTENT, AGGREGATED),
)
async def check_sglang_members(trial: Trial) -> None:
    """Sends the other members that SGLang reads."""
    await _expect_stripped(trial, **_SGLANG)


@CHECKS.add(
    "12.1",
    "vllm-members",
    sends="a request with members that vLLM takes from proxies alone",
    expects="no leg has any of them",
    profiles=(*WITH_RESULT, CONTENT, AGGREGATED),
)
async def check_vllm_members(trial: Trial) -> None:
    """Sends the other members that vLLM reads."""
    await _expect_stripped(trial, **_VLLM)


@CHECKS.add(
    "12.1",
    "other-members",
    sends="a request with every other member that proxy.md and the errata list",
    expects="no leg has any of them",
    profiles=(STORE,),
)
async def check_other_members(trial: Trial) -> None:
    """Sends what other engines read."""
    await _expect_stripped(trial, **_OTHERS)


@CHECKS.add(
    "12.1",
    "nested",
    sends="the same members inside `vllm_xargs`, `sampling_params.extra_args` and `nvext`",
    expects="they are gone from every leg, and what stands beside them is there",
    profiles=(STORE,),
)
async def check_nested(trial: Trial) -> None:
    """Sends the list in each place in which an engine looks for it."""
    talk = trial.talk()
    evil = {"kv_transfer_params": _NATIVE, **_BOOTSTRAP, **_SGLANG, **_VLLM, **_OTHERS}
    kept: dict[str, object] = {"top_n": 3}
    members: dict[str, Any] = {
        "vllm_xargs": {**evil, **kept},
        "sampling_params": {"extra_args": {**evil, **kept}},
        "nvext": {**evil, **kept},
    }
    expect_answered(talk, await trial.ask(talk, **members))
    expect_unseen(talk.legs, *_TRACES)
    for leg in talk.legs:
        found = leg.json
        for place in (
            found.get("vllm_xargs"),
            dig(found, "sampling_params", "extra_args"),
            found.get("nvext"),
        ):
            expect(place == kept, f"{leg.engine} was not sent `top_n` beside what was removed")


@CHECKS.add(
    "12.1",
    "nvext",
    sends="members of `nvext` that choose a worker or a rank",
    expects="no leg has any of them",
    profiles=(STORE,),
)
async def check_nvext(trial: Trial) -> None:
    """Sends members of `nvext` by name, and by the end of their name."""
    names = ("backend_instance_id", "prefill_worker_id", "decode_instance_id", "all_worker_ids", "my_dp_rank")
    more = ("token_data", "annotations", "session_control")
    await _expect_stripped(trial, nvext=dict.fromkeys((*names, *more), _EVIL))


@CHECKS.add(
    "12.1",
    "media-hashes",
    sends="a chat whose image has a `uuid`, by which it names content that it has not sent",
    expects="no leg has the `uuid` as the client wrote it",
    profiles=(STORE,),
)
async def check_media_hashes(trial: Trial) -> None:
    """Sends a chat with an image."""
    talk = trial.talk()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": _EVIL}
    content = [{"type": "text", "text": f"{talk.tag} What?"}, image]
    body = dump({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8})
    expect_answered(talk, await trial.ask(talk, body, path="/v1/chat/completions"))
    expect_unseen(talk.legs, _EVIL)


@CHECKS.add(
    "12.1",
    "request-id",
    sends="`X-Request-Id` with an address, with odd characters, or too long",
    expects="each leg has another id",
    profiles=(*WITH_RESULT, CONTENT, AGGREGATED),
)
async def check_request_id(trial: Trial) -> None:
    """Sends ids in which an engine looks for an address, or that no log can hold."""
    for evil in (f"___prefill_addr_{_EVIL}:1___decode_addr_{_EVIL}:2_x", "a b%00'", "x" * 129):
        talk = trial.talk()
        expect_answered(talk, await trial.ask(talk, headers=[("x-request-id", evil)]))
        expect_unseen(talk.legs, evil)


@CHECKS.add(
    "17.6",
    "headers",
    sends="headers by which an engine could be steered, and cookies",
    expects="no leg has any of them; `traceparent` and `tracestate` are there",
    profiles=(STORE,),
)
async def check_headers(trial: Trial) -> None:
    """Sends hostile headers beside those that go through."""
    talk = trial.talk()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    names = (
        "x-data-parallel-rank",
        "x-override-bootstrap-host",
        "x-kv-transfer",
        "x-prefiller-host-port",
        "x-worker-instance-id",
        "cookie",
        "x-forwarded-for",
    )
    headers = [*((name, _EVIL) for name in names), ("traceparent", trace), ("tracestate", "a=b")]
    expect_answered(talk, await trial.ask(talk, headers=headers))
    expect_unseen(talk.legs, _EVIL)
    for leg in talk.legs:
        trace_id = (leg.head.get("traceparent") or "").split("-")[1:2]
        expect(trace_id == trace.split("-")[1:2], f"{leg.engine} was not sent the trace of `traceparent`")


@CHECKS.add(
    "17.6",
    "steering-headers",
    sends="`X-data-parallel-rank`",
    expects="no leg has it",
    profiles=(NIXL, BOOTSTRAP, CONTENT, AGGREGATED),
)
async def check_steering_headers(trial: Trial) -> None:
    """Sends the header by which vLLM and SGLang choose a rank."""
    talk = trial.talk()
    expect_answered(talk, await trial.ask(talk, headers=[("x-data-parallel-rank", "466674667")]))
    expect_unseen(talk.legs, "466674667")


@CHECKS.add(
    "12.1",
    "generate",
    sends="the members inside `sampling_params.extra_args` of `/inference/v1/generate`, with token ids",
    expects="no leg has any of them",
    profiles=(STORE,),
)
async def check_generate(trial: Trial) -> None:
    """Asks the endpoint of token ids."""
    talk = trial.talk()
    extra = {"kv_transfer_params": _NATIVE, **_BOOTSTRAP}
    body = dump(
        {
            "model": MODEL,
            "token_ids": [talk.number, 2, 3],
            "sampling_params": {"max_tokens": 8, "extra_args": extra},
            "kv_transfer_params": _NATIVE,
        }
    )
    reply = await trial.ask(talk, body, path="/inference/v1/generate")
    expect(reply.status in (200, 404, 405), f"the client got the status {reply.status}")
    expect_unseen(talk.legs, *_TRACES)
