"""The ways to coordinate prefill and decode, one file each.

A manager is a generator of steps (`kvparams.routing.plan`); an executor runs them, in a proxy or beside an engine.
Third parties register theirs in the entry-point group `kvparams.managers` (`kvparams.routing.managers.factory`). A
manager does no I/O: it is told how each step ended and says what comes next.
"""
