"""Whether the proxy is about to shut down: said by the server, read by `/health`."""

__all__ = ["Draining"]


class Draining:
    """A flag that is raised once."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False
        """Whether no further requests should be sent to this proxy."""
