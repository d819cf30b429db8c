"""Our connector inside vLLM: `KVParamsConnector` in `connector.py`.

The decisions (`requests`, `scheduling`, `transfers`) know nothing of vLLM and are tested without it.
"""
