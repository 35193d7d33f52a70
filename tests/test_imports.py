"""The import direction, and what `import linattn` may pull in."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("check_imports", ROOT / "tools" / "check_imports.py")
assert _spec is not None
assert _spec.loader is not None
check_imports = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_imports)


def test_the_package_keeps_the_direction(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_imports.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "line", "breach"),
    [
        ("engine.py", "from linattn.mechanisms import retention", "engine may not import mechanisms"),
        ("engine.py", "from . import mechanisms", "engine may not import mechanisms"),
        ("engine.py", "def f():\n    import linattn.cli.train", "engine may not import cli"),
        ("layers/norms.py", "from ..models import decoder", "layers may not import models"),
        ("layers/norms.py", "from linattn import __version__", "linattn.__version__ has no place"),
        ("backends/reference.py", "from . import chunked", "backends/reference may not import backends/chunked"),
        ("backends/_token.py", "from .chunked import f", "backends/_token may not import backends/chunked"),
        ("elsewhere.py", "import torch", "elsewhere has no place"),
    ],
)
def test_a_breach_is_found(
    module: str, line: str, breach: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "linattn" / module
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert check_imports.main(tmp_path / "linattn") == 1
    assert breach in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mechanisms/retention.py", "from linattn.layers.norms import RMSNorm"),
        ("backends/reference.py", "from ._token import token"),
        ("backends/_token.py", "from linattn.backends._protocol import Backend"),
        ("backends/__init__.py", "from linattn.backends import chunked, reference"),
        ("models/decoder.py", "from .config import ModelConfig"),
        ("__init__.py", "from linattn._version import __version__\nfrom linattn import models"),
    ],
)
def test_a_downward_import_passes(module: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "linattn" / module
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert check_imports.main(tmp_path / "linattn") == 0


def test_the_core_needs_no_extra() -> None:
    """`pip install linattn` brings torch, safetensors and numpy only: importing it must not reach for more."""
    extras = {"tyro", "rich", "matplotlib", "tokenizers"}
    code = f"import sys, linattn; sys.exit(', '.join({extras} & set(sys.modules)) or None)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
