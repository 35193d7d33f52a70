"""Which calls the Triton backend takes, and that it isn't needed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from linattn import engine
from linattn.backends import triton
from linattn.backends._protocol import Request
from linattn.benchmark.launches import draw
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
        ({"dtype": torch.float32, "key_size": 256}, "key size ends at 128 for torch.float32, this is 256"),
        ({"value_size": 300}, "value sizes above 256 for torch.bfloat16 are multiples of 64, this is 300"),
        (
            {"recurrence": Recurrence(decay=Decay.CHANNEL, normalizer=Normalizer.SUM)},
            "a sum normaliser with this decay",
        ),
    ],
)
def test_refusals_say_why(hopper: triton.Triton, change: dict[str, object], reason: str) -> None:
    assert hopper.refuses(PLAIN) is None
    assert reason in (hopper.refuses(PLAIN._replace(**change)) or "")


@pytest.mark.parametrize("normalizer", list(Normalizer))
@pytest.mark.parametrize(("dtype", "K", "V"), [(torch.bfloat16, 256, 1024), (torch.float32, 128, 704)], ids=str)
def test_takes_large_values(hopper: triton.Triton, normalizer: Normalizer, dtype: torch.dtype, K: int, V: int) -> None:
    recurrence = Recurrence(decay=Decay.TOKEN_HEAD, normalizer=normalizer)
    assert hopper.refuses(Request(PLAIN.device, dtype, None, recurrence, K, V)) is None


@pytest.mark.parametrize(
    ("V", "decay", "alone", "training"),
    [
        (512, Decay.TOKEN_HEAD, 2, 4),
        (256, Decay.NONE, 1, 2),
        (192, Decay.HEAD, 1, 2),
        (200, Decay.NONE, 1, 1),
        (128, Decay.NONE, 1, 1),
        (256, Decay.TOKEN_CHANNEL, 1, 1),
    ],
)
def test_large_values_are_cut(V: int, decay: Decay, alone: int, training: int) -> None:
    x, _, _ = draw(decay, torch.bfloat16, {"B": 1, "T": 64, "H": 1, "K": 16, "V": V}, device="meta")
    assert triton._pieces(x) == training
    with torch.no_grad():
        assert triton._pieces(x) == alone


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


@pytest.mark.parametrize(("scratch", "version"), [(0, ""), (64, ""), (0, "another")])
def test_a_kernel_is_launched_past_what_triton_looks_for(
    scratch: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second time on, unless it needs scratch memory, which Triton's launcher finds, or the launcher is of a
    version that is not known; not where misaligned."""
    pytest.importorskip("triton")
    from linattn.backends.triton import launch

    calls: list[tuple[str, tuple[Any, ...]]] = []

    class Launcher:
        global_scratch_size, profile_scratch_size, launch_cooperative_grid, launch_pdl = scratch, 0, False, True

        def launch(self, *args: Any) -> None:
            calls.append(("C", args))

        def __call__(self, *args: Any) -> None:
            calls.append(("Python", args))

    class Kernel:
        fn = "kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def first(*args: Any, **options: Any) -> Any:
                calls.append(("Triton", args))
                return SimpleNamespace(run=Launcher(), function="f", packed_metadata="m")

            return first

    monkeypatch.setattr(launch, "_GPU", True)
    monkeypatch.setattr(launch, "LAUNCHED", version)  # what Triton's own begins with
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    t = torch.zeros(64)
    for tensor in (t, t, t[1:]):
        launch._launch(Kernel(), 3, (tensor, None), (0.5, 7), (16, True), 4, 1)
    python = scratch > 0 or version == "another"
    before = ("f",) if python else ("f", False, True, None, None)
    again = (3, 1, 1, "stream", *before, "m", None, None, None, t.data_ptr(), 0, 0.5, 7, 16, True)
    ways = ["Triton", "Python" if python else "C", "Triton"]
    assert [way for way, _ in calls] == ways
    assert calls[1][1] == again


def test_a_first_call_compiles_what_it_and_its_backward_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, and once; with other gradients wanted, once more."""
    pytest.importorskip("triton")
    from linattn.backends.triton import launch

    launches: list[tuple[str, bool]] = []

    def record(kernel: Any, *rest: Any) -> None:
        launches.append((kernel.__name__, launch._compiling.get()))

    monkeypatch.setattr(launch, "_GPU", True)
    monkeypatch.setattr(launch, "_launch", record)
    monkeypatch.setattr(launch, "_met", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    sizes = {"B": 1, "T": 64, "H": 1, "K": 16, "V": 16}
    x, do, _ = draw(Decay.TOKEN_HEAD, torch.bfloat16, sizes, device="meta")
    launch.forward(x, (True, False))
    launch.backward(x, do, None, True, False)
    compiled, launched = ([name for name, ahead in launches if ahead is which] for which in (True, False))
    assert compiled == launched == ["sum_gates", "sweep", "sum_gates", *["sweep"] * 3, "head_gate_gradient"]
    launch.forward(x, (True, False))
    assert launches[-1] == ("sweep", False)
    assert len(launches) == 16
    launch.forward(x)
    assert [ahead for _, ahead in launches[16:]] == [True, True, False, False]
