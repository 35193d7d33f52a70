"""`linattn generate` with checkpoints of other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from proof.rwkv_official import weights

from linattn import checkpoints
from linattn.cli import main
from linattn.models import LanguageModel, ModelConfig


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_model_of_another_library_with_its_tokenizer_or_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.save(str(tmp_path / "t.json"))
    config = ModelConfig(d_model=32, num_layers=1, pattern="mamba2", mlp_ratio=0, norm_eps=1e-5)
    known = checkpoints.HuggingFaceTokenizer(tmp_path / "t.json")
    for layout in ("transformers", "mamba_ssm"):
        folder = tmp_path / layout
        checkpoints.save(folder, LanguageModel(config), tokenizer=known, layout=layout)
        assert main(["generate", str(folder), "--prompt", "b", "--max-tokens", "3", "--seed", "0", "--json"]) == 0
        assert said(capsys)["prompt_tokens"] == 1
        (folder / "tokenizer.json").unlink()
        assert main(["generate", str(folder), "--prompt", "b"]) == 2
        assert "has no tokenizer.json" in capsys.readouterr().err
        options = ["--tokenizer", "bytes", "--max-tokens", "3", "--json"]
        assert main(["generate", str(folder), "--prompt", "äb", *options]) == 0
        assert said(capsys)["prompt_tokens"] == 3


def test_a_file_of_rwkv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyrwkv_tokenizer")
    tensors = weights("7")
    for name in ("emb.weight", "head.weight"):
        tensors[name] = torch.randn(65536, tensors[name].shape[1]) / 8
    torch.save(tensors, tmp_path / "rwkv.pth")
    options = ["--prompt", "Hello, world", "--max-tokens", "8", "--seed", "1", "--json"]
    assert main(["generate", str(tmp_path / "rwkv.pth"), *options]) == 0
    finished = said(capsys)
    assert (finished["tokens"], finished["prompt_tokens"], finished["state_grows"]) == (8, 3, False)
