"""The package holds the policies that choose a leg's instance, one to a file; plugins use `kvparams.policies`."""
