"""Compiles the CPU backend's library where a C++ compiler is; without one everything else is installed all the same.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = "linattn.backends.cpu"


def _builder() -> ModuleType:
    """linattn/backends/cpu/build.py, by its path: importing linattn would need torch."""
    path = Path(__file__).resolve().parent / "src" / "linattn" / "backends" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("linattn_cpu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = _builder()


class BuildLibrary(build_ext):
    """A plain shared library: no module of Python's, so its name carries no version of Python's."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], BUILDER.NAME))

    def build_extension(self, ext: Extension) -> None:
        try:
            BUILDER.build(Path(self.get_ext_fullpath(ext.name)))
        except BUILDER.BuildError as error:
            self.warn(f"the CPU backend is left out: {error}")

    def copy_extensions_to_source(self) -> None:
        """An editable installation: the library goes beside its sources, if it was built."""
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            if built.exists():
                self.copy_file(str(built), str(Path("src") / self.get_ext_filename(ext.name)), level=self.verbose)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: source for built, source in super().get_output_mapping().items() if Path(built).exists()}


class PlatformWheel(bdist_wheel):
    """For one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


commands: dict[str, Any] = {"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel}
setup(ext_modules=[Extension(f"{PACKAGE}.library_file", sources=[])], cmdclass=commands)
