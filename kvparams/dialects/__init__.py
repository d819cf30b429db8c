"""Dialects: what engine connectors and routers write into `kv_transfer_params`, one table each."""
