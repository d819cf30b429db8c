"""Our stores under SGLang's HiCache: `KVParamsHiCache` in `backend.py`.

Everything but `backend.py` and `tally.py` knows nothing of SGLang's classes and is tested without it.
"""
