"""Writes the demo's tiny model by its name in tests: `python -m tests.interop.vllm.tiny_model FOLDER SEED DTYPE`."""

import sys

from demo.tiny_model import MAX_TOKENS, TINY, Shape, main, make_adapter, make_model

__all__ = ["MAX_TOKENS", "TINY", "Shape", "main", "make_adapter", "make_model"]

if __name__ == "__main__":
    main(sys.argv[1:])
