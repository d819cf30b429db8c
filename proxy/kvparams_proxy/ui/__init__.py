"""The live page at `/ui`, and the snapshots that it and `kvparams top` show."""
