"""A small but real inference engine: the worked example of an engine that imports kvparams.

Read it in this order: `tokenizer`, `model`, `cache`, `grammar`, `sampling`, `sequence`, `engine`; `kv`, `handoff` and
`session` (which alone touch the SDK) and `transfers`; `ask`, `bodies`, `requests`, `answers`, `serving`, `api`.
"""
