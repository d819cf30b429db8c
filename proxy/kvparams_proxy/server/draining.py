"""Drain state of the proxy: set by the server before it shuts down, read by `/health`."""

__all__ = ["DrainState"]


class DrainState:
    """A flag that is raised once."""

    __slots__ = ("is_draining",)

    def __init__(self) -> None:
        self.is_draining = False
        """Whether no further requests should be sent to this proxy."""
