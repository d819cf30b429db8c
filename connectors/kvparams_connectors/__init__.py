"""Stores on one side, engines on the other, the connector between.

The one rule: importing this package opens nothing and imports no torch; `kvparams_connectors.connector` does.
"""

from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import Capabilities, Code, GetOp, KVStore, LaneStore, PutOp, Result, open_store

__all__ = [
    "Arena",
    "Capabilities",
    "Code",
    "GetOp",
    "Job",
    "KVStore",
    "LaneStore",
    "PutOp",
    "Result",
    "Slot",
    "open_store",
]
