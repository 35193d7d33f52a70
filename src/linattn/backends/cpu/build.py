"""Compiles the shared library: plain C interface, no torch or Python headers, so any torch and Python can load it.

`pip install` runs it where a C++ compiler is; ``python -m linattn.backends.cpu.build`` builds it in place.
It imports nothing but the standard library, so that setup.py can load it by its path.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
NAME = "liblinattn_cpu" + {"Darwin": ".dylib", "Windows": ".dll"}.get(platform.system(), ".so")
# Products may fuse with sums; nothing else of -ffast-math, as infinities and tiny numbers must behave.
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-Wall")
OPTIMIZED = ("-O3",)
KERNELS = ("kernels", "elementwise", "selective", "decode", "layers")
# One object file of each an instruction set: name, floats in a vector, flags.
PLAIN = (("plain", 4, ()),)
X86 = (
    *PLAIN,
    ("avx2", 8, ("-mavx2", "-mfma")),
    ("avx512", 16, ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma")),
)


class BuildError(Exception):
    """No compiler, or one that fails."""


def compiler() -> list[str]:
    """$CXX, or the first of c++, g++, clang++ on the path."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: none of c++, g++, clang++ is on the path, and CXX is not set")


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr.strip()}")


def _openmp(cxx: list[str], folder: Path) -> list[str]:
    """The flag for OpenMP, where the compiler has it; without it the library runs on one thread."""
    probe = folder / "probe.cpp"
    probe.write_text("#include <omp.h>\nint f() { return omp_get_thread_num(); }\n", encoding="utf-8")
    try:
        _run([*cxx, "-fopenmp", "-fPIC", "-shared", str(probe), "-o", str(folder / "probe.so")])
    except BuildError:
        return []
    return ["-fopenmp"]


def build(target: Path = HERE / NAME, *, flags: Sequence[str] = OPTIMIZED, openmp: bool = True) -> Path:
    """Compile to ``target`` (replaced only by a complete library). Raises BuildError without a working compiler."""
    if platform.system() == "Windows":
        raise BuildError("not built on Windows")
    cxx = compiler()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parallel = _openmp(cxx, folder) if openmp else []
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        common = [*cxx, *FLAGS, *flags, *parallel, *(["-DLINATTN_X86"] if x86 else [])]
        objects = [str(folder / "interface.o")]
        _run([*common, "-c", str(SOURCES / "interface.cpp"), "-o", objects[0]])
        for level, lanes, machine in X86 if x86 else PLAIN:
            defines = [f"-DLINATTN_LANES={lanes}", *(f"-DLINATTN_{s.upper()}={level}_{s}" for s in KERNELS)]
            for source in KERNELS:
                objects.append(str(folder / f"{level}_{source}.o"))
                _run([*common, *machine, *defines, "-c", str(SOURCES / f"{source}.cpp"), "-o", objects[-1]])
        library = folder / NAME
        _run([*cxx, *flags, *parallel, "-shared", *objects, "-o", str(library)])
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(target.name + ".new")
        shutil.copy2(library, staged)
        os.replace(staged, target)
    return target


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as problem:
        sys.exit(str(problem))
