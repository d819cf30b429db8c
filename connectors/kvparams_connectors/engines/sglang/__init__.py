"""Our stores under SGLang's HiCache: `KVParamsHiCache` in `backend.py`.

Everything but `backend.py` and `transfer_stats.py` knows nothing of SGLang's classes and is tested without it.
"""
