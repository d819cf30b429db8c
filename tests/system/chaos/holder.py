"""Takes the lock of a file store in the middle of a change, says so, and does nothing more until it is killed.

    holder.py PATH SIZE

It creates the file if there is none; every process uses the same size.
"""

import sys
import time
from pathlib import Path

from kvparams_connectors.stores.file.file_map import open_map
from kvparams_connectors.stores.file.index import FileIndex

if __name__ == "__main__":
    deadline = time.monotonic() + 10.0
    index = FileIndex(open_map(Path(sys.argv[1]), int(sys.argv[2]), None, timeout_s=10.0), deadline)
    with index.locked(deadline):
        sys.stdout.write("held\n")
        sys.stdout.flush()
        time.sleep(60.0)
