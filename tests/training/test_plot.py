"""The loss curve."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from linattn.training import plot_loss, read_metrics


def metrics(folder: Path, evaluations: int = 2) -> Path:
    steps = [{"event": "step", "step": n, "bits_per_byte": 8 / n} for n in range(1, 200)]
    validation = [{"event": "evaluation", "step": 50 * n, "bits_per_byte": 5.0 - n} for n in range(evaluations)]
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in steps + validation))
    return file


@pytest.mark.parametrize("evaluations", [0, 2])
def test_a_picture_is_drawn(tmp_path: Path, evaluations: int) -> None:
    pytest.importorskip("matplotlib")
    plot_loss(metrics(tmp_path, evaluations), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_loss(tmp_path, tmp_path / "again.png")
    assert (tmp_path / "again.png").exists()


def test_bad_input_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read: No such file"):
        plot_loss(tmp_path, tmp_path / "loss.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no training step"):
        plot_loss(tmp_path, tmp_path / "loss.png")
    (tmp_path / "metrics.jsonl").write_text("gibberish\n{}\n")
    with pytest.raises(ValueError, match="cannot be read"):
        read_metrics(tmp_path)
    metrics(tmp_path)
    with pytest.raises(ValueError, match=r"loss\.png: cannot write"):
        plot_loss(tmp_path, tmp_path / "nowhere" / "loss.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'linattn\[cli\]'"):
        plot_loss(metrics(tmp_path), tmp_path / "loss.png")
