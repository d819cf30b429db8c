"""Whether the proxy is about to shut down: said by the server, read by `/health`."""

__all__ = ["DrainState"]


class DrainState:
    """A flag that is raised once."""

    __slots__ = ("is_draining",)

    def __init__(self) -> None:
        self.is_draining = False
        """Whether no further requests should be sent to this proxy."""
