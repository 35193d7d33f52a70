"""Which calls the Triton backend takes, and that it isn't needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from linattn import engine
from linattn.backends import triton
from linattn.backends._protocol import Request
from linattn.recurrence import Decay, Engine, Mode, Normalizer, Recurrence, Write

PLAIN = Request(torch.device("cuda"), torch.bfloat16, None, Recurrence(), 64, 64)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> triton.Triton:
    monkeypatch.setattr(triton, "_INSTALLED", True)
    monkeypatch.setattr(triton, "_capability", lambda device: (9, 0))
    return triton.Triton()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("cpu")}, "CUDA devices, not 'cpu'"),
        ({"dtype": torch.float64}, "float64"),
        ({"mode": Mode.RECURRENT}, "mode='chunkwise' only, not 'recurrent'"),
        ({"mode": Mode.PARALLEL}, "mode='chunkwise' only, not 'parallel'"),
        ({"recurrence": Recurrence(write=Write.DELTA)}, "write='delta'"),
        ({"recurrence": Recurrence(Engine.SCAN, Decay.TOKEN_CHANNEL)}, "elementwise states"),
        ({"key_size": 257}, "key size ends at 256 for torch.bfloat16, this is 257"),
        (
            {"recurrence": Recurrence(normalizer=Normalizer.SUM), "value_size": 129},
            "128 for torch.float32",
        ),
        ({"value_size": 512}, "value size ends at 256 for torch.bfloat16, this is 512"),
    ],
)
def test_refusals_say_why(hopper: triton.Triton, change: dict[str, object], reason: str) -> None:
    assert hopper.refuses(PLAIN) is None
    assert reason in (hopper.refuses(PLAIN._replace(**change)) or "")


def test_refuses_without_triton_or_a_checked_gpu(hopper: triton.Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_capability", lambda device: (8, 0))
    assert "not 8.0" in (hopper.refuses(PLAIN) or "")
    monkeypatch.setattr(triton, "_capability", lambda device: None)
    assert "no CUDA device" in (hopper.refuses(PLAIN) or "")
    monkeypatch.setattr(triton, "_INSTALLED", False)
    assert "not installed" in (hopper.refuses(PLAIN) or "")


def test_comes_first_and_is_refused_on_the_cpu_by_name() -> None:
    assert next(iter(engine.BACKENDS)) == "triton"
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match="backend: no backend serves this call; 'triton' does not"):
        engine.matrix(Recurrence(), q, q, q, backend="triton")


def test_importing_linattn_does_not_load_the_kernels() -> None:
    code = "import linattn, sys; sys.exit('linattn.backends.triton.kernels' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0
