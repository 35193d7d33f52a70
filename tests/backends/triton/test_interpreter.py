"""The laws in Triton's interpreter, without a GPU: in a process of their own, as it is chosen before the import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4), reason="Triton's interpreter breaks on numpy 2.4"
)
@pytest.mark.parametrize("module", ["test_laws.py", "test_fused.py"])
def test_laws_hold_in_the_interpreter(module: str) -> None:
    laws = Path(__file__).with_name(module)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(laws)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        command, env=environment | {"TRITON_INTERPRET": "1"}, cwd=laws.parents[3], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
