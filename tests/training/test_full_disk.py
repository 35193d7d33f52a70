"""A full disk gives one clear error and harms no checkpoint."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from linattn import checkpoints
from linattn.models import LanguageModel, ModelConfig
from linattn.training import Saved, TrainConfig, Trainer, load_corpus


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond ``room`` bytes: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def model() -> LanguageModel:
    return LanguageModel(ModelConfig(d_model=32, num_layers=1))


def trainer(folder: Path) -> Trainer:
    (folder / "text.txt").write_text("the quick brown fox\n" * 100)
    config = TrainConfig(steps=4, batch_size=2, sequence_length=16, checkpoint_every=2, device="cpu")
    return Trainer(model(), load_corpus(folder / "text.txt"), config, folder / "run")


@pytest.mark.parametrize("room", [0, 100, 5000])
@pytest.mark.parametrize("existing", [False, True])
def test_of_a_checkpoint_nothing_or_the_old_one_is_left(tmp_path: Path, room: int, existing: bool) -> None:
    folder, old = tmp_path / "m", model()
    if existing:
        checkpoints.save(folder, old)
    with (
        full_disk(room),
        pytest.raises(ValueError, match=r"m: cannot write the checkpoint: .*; what was there before is"),
    ):
        checkpoints.save(folder, model())
    assert [file.name for file in tmp_path.iterdir()] == ["m"] * existing
    if existing:
        loaded = checkpoints.load(folder)
        assert all(torch.equal(a, b) for a, b in zip(old.parameters(), loaded.parameters(), strict=True))


def test_a_training_stops_and_can_be_resumed(tmp_path: Path) -> None:
    run = trainer(tmp_path).run()
    while not isinstance(next(run), Saved):
        pass
    with full_disk(10_000), pytest.raises(ValueError, match="step-00000004: cannot write the checkpoint"):
        list(run)
    resumed = Trainer.resume(tmp_path / "run")
    assert resumed.step == 2
    list(resumed.run())
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "metrics.jsonl", "step-00000002", "step-00000004",
    ]  # fmt: skip


def test_metrics_that_cannot_be_written_stop_the_training(tmp_path: Path) -> None:
    run = trainer(tmp_path).run()
    with (
        full_disk(500),
        pytest.raises(ValueError, match=r"metrics\.jsonl: cannot write: .*; checkpoints are untouched"),
    ):
        list(run)
