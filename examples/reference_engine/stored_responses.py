"""Keeps responses of `/v1/responses`, so that a later request can go on from one. Only this engine knows them."""

from collections import OrderedDict
from typing import Final

from reference_engine.answers import JSON
from reference_engine.ask import RequestError
from reference_engine.tokenizer import Message

__all__ = ["StoredResponses"]

_MOST: Final = 1024


class StoredResponses:
    """The last responses, by their ids. Used by the event loop alone."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[Message], JSON]] = OrderedDict()

    def keep(self, messages: list[Message], response: JSON) -> None:
        """Keeps a response, and the messages of its conversation up to and with it."""
        self._kept[str(response["id"])] = messages, response
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    def messages(self, response_id: str) -> list[Message]:
        """Returns the messages of a conversation.

        Raises:
            RequestError: the response is not known.
        """
        return self._find(response_id)[0]

    def response(self, response_id: str) -> JSON:
        """Returns a response. Raises as `messages` does."""
        return self._find(response_id)[1]

    def _find(self, response_id: str) -> tuple[list[Message], JSON]:
        if response_id not in self._kept:
            raise RequestError(f"Response with id '{response_id}' not found.", status=404, param="response_id")
        return self._kept[response_id]
