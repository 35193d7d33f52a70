"""Write docs/proof.md: how far each mechanism is from implementations that are not ours, as tests/proof measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from make_docs import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proof.md"
WHAT = ("logits", "token by token", "gradients", "state")
HEAD = """# Proof

<!-- Written by `make proof`; edit tests/proof instead. -->

How far linattn is from implementations that are not ours, on the same random (or, where it says so, trained) weights:
the largest difference of any number, over the largest number of its tensor. "plain maths" is the paper's recurrence as
a loop in float64 that shares no code with the library. `make test` holds every figure to its bound.
"""


def main() -> int:
    """Run tests/proof and write the page; the tests' exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "proof.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "proof")]
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"LINATTN_PROOF": str(report)}, check=False
        ).returncode
        if code:
            return code
        worst: dict[tuple[str, str, str], float] = {}
        for line in report.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            key = (found["mechanism"], found["oracle"], found["what"])
            worst[key] = max(worst.get(key, 0.0), found["error"])
    pairs = sorted({key[:2] for key in worst})
    rows = [
        (*pair, *(f"{worst[*pair, what]:.1e}" if (*pair, what) in worst else "" for what in WHAT)) for pair in pairs
    ]
    PAGE.write_text(f"{HEAD}\n{table(('mechanism', 'against', *WHAT), rows)}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
