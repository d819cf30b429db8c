"""Compiles the C files of `kvparams/native` into wheels and into editable installations.

Where they cannot be compiled, the build says so, and the wheel is pure Python. `HATCH_BUILD_NO_HOOKS=true` asks for
that. As a script it compiles them among the sources again; with `--sanitize COMMAND` it runs a command with a build
that has sanitizers, and then makes the ordinary one again.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["NativeHook", "build_extension"]

_SOURCES: Final = Path("kvparams", "native")
_MODULE: Final = "kvparams.native._native"
_ARGUMENTS: Final = ["-O2", "-g0", "-fvisibility=hidden"]
_SANITIZERS: Final = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
_SANITIZED: Final = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "PYTHONMALLOC": "malloc"}
"""Python keeps what it has for its whole life, so leaks are not looked for; its own pools would hide an overrun."""


class NativeHook(BuildHookInterface[Any]):
    """See the module. hatchling 1.33, builders/hooks/plugin/interface.py."""

    _into: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the extension before a wheel is built; for an editable one in its place among the sources."""
        into = self._into = Path(tempfile.mkdtemp(prefix="kvparams-native-"))
        root = Path(self.root)
        try:
            made = build_extension(root, into)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.app.display_warning(f"kvparams is built without native code: {type(error).__name__}: {error}")
            return
        if version == "editable":
            _place(made, root)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(made)] = str(_SOURCES / made.name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was built besides the wheel."""
        if self._into is not None:
            shutil.rmtree(self._into)


def _place(made: Path, root: Path) -> None:
    """Puts the extension among the sources. Whoever runs the old one keeps it."""
    placed = root / _SOURCES / made.name
    beside = placed.with_suffix(f".{os.getpid()}")
    shutil.copy(made, beside)
    beside.replace(placed)


def build_extension(root: Path, into: Path, arguments: list[str] | None = None) -> Path:
    """Compiles the extension; returns the file.

    Args:
        root: of the repository.
        into: an empty folder.
        arguments: for the compiler and the linker, in addition.

    Raises:
        BaseException: whatever setuptools raises where something is missing; SystemExit is among it.
    """
    from setuptools import Distribution, Extension  # only who compiles needs these
    from setuptools.command.build_ext import build_ext

    more = arguments or []
    extension = Extension(
        _MODULE,
        sorted(str(path) for path in (root / _SOURCES).glob("*.c")),
        depends=[str(path) for path in (root / _SOURCES).rglob("*.h")],
        extra_compile_args=[*_ARGUMENTS, *more],
        extra_link_args=more,
        py_limited_api=True,
    )
    command = build_ext(Distribution({"ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(into), str(into / "objects")
    command.ensure_finalized()
    command.run()
    (made,) = into.rglob("_native*.so")
    return made


def main() -> int:
    """Compiles among the sources; see the module."""
    root = Path(__file__).parent
    command = sys.argv[2:] if sys.argv[1:2] == ["--sanitize"] else []
    status = 0
    with tempfile.TemporaryDirectory(prefix="kvparams-native-") as work:
        if command:
            _place(build_extension(root, Path(work, "sanitized"), _SANITIZERS), root)
            library = subprocess.run(
                ["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
            ).stdout.strip()
            status = subprocess.run(
                command, env=os.environ | {"LD_PRELOAD": library} | _SANITIZED, check=False
            ).returncode
        _place(build_extension(root, Path(work, "ordinary")), root)
    return status


if __name__ == "__main__":
    sys.exit(main())
