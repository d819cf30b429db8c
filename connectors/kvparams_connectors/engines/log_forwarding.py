"""Makes the log lines of this project appear in an engine's log.

Engines configure their own logger only (vLLM 0.28 and 0.32: `vllm`, which does not propagate; LMCache 0.5.6: each of
its own), so lines of other packages are lost below WARNING, and bare above.
"""

import logging
from typing import Final

__all__ = ["forward_logs"]

_OURS: Final = ("kvparams", "kvparams_connectors")


def forward_logs(engine: logging.Logger) -> None:
    """Gives our loggers the handlers and the level of the engine's logger.

    Nothing changes where somebody has configured ours or the root logger: our lines appear there. A second call changes
    nothing either, so no line appears twice.
    """
    for name in _OURS:
        ours = logging.getLogger(name)
        if ours.hasHandlers() or not engine.handlers:
            continue
        for handler in engine.handlers:
            ours.addHandler(handler)
        ours.propagate = False  # a root handler that comes later would write each line once more
        if ours.level == logging.NOTSET:
            ours.setLevel(engine.level)
