"""Every code block of the README runs; trainings and comparisons are cut short."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from linattn.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [body for language, body in BLOCKS if language == "python"]
LINES = [line.split("#")[0].strip() for language, body in BLOCKS if not language for line in body.splitlines()]
SHORT = {
    "train": ["--batch-size", "1", "--sequence-length", "32", "--d-model", "32", "--num-layers", "4"],
    "generate": [],
    "compare": ["--tokens", "16", "--budget", "5"],
    "list": [],
    "explain": [],
}


@pytest.mark.parametrize("block", PYTHON, ids=[f"block{n}" for n in range(len(PYTHON))])
def test_python(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_make() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [line.split()[1] for line in LINES if line.startswith("make ")]
    assert asked
    assert set(asked) <= targets


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line)[1:] for line in LINES if line.startswith("linattn ")]
    assert {command[0] for command in commands} == set(SHORT)
    for command in commands:
        verb, *rest = command
        text = " ".join(rest).replace("--minutes 1", "--steps 2 --data data.txt --out run").replace("RUN_FOLDER", "run")
        text = re.sub(r"--max-tokens \d+", "--max-tokens 3", text)
        words = text.replace("--prompt def", "--prompt d").split()
        assert main([verb, *words, *SHORT[verb]]) == 0, capsys.readouterr().err
