"""What `kvparams validate`, `kvparams translate` and `kvparams explain` do."""
