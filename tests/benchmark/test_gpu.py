"""The GPU benchmark, as far as a machine without a GPU can run it: its cases, its errors, its rows."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linattn.benchmark import gpu
from linattn.benchmark.gpu_peers import PEERS, Peer
from linattn.mechanisms.gated_linear_attention import gated_linear_attention


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def median(call: Callable[[], object]) -> float:
        call()
        return 2.0

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "median", median)
    monkeypatch.setattr(gpu, "host", lambda who, tensors: 2.0)


def small(name: str) -> gpu.Case:
    case = next(case for case in gpu.CASES if case.name == name)
    return replace(case, B=1, T=min(case.T, 20), H=2, K=8, V=6)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", [case.name for case in gpu.CASES])
def test_every_case_is_right(name: str) -> None:
    case = small(name)
    rows = list(gpu.measure(case, bandwidth=1.0, peers={}))
    assert [row.work for row in rows] == ["forward", *["forward + backward"] * case.trains, *["host"] * (case.T == 1)]
    for row in rows:
        assert row.note.startswith("ours not on Triton: it runs on CUDA devices")
        if row.work != "host":
            assert row.of_floor > 0
        if row.error is not None:
            assert row.error < 2e-2


@pytest.mark.usefixtures("on_cpu")
def test_peers_stand_beside_ours(tmp_path: Path) -> None:
    def load() -> Callable[..., object]:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> object:
            return gated_linear_attention(q, k, v, g.exp().log())

        return call

    def refuse() -> Callable[..., object]:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> object:
            if torch.is_grad_enabled():
                raise RuntimeError("no backward on this machine")
            return gated_linear_attention(q, k, v, g)

        return call

    peers = {
        Peer("good", "torch", load): "",
        Peer("half", "torch", refuse): "",
        Peer("slow", "torch", load): "not ready within 3 s",
    }
    rows = list(gpu.measure(small("vector decay (GLA)"), bandwidth=1.0, peers=peers))
    assert [(row.peer, row.work) for row in rows[:2]] == [("good", "forward"), ("good", "forward + backward")]
    assert all(row.ratio == 1 and row.peer_error < 1e-2 and "peer" not in row.note for row in rows[:3])
    assert rows[3].peer_ms is rows[3].peer_error is None
    assert rows[3].note.endswith("peer: RuntimeError: no backward on this machine")
    assert all(row.note.endswith("peer: not ready within 3 s") for row in rows[4:])
    pytest.importorskip("triton")
    file = tmp_path / "gpu.csv"
    file.write_text("case,shape\nof an older version,B1\n")
    gpu.write(file, [replace(row, case="no decay") for row in rows[:1]])
    gpu.write(file, rows)
    lines = list(csv.DictReader(file.read_text().splitlines()))
    assert [line["case"] for line in lines] == ["no decay"] + ["vector decay (GLA)"] * 6
    assert [line["ratio"] for line in lines] == ["1"] * 4 + [""] * 3


def test_peers_are_peers_of_cases() -> None:
    assert set(PEERS) <= {case.name for case in gpu.CASES}
    assert set(gpu.COLD) <= set(PEERS)


def test_importing_the_benchmark_loads_no_peer() -> None:
    code = "import linattn.benchmark.gpu, sys; sys.exit(any(name in sys.modules for name in ('fla', 'mlstm_kernels')))"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0
