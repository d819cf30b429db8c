"""Our stores as a second tier of vLLM's OffloadingConnector: `KVParamsTier` in `tier.py`, configured in `settings.py`.

What is no line to vLLM (`chunks`, `asking`, `moving`, `naming`) knows nothing of it and is tested without it.
"""
