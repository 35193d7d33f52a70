"""Checkpoints: what was saved comes back, and nothing that happens to a writer or a file does harm."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from linattn import checkpoints, registry
from linattn.checkpoints import ByteTokenizer
from linattn.checkpoints.assemble import assemble, distinct_tensors
from linattn.checkpoints.files import previous
from linattn.checkpoints.native import step_folder, steps
from linattn.models import LanguageModel, ModelConfig

SMALL = ModelConfig(d_model=32, num_layers=2)


def model(seed: int = 0, config: ModelConfig = SMALL) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(config)


def same(a: LanguageModel, b: LanguageModel) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_comes_back_with_its_dtype(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    saved = model(config=ModelConfig(d_model=32, num_layers=1, tie_embeddings=tied)).to(dtype)
    checkpoints.save(tmp_path / "m", saved)
    loaded = checkpoints.load(tmp_path / "m")
    assert loaded.config == saved.config
    assert same(saved, loaded)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert len(list(loaded.parameters())) == len(list(saved.parameters()))  # still tied


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    saved = model()
    checkpoints.save(tmp_path / "m", saved)
    with safe_open(tmp_path / "m" / "model.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert stored == sum(tensor.numel() for tensor in distinct_tensors(saved).values())
    assert stored < sum(tensor.numel() for tensor in saved.state_dict().values())


def test_a_loaded_model_trains_and_owes_the_file_nothing(tmp_path: Path) -> None:
    saved = model()
    checkpoints.save(tmp_path / "m", saved)
    loaded = checkpoints.load(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    loaded(torch.zeros(1, 4, dtype=torch.int64))[0].sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=1.0).step()
    assert not same(saved, loaded)


def test_loading_leaves_the_random_state_alone(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "m", model())
    before = torch.get_rng_state()
    checkpoints.load(tmp_path / "m")
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "m", model(), tokenizer=ByteTokenizer())
    assert {file.name for file in (tmp_path / "m").iterdir()} == {"config.json", "model.safetensors"}


def test_the_tokenizer_comes_back(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "m", model(), tokenizer=ByteTokenizer())
    assert isinstance(checkpoints.load_tokenizer(tmp_path / "m"), ByteTokenizer)
    checkpoints.save(tmp_path / "m", model())
    with pytest.raises(ValueError, match="tokenizer: got None"):
        checkpoints.load_tokenizer(tmp_path / "m")


def test_a_hugging_face_tokenizer_is_copied_into_the_checkpoint(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    checkpoints.save(tmp_path / "m", model(), tokenizer=checkpoints.HuggingFaceTokenizer(tmp_path / "t.json"))
    (tmp_path / "t.json").unlink()
    assert checkpoints.load_tokenizer(tmp_path / "m").encode("b") == [1]


def test_a_run_folder_means_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 123456789):
        checkpoints.save(step_folder(tmp_path, step), model(step % 97))
    (tmp_path / ".step-99999999999.new").mkdir()
    assert same(checkpoints.load(tmp_path), model(123456789 % 97))
    assert same(checkpoints.load(step_folder(tmp_path, 2)), model(2))
    newest = step_folder(tmp_path, 123456789)
    shutil.copytree(newest, previous(newest))
    assert steps(tmp_path)[123456789] == newest
    shutil.rmtree(newest)  # as between two renames
    assert same(checkpoints.load(tmp_path), model(123456789 % 97))


def test_saving_replaces_a_checkpoint_and_only_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for seed in range(3):
        checkpoints.save(folder, model(seed))
        assert same(checkpoints.load(folder), model(seed))
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds thesis\.txt, which belongs to no checkpoint"):
        checkpoints.save(folder, model())
    with pytest.raises(ValueError, match="is a file"):
        checkpoints.save(folder / "thesis.txt", model())
    assert (folder / "thesis.txt").read_text() == "years of work"


class Killed(BaseException):
    """The process is gone: nothing it had in mind is done any more."""


@contextmanager
def killed_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The process dies before its ``moment``-th change of the file system; later ones never happen. Yields a log."""
    log: list[str] = []

    def mortal(name: str, change: Callable[..., object]) -> Callable[..., object]:
        def attempt(*args: object, **kwargs: object) -> object:
            if len(log) >= moment:
                raise Killed
            log.append(name)
            return change(*args, **kwargs)

        return attempt

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, mortal(name, getattr(os, name)))
        for name in ("write_text", "touch", "chmod"):
            patch.setattr(Path, name, mortal(name, getattr(Path, name)))
        patch.setattr("linattn.checkpoints.files.save_file", mortal("save_file", save_file))
        yield log


@pytest.mark.parametrize("existing", [False, True])
def test_killed_at_any_moment_one_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    old, new, newer = model(1), model(2), model(3)
    outcomes = []
    for moment in range(100):
        folder = tmp_path / f"{moment}" / "m"
        folder.parent.mkdir()
        if existing:
            checkpoints.save(folder, old)
        with killed_at(moment, monkeypatch) as log:
            try:
                checkpoints.save(folder, new)
                alive = True
            except Killed:
                alive = False
        try:
            found = checkpoints.load(folder)
            outcomes.append("old" if same(found, old) else "new" if same(found, new) else "broken")
        except ValueError:
            outcomes.append("none")
        checkpoints.save(folder, newer)  # and whatever was left behind is no obstacle
        assert same(checkpoints.load(folder), newer)
        assert [file.name for file in folder.parent.iterdir()] == ["m"]
        if alive:
            break
    before = "old" if existing else "none"
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, key=[before, "new"].index)  # raises for any other outcome
    assert "rename" in log
    assert len(outcomes) > 8


def test_a_failing_rename_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    checkpoints.save(folder, model(1))
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(ValueError, match="Input/output error; what was there before is untouched"):
            checkpoints.save(folder, model(2))
    assert same(checkpoints.load(folder), model(1))
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def edit(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "m: does not exist, wanted a checkpoint folder"),
        (lambda folder: (folder / "config.json").unlink(), r"m: holds neither config\.json nor a folder step-"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors: cannot be read: No such file"),
        (cut("config.json", 40), r"config\.json: cannot be read"),
        (cut("config.json", 0), r"config\.json: cannot be read"),
        (cut("model.safetensors", 0), r"model\.safetensors: cannot be read"),
        (cut("model.safetensors", 100), r"model\.safetensors: cannot be read"),
        (cut("model.safetensors", 20000), r"model\.safetensors: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json: got a JSON list"),
        (edit(lambda config: config.pop("format")), r"config\.json: got model_type=None and no format"),
        (edit(lambda config: config.update(version=2)), r"config\.json: version: got 2, wanted 1"),
        (edit(lambda config: config.update(color="red")), r"config\.json: unknown color"),
        (edit(lambda config: config.pop("model")), r"config\.json: model: got None"),
        (edit(lambda config: config["model"].update(depth=3)), r"config\.json: model: .*depth"),
        (edit(lambda config: config["model"].update(d_model="wide")), r"config\.json: model: "),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    checkpoints.save(tmp_path / "m", model())
    spoil(tmp_path / "m")
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path / "m")


def test_weights_of_another_config_are_listed_and_none_is_loaded(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "m", model())
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    first, second, *_ = sorted(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors["something.else"] = tensors.pop(first)
    tensors[second] = tensors[second][:-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match="not the weights of this config") as caught:
        checkpoints.load(tmp_path / "m")
    assert f"missing {first}" in str(caught.value)
    assert "left over something.else" in str(caught.value)
    assert f"other shapes: {second} [" in str(caught.value)


def test_a_long_list_of_differences_is_cut_short(tmp_path: Path) -> None:
    own = distinct_tensors(model())
    extra: dict[str, Tensor] = {f"extra{number:02d}": torch.zeros(1) for number in range(50)}
    with pytest.raises(ValueError, match="extra05 and 44 more"):
        assemble(SMALL, own | extra, tmp_path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    own = distinct_tensors(model())
    with pytest.raises(ValueError, match=r"not floating: norm\.weight torch\.int8"):
        assemble(SMALL, own | {"norm.weight": own["norm.weight"].to(torch.int8)}, tmp_path)


def test_a_model_can_be_loaded_in_another_dtype(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "m", model())
    loaded = checkpoints.load(tmp_path / "m", dtype=torch.float64)
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert same(loaded.float(), model())
    with pytest.raises(ValueError, match=r"dtype: got torch\.int8, wanted a floating dtype"):
        checkpoints.load(tmp_path / "m", dtype=torch.int8)


@pytest.mark.parametrize("mechanism", registry.names(composite=True))
def test_every_mechanism_comes_back_with_its_marks(tmp_path: Path, mechanism: str) -> None:
    saved = model(config=ModelConfig(d_model=32, num_layers=2, pattern=mechanism))
    checkpoints.save(tmp_path / "m", saved)
    loaded = checkpoints.load(tmp_path / "m")
    assert loaded.config == saved.config
    assert same(saved, loaded)
    marks = [[p.__dict__ for p in of.parameters()] for of in (loaded, saved)]
    assert marks[0] == marks[1]
    ids = torch.randint(256, (1, 7))
    assert torch.equal(loaded(ids)[0], saved(ids)[0])
