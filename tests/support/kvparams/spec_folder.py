"""Names the folder of the protocol version that the tests compare this project with; no other file names it."""

from pathlib import Path
from typing import Final

__all__ = ["DIALECTS", "EXTENSIONS", "ROOT", "SPEC", "VECTORS"]

ROOT: Final = Path(__file__).parents[3]
SPEC: Final = ROOT / "spec" / "1.0"
VECTORS: Final = SPEC / "vectors"
DIALECTS: Final = ROOT / "spec" / "dialects"
"""The dialects as they are known today, beside what a version froze of them."""
EXTENSIONS: Final = ROOT / "spec" / "extensions"
"""What this project says in `extensions`."""
