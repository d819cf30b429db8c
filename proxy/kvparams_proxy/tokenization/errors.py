"""The error of a tokenizer that an operator names and that cannot be used."""

__all__ = ["TokenizerError"]


class TokenizerError(ValueError):
    """A tokenizer cannot be used."""
