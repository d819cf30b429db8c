"""Who runs a leg: one policy to a file. A third party adds its own in the entry-point group `kvparams.policies`."""
