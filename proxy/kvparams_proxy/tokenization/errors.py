"""Errors of tokenizers and chats that cannot be used."""

__all__ = ["TokenizerError", "UnsupportedChatError"]


class TokenizerError(ValueError):
    """A tokenizer cannot be used."""


class UnsupportedChatError(ValueError):
    """The chat cannot be rendered here.

    It has media, a template of the client's own, or a fault that is the engine's to name.
    """
