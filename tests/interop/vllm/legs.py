"""Sends the two legs of a request to engines directly, as the proxy would."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import httpx

from demo.client import NO_CERTIFICATES
from tests.interop.vllm.engines import ANSWER_S

__all__ = ["decode", "prefill", "tokens_of"]


def _document(request_id: str, phase: str, **members: object) -> dict[str, object]:
    document = {"version": "1.0", "request_id": request_id, "transfer": {"id": request_id, "attempt": 1}}
    return {"kvparams": {**document, "phase": phase, "mode": "store", **members}}


def _body(prompt: Sequence[int], max_tokens: int, params: object) -> dict[str, object]:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, "kv_transfer_params": params}


def prefill(
    url: str,
    prompt: Sequence[int],
    max_tokens: int = 1,
    *,
    headers: Mapping[str, str] | None = None,
    **members: object,
) -> dict[str, Any]:
    """The document that a prefill engine answers with."""
    params = _document(uuid4().hex, "prefill", **members)
    response = httpx.post(
        f"{url}/v1/completions",
        json=_body(prompt, max_tokens, params),
        headers=headers,
        timeout=ANSWER_S,
        verify=NO_CERTIFICATES,
    )
    assert response.status_code == 200, response.text
    return response.json()["kv_transfer_params"]["kvparams"]


def decode(
    url: str, prompt: Sequence[int], found: dict[str, Any], max_tokens: int = 12, **members: object
) -> httpx.Response:
    """The decode leg's answer, to what `prefill` returned."""
    kept = {name: found[name] for name in ("load_keys", "producer", "prefix") if name in found}
    params = _document(found["request_id"], "decode", **{**kept, **members})
    return httpx.post(
        f"{url}/v1/completions", json=_body(prompt, max_tokens, params), timeout=ANSWER_S, verify=NO_CERTIFICATES
    )


def tokens_of(response: httpx.Response) -> list[int]:
    """Of an answer that is none of an error."""
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]
