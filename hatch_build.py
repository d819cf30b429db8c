"""Compiles the modules on a request's path into the wheel, if HATCH_BUILD_HOOK_ENABLE_CUSTOM=true asks for it.

The modules are ordinary Python, and pyproject.toml names them. Cython compiles them as they are. The wheel has both
forms, and Python imports the compiled one. Where they cannot be compiled, the build says so, and the wheel is an
ordinary one.
"""

import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["CompilingHook", "compiled"]

_ROOTS: Final = ("proxy/",)
"""Folders that are no packages."""
_PLAIN: Final = {"language_level": 3, "annotation_typing": False, "binding": True}
"""What a module does must not depend on who runs it: annotations promise nothing, functions can be looked into."""


class CompilingHook(BuildHookInterface[Any]):
    """See the module. hatchling 1.33, builders/hooks/plugin/interface.py."""

    _into: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is built. An editable one has none of this: sources that change would not be looked at."""
        if version != "standard":
            return
        into = self._into = Path(tempfile.mkdtemp(prefix="kvparams-compiled-"))
        root = Path(self.root)
        sources = [str(path.relative_to(root)) for pattern in self.config["modules"] for path in root.glob(pattern)]
        try:
            made = compiled(root, sorted(sources), into)
        except Exception as error:  # noqa: BLE001  no Cython, no compiler, no Python.h, another Cython than expected
            self.app.display_warning(f"kvparams is built without compiled modules: {type(error).__name__}: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(path): str(path.relative_to(into)) for path in made})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it was built."""
        if self._into is not None:
            shutil.rmtree(self._into)


def compiled(root: Path, sources: list[str], into: Path) -> list[Path]:
    """Compile modules; the files that hold them, each at its package's place in `into`.

    Args:
        root: of the repository.
        sources: paths below it.
        into: an empty folder.

    Raises:
        Exception: whatever Cython and setuptools raise where something is missing.
    """
    from setuptools import Distribution, Extension  # only who compiles needs these
    from setuptools.command.build_ext import build_ext

    cython: Any = import_module("Cython.Build")  # its types are partly unknown

    modules = [Extension(_module(source), [str(root / source)], extra_compile_args=["-g0"]) for source in sources]
    with tempfile.TemporaryDirectory() as work:
        made = cython.cythonize(modules, build_dir=work, compiler_directives=_PLAIN, quiet=True)
        command = build_ext(Distribution({"ext_modules": made}))
        command.build_lib, command.build_temp = str(into), work
        command.ensure_finalized()
        command.run()
    return sorted(path for path in into.rglob("*") if path.is_file())


def _module(source: str) -> str:
    for root in _ROOTS:
        source = source.removeprefix(root)
    return source.removesuffix(".py").replace("/", ".")
