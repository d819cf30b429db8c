"""The engines' endpoints that are served here.

Generating ones are split between prefill and decode (`one_token_changes.py`); others are passed to one engine as they
are. An endpoint has the same path for clients and engines.
"""

from dataclasses import dataclass
from typing import Final, Literal

from kvparams.instances import Role
from kvparams_proxy.errors import ErrorForm

__all__ = ["ENDPOINTS", "APIEndpoint", "EndpointKind"]

EndpointKind = Literal["completions", "chat", "generate", "messages", "responses", "other"]
"""`messages` is Anthropic's API, `responses` is OpenAI's newer one. `other` endpoints are not split."""


@dataclass(frozen=True, slots=True)
class APIEndpoint:
    """An endpoint of the engines' API."""

    path: str
    kind: EndpointKind
    role: Role | None = None
    """Who answers alone; None where the work is split."""
    sends_done_event: bool = True
    """Whether its streams end with a known last event: one that ends without it was cut off."""
    error_form: ErrorForm = "openai"
    """The form of its errors."""

    @property
    def pins_rank(self) -> bool:
        """True if engines run its requests on the data-parallel rank that they name.

        vLLM 0.32.0 does not for `/v1/responses` (openai/responses/serving.py): it chooses the rank itself.
        """
        return self.kind != "responses"

    @property
    def supports_streaming(self) -> bool:
        """True if it answers `"stream": true` with a stream."""
        return self.role is not Role.PREFILL


ENDPOINTS: Final = (
    APIEndpoint("/v1/completions", "completions"),
    APIEndpoint("/v1/chat/completions", "chat"),
    APIEndpoint("/inference/v1/generate", "generate"),
    APIEndpoint("/v1/messages", "messages", error_form="anthropic"),
    APIEndpoint("/v1/responses", "responses", error_form="responses"),
    APIEndpoint("/v1/messages/count_tokens", "other", Role.PREFILL, error_form="anthropic"),
    *(
        APIEndpoint(path, "other", Role.PREFILL)
        for path in (
            "/v1/embeddings",
            "/v1/rerank",
            "/rerank",
            "/v2/rerank",
            "/v1/score",
            "/score",
            "/classify",
            "/pooling",
            "/tokenize",
            "/detokenize",
        )
    ),
)
"""Source: vLLM 0.32.0 entrypoints. A decode engine that answers alone computes the prompt too."""
