"""A small but real inference engine: the worked example of an engine that imports kvparams.

Read it in this order: `tokenizer`, `model`, `cache`, `sampling`, `sequence`, `engine`, `kv` (the only file that touches
the SDK), `requests`, `answers`, `api`.
"""
