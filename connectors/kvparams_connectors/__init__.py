"""Stores on one side, engines on the other, the connector between.

Importing this package opens nothing and imports neither numpy nor torch, so that the author of a store needs neither;
`kvparams_connectors.arena` and the stores that are shipped import numpy, `kvparams_connectors.transfer.connector` torch
as well.
"""

from kvparams_connectors.jobs import Job
from kvparams_connectors.store import BlockingStore, Capabilities, GetOp, KVStore, PutOp, Result, ResultCode, open_store

__all__ = [
    "BlockingStore",
    "Capabilities",
    "GetOp",
    "Job",
    "KVStore",
    "PutOp",
    "Result",
    "ResultCode",
    "open_store",
]
