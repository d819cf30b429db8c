"""The commands of the proxy: `kvparams proxy`, `sidecar`, `keys` and `explain-route`."""
