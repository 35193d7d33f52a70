"""RWKV's own files: every version, its vocabulary by size, and what is said of those that are none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from proof.rwkv_official import VERSIONS, VOCABULARY, logits, weights
from safetensors.torch import save_file
from torch import Tensor

import linattn
from linattn import checkpoints
from linattn.checkpoints import RwkvTokenizer
from linattn.models import LanguageModel, ModelConfig

IDS = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_every_version(tmp_path: Path, version: str) -> None:
    tensors = {name: tensor.double() for name, tensor in weights(version).items()}
    torch.save(tensors, tmp_path / "rwkv.pth")
    with torch.no_grad():
        loaded = linattn.load(tmp_path / "rwkv.pth")
        wanted = logits(version, tensors, IDS[0].tolist())
        torch.testing.assert_close(loaded(IDS)[0][0], wanted, rtol=1e-6, atol=1e-6)
        save_file(tensors, tmp_path / "rwkv.safetensors")
        assert torch.equal(linattn.load(tmp_path / "rwkv.safetensors")(IDS)[0], loaded(IDS)[0])


def test_the_dtype_is_the_file_s_or_the_one_asked_for(tmp_path: Path) -> None:
    torch.save({name: tensor.bfloat16() for name, tensor in weights("7").items()}, tmp_path / "rwkv.pth")
    loaded = linattn.load(tmp_path / "rwkv.pth")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded(IDS)[0].isfinite().all()
    wide = linattn.load(tmp_path / "rwkv.pth", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def spoilt(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = weights("7") | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(1)}, r"rwkv\.pth: tensors: got no emb\.weight, wanted a checkpoint of RWKV"),
        (spoilt(**{"blocks.1.att.w1": None}), r"rwkv\.pth: tensors: got no blocks\.1\.att\.w1"),
        (spoilt(**{"model.norm.weight": torch.zeros(1)}), r"got model\.norm\.weight beside those of RWKV-7"),
        (spoilt(**{"blocks.0.att.k_k": torch.zeros(1, 1, 7)}), r"rwkv\.pth: "),
        (spoilt(**{"ln_out.bias": torch.zeros(7)}), r"rwkv\.pth: .*other shapes: norm\.bias \[7\] instead of \[128\]"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    torch.save(tensors, tmp_path / "rwkv.pth")
    with pytest.raises(ValueError, match=message):
        linattn.load(tmp_path / "rwkv.pth")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rwkv.pth"
    torch.save(weights("6"), file)
    os.truncate(file, 100_000)
    with pytest.raises(ValueError, match=r"rwkv\.pth: cannot be read"):
        linattn.load(file)
    file.write_text("<html>not found</html>")
    with pytest.raises(ValueError, match=r"rwkv\.pth: cannot be read"):
        linattn.load(file)
    with pytest.raises(ValueError, match=r"none\.pth: does not exist, wanted a checkpoint folder"):
        linattn.load(tmp_path / "none.pth")


def with_vocabulary(file: Path, size: int) -> Path:
    tensors = weights("7")
    for name in ("emb.weight", "head.weight"):
        tensors[name] = tensors[name][:1].repeat(size, 1)
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, file)
    return file


def test_the_vocabulary_is_told_by_its_size(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("pyrwkv_tokenizer")
    assert isinstance(linattn.load_tokenizer(with_vocabulary(tmp_path / "world.pth", 65536)), RwkvTokenizer)
    pile = with_vocabulary(tmp_path / "pile.pth", 50277)
    with pytest.raises(ValueError, match=r"pile\.pth: has no tokenizer\.json; name a tokenizer yourself"):
        linattn.load_tokenizer(pile)
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    shutil.move(tmp_path / "t.json", tmp_path / "20B_tokenizer.json")
    assert linattn.load_tokenizer(pile).encode("b") == [1]


@pytest.mark.parametrize("version", VERSIONS)
def test_written_back_it_is_the_same_file(tmp_path: Path, version: str) -> None:
    tensors = weights(version)
    torch.save(tensors, tmp_path / "rwkv.pth")
    loaded = linattn.load(tmp_path / "rwkv.pth")
    checkpoints.save(tmp_path / "new" / "again.pth", loaded, layout="rwkv")
    again = torch.load(tmp_path / "new" / "again.pth", weights_only=True)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-7)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["again.pth"]


def test_what_a_file_of_rwkv_cannot_say_is_not_written(tmp_path: Path) -> None:
    small = {"d_model": 64, "num_layers": 2, "vocab_size": 8}
    for options, message in (
        ({"pattern": "gla"}, r"layout: got 'rwkv' for 'gla', wanted a model of rwkv4"),
        ({"pattern": "rwkv6", "mixers": {"rwkv6": {"group_norm_eps": 1e-5}}}, r"model: got .*eps=1e-05.*wanted what"),
        ({"pattern": "rwkv6", "mixers": {"rwkv6": {"expand_k": 0.5}}}, r"model: got .*out_features=32"),
        ({"pattern": "rwkv7", "norm": "rms"}, "model: got one that is no RWKV-7"),
        ({"pattern": "rwkv7", "tie_embeddings": True}, "model: got one that is no RWKV-7"),
    ):
        model = LanguageModel(ModelConfig(**small, **options))
        with pytest.raises(ValueError, match=message):
            checkpoints.save(tmp_path / "rwkv.pth", model, layout="rwkv")
    model = LanguageModel(ModelConfig(**small, pattern="rwkv4"))
    with pytest.raises(ValueError, match="is a folder, wanted a file"):
        checkpoints.save(tmp_path, model, layout="rwkv")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(ModelConfig(d_model=64, num_layers=1, vocab_size=8, pattern="rwkv4"))
    file = tmp_path / "rwkv.pth"
    checkpoints.save(file, model, layout="rwkv")
    before = file.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("linattn.checkpoints.formats.write_pickle", full)
    with pytest.raises(ValueError, match=r"rwkv\.pth: cannot write the checkpoint: No space left.*is untouched"):
        checkpoints.save(file, model, layout="rwkv")
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
