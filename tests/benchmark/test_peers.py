"""Language models beside peers: everybody runs the same weights, and what isn't there is left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn import engine
from linattn.benchmark import models
from linattn.benchmark.contest import Line, hold
from linattn.benchmark.peers import (
    PACKAGES,
    Reader,
    llama_cpp_python,
    rwkv_package,
    transformers_mamba,
    versions,
)
from linattn.models import LanguageModel, ModelConfig

SIZES: dict[str, Any] = {"vocab_size": 96, "num_layers": 2, "initializer_range": 0.1}
MAMBA = ModelConfig(pattern="mamba", d_model=64, **SIZES)
RWKV = ModelConfig(pattern="rwkv7", d_model=128, **SIZES)
PEERS = {
    "transformers": (transformers_mamba, MAMBA), "rwkv": (rwkv_package, RWKV), "llama_cpp": (llama_cpp_python, MAMBA),
}  # fmt: skip
BOUND = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.05}


def lines(config: ModelConfig, peers: dict[str, Any], **options: Any) -> Iterator[Line]:
    options = {"prefill": {(40, "fp32"): {"peer": 2}}, "decode": {"fp32": {"peer": 3}}, "batch": 3} | options
    for held in hold(models.language_model("model", config, peers, **options), budget=60, rounds=1):
        yield from held


def fake(precisions: tuple[str, ...] = ("fp32",), wrong: float = 0.0) -> Any:
    """A peer that is ours, a little off, and that notes where it was given a folder."""
    seen: list[Path] = []

    def reader(model: LanguageModel, folder: Path, precision: str) -> Reader:
        seen.append(folder)
        read = models.ours(model, precision)

        def off(ids: Tensor) -> tuple[Tensor, Any]:
            logits, step = read(ids)
            return logits + wrong * logits.abs().max(), lambda ids: step(ids) * (1 + wrong)

        return off

    return SimpleNamespace(PRECISIONS=dict.fromkeys(precisions), reader=reader, seen=seen)


@pytest.mark.skipif(engine.explain("gla").backend != "cpu", reason="steps are compiled by the CPU library")
def test_the_contests_of_a_language_model() -> None:
    right, wrong = fake(("fp32", "bf16")), fake(wrong=0.1)
    found = list(lines(MAMBA, {"peer": right, "wrong": wrong}, decode={"fp32": {"peer": 3}, "bf16": {}, "int8": {}}))
    assert [(line.work, line.peer, line.target) for line in found] == [
        ("prefill fp32, T=40", "peer", 2),
        ("prefill fp32, T=40", "wrong", None),
        ("decode fp32", "peer", 3),
        ("decode fp32", "wrong", None),
        ("decode fp32", "read bandwidth", 0.8),
        ("decode bf16", "peer", None),
        ("decode bf16", "read bandwidth", 0.65),
        ("decode int8", "read bandwidth", 0.55),
        ("decode fp32, batch 3", "ours, batch 1", 5),
        ("decode fp32, batch 3", "peer", None),
        ("decode fp32, batch 3", "wrong", None),
    ]
    for line in found:
        assert line.note == ""
        assert line.rate == "tokens/s"
        assert line.ratio > 0
        assert line.error < next(bound for precision, bound in BOUND.items() if precision in line.work)
        if line.peer == "wrong":
            assert line.peer_error == pytest.approx(0.1, rel=1e-3)
    (folder,) = set(right.seen) | set(wrong.seen)
    assert len(right.seen) == 2  # once a precision
    assert not folder.exists()


def test_read_bandwidth_counts_every_weight_once(tmp_path: Path) -> None:
    subject = models._Subject(MAMBA, {}, tmp_path)
    entrant = subject.bandwidth("fp32")
    read = entrant.call().numel() ** 2 * 4
    parameters = sum(p.numel() for p in subject.model.parameters())  # the head is the embedding
    conv, recurrent = 2 * 3 * 128 * 4, 2 * 128 * 16 * 4
    assert read / entrant.units == 4 * parameters + 2 * (conv + recurrent)
    untied = models._Subject(RWKV, {}, tmp_path).bandwidth("int8")
    model = LanguageModel(RWKV)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - model.embedding.weight.numel()
    state = 2 * (128 + 128 + 2 * 64 * 64) * 4
    assert read / untied.units == matrices + 4 * vectors + 2 * state


@pytest.mark.parametrize("package", PEERS)
def test_a_peer_that_is_not_installed(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    peer, config = PEERS[package]
    with pytest.raises(ModuleNotFoundError, match=package):
        peer.reader(LanguageModel(config), tmp_path, "fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("package", "config"),
    [("transformers", MAMBA), ("rwkv", RWKV), ("llama_cpp", MAMBA), ("llama_cpp", RWKV)],
    ids=["transformers", "rwkv", "llama_cpp mamba", "llama_cpp rwkv7"],
)
def test_a_peer_runs_our_weights(package: str, config: ModelConfig, tmp_path: Path) -> None:
    pytest.importorskip("gguf" if package == "llama_cpp" else package)
    peer: Any = PEERS[package][0]
    subject = models._Subject(config, {package: peer}, tmp_path)
    for precision in peer.PRECISIONS:
        reader = subject.reader(package, precision)
        assert subject.reading(reader, 8).error() < BOUND[precision]
        assert subject.stepping(reader, 1).error() < BOUND[precision]
        if package != "rwkv":
            assert subject.stepping(reader, 2).error() < BOUND[precision]
    if package == "rwkv":
        with pytest.raises(ValueError, match="ids: got a batch of 2"):
            reader(subject.ids[:, :4].expand(2, -1))


def test_llama_cpp_refuses_what_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    reader = llama_cpp_python.reader(models._Subject(MAMBA, {}, tmp_path).model, tmp_path, "fp32")
    with pytest.raises(ValueError, match="ids: got"):
        reader(torch.zeros(17, 2, dtype=torch.int64))


def test_training_beside_the_chunked_backend() -> None:
    contest = models.training("gated_linear_attention", d_model=16, num_layers=1, batch=2, tokens=16)
    ((line,),) = hold([contest], budget=60, rounds=1)
    assert (line.peer, line.rate, line.note) == ("chunked torch", "tokens/s", "")
    assert max(line.error, line.peer_error) < 1e-4


def test_preferring_a_backend_ends() -> None:
    before = engine.PREFERRED
    with models.preferring("chunked"):
        assert engine.explain("gla").backend == "chunked"
    assert before == engine.PREFERRED


def test_versions() -> None:
    found = versions()
    assert tuple(found) == PACKAGES
    assert all(version is None or version[0].isdigit() for version in found.values())
