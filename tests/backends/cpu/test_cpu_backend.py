"""Which calls the CPU backend takes, what is said when it can't, and its conversions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import linattn
from linattn import engine
from linattn.backends import cpu
from linattn.backends._protocol import Request
from linattn.backends.cpu import build, library
from linattn.recurrence import Decay, Mode, Recurrence

PLAIN = Request(torch.device("cpu"), torch.float32, None, Recurrence())
GATED = Recurrence(decay=Decay.TOKEN_CHANNEL)


def refusal(**change: object) -> str:
    return cpu.Cpu().refuses(PLAIN._replace(**change)) or ""  # type: ignore[arg-type]


def test_serves_auto_and_says_what_it_refuses() -> None:
    assert linattn.explain("gla").backend == "cpu"
    assert refusal() == ""
    assert "not on 'cuda'" in refusal(device=torch.device("cuda"))
    assert "not float64" in refusal(dtype=torch.float64)
    assert "no parallel form" in refusal(mode=Mode.PARALLEL)


def test_a_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / build.NAME)
    assert "was not built" in refusal()
    assert linattn.explain("gla").backend == "chunked"
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match=r"backend: no backend serves this call.*'cpu' does not: its library was not"):
        engine.matrix(Recurrence(), q, q, q, backend="cpu")


@pytest.mark.parametrize("content", [b"", b"no library at all"], ids=["empty", "text"])
def test_a_bad_library_file_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / build.NAME
    path.write_bytes(content)
    monkeypatch.setattr(library, "PATH", path)
    assert "does not load" in refusal()
    assert str(path) in refusal()


def test_a_library_of_another_version_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / build.NAME
    path.write_bytes(library.PATH.read_bytes())
    monkeypatch.setattr(library, "PATH", path)
    monkeypatch.setattr(library, "VERSION", -1)
    assert "wanted -1" in refusal()


def test_an_unknown_instruction_set_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINATTN_CPU_ISA", "mmx")
    assert "LINATTN_CPU_ISA is 'mmx', this machine runs plain" in refusal()


def test_the_environment_names_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PREFERRED", "chunked")
    explanation = linattn.explain("gla")
    assert explanation.backend == "chunked"
    assert "LINATTN_BACKEND=chunked was asked for" in explanation.refusals["cpu"]
    assert linattn.explain("gla", backend="cpu").backend == "cpu"
    monkeypatch.setattr(engine, "PREFERRED", "fast")
    with pytest.raises(ValueError, match="LINATTN_BACKEND: got 'fast', wanted one of"):
        linattn.explain("gla")


def test_the_environment_is_read() -> None:
    code = "import linattn; print(linattn.explain('gla').backend)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"LINATTN_BACKEND": "reference"}, capture_output=True, text=True
    )
    assert result.stdout.split() == ["reference"], result.stderr


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("value", [1e-3, float("nan"), float("inf")])
@pytest.mark.usefixtures("level")
def test_a_gate_that_is_no_decay_is_refused(tokens: int, value: float) -> None:
    q = torch.randn(1, tokens, 2, 20)
    g = torch.full_like(q, -1)
    g[0, -1, 1, 19] = value
    with pytest.raises(ValueError, match="g: got a log-decay of"):
        engine.matrix(GATED, q, q, q, g=g, backend="cpu")


@pytest.mark.usefixtures("level")
def test_the_exponential() -> None:
    """To a rounding and a half of float32's spacing, denormal results included; exactly 0 from -104 on."""
    x = torch.cat([-torch.logspace(-10, 2.03, 4000), torch.tensor([0.0, -87.3, -103.9, -104.1, -1e4, -torch.inf])])
    one = torch.ones(1, 1, 1, len(x))
    _, state = engine.matrix(
        GATED, one, 0 * one, torch.ones(1, 1, 1, 1), g=x.view_as(one), state=torch.ones(1, 1, len(x), 1), backend="cpu"
    )
    assert isinstance(state, torch.Tensor)
    exact = x.double().exp()
    spacing = torch.nextafter(exact.float(), torch.tensor(2.0)).double() - exact.float().double()
    assert ((state.flatten().double() - exact).abs() <= 1.5 * spacing).all()
    assert (state.flatten()[x < -104] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("level")
def test_conversions_equal_torch_bit_for_bit(dtype: torch.dtype) -> None:
    """o = q * (k v): every half number passes in as q, products round on the way out."""
    half = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    half = half[half.isfinite()]
    q, one = half.view(1, -1, 1, 1), torch.ones(1, len(half), 1, 1, dtype=dtype)
    for factor in (1.0, 0.7, 3.3, 2.0**-9):
        o, _ = engine.matrix(
            Recurrence(decay=Decay.TOKEN_CHANNEL), q, one, one, g=torch.full_like(q, -torch.inf), scale=factor,
            backend="cpu",
        )  # fmt: skip
        wanted = (half.float() * torch.tensor(factor)).to(dtype)
        assert torch.equal(o.flatten(), wanted)


def test_memory_that_is_not_there() -> None:
    wide = torch.zeros(1, 1, 1, 1 << 23)  # and a state of 2^48 bytes
    with pytest.raises(RuntimeError, match="allocate memory"):
        engine.matrix(Recurrence(), wide, wide, wide, backend="cpu")


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with pytest.raises(build.BuildError, match="no-compiler"):
        build.build(tmp_path / build.NAME)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined"])
def test_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Every kind, forward and backward, with tails and packed rows, under the compiler's sanitizers."""
    path = tmp_path / build.NAME
    try:
        build.build(path, flags=("-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"))
        cxx = build.compiler()
        runtimes = [
            subprocess.check_output([*cxx, f"-print-file-name={name}"], text=True).strip()
            for name in ("libasan.so", "libubsan.so")
        ]
    except build.BuildError as error:
        pytest.skip(str(error))
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip("the compiler has no sanitizers")
    code = """
import pathlib, sys, torch
from linattn.backends.cpu import library
library.PATH = pathlib.Path(sys.argv[1])
from linattn.testing import Case, Form, Sizes, law_accuracy, recurrences
for subject in (*recurrences()[::3], recurrences()[-1]):
    for case in (Case(subject, Sizes(B=1, T=66, G=1, H=2, K=9, V=17)), Case(subject, Sizes(G=1), lengths=(3, 0, 65))):
        law_accuracy(case, Form("cpu", "recurrent"))
torch.set_num_threads(8)  # splits the sequence
for subject in recurrences()[:15:4]:
    law_accuracy(Case(subject, Sizes(B=1, T=1100, G=1, H=1, K=9, V=17)), Form("cpu", "recurrent"))
from linattn.layers import RMSNorm, ShortConvolution
from linattn.layers.token_shift import token_mix
ends = torch.tensor([0, 3, 3, 70])
for dtype in (torch.float32, torch.bfloat16):
    x = torch.randn(1, 70, 21).to(dtype).requires_grad_()
    y = [*ShortConvolution(21, bias=True)(x, cu_seqlens=ends), RMSNorm(21)(x, x)]
    y += token_mix(x, torch.rand(2, 21, requires_grad=True), cu_seqlens=ends)[0]
    sum(t.float().sum() for t in y).backward()
print("right")
"""
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        # no fake stack, on by default since GCC 13: it aligns to less than vectors of 64 bytes need (GCC bug 110027)
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, timeout=1500
    )
    assert result.stdout.split() == ["right"], result.stderr[-4000:]


@pytest.mark.slow
def test_thread_sanitizer(tmp_path: Path) -> None:
    """Every kind on six threads, columns and sequences split, with no data race."""
    program = tmp_path / "threads"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DLINATTN_LANES=4", "-DLINATTN_KERNELS=plain_kernels"]
    sources = [build.SOURCES / "kernels.cpp", Path(__file__).with_name("threads.cpp")]
    try:
        cxx = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version:
        pytest.skip("the stand-in for the threads' runtime is GCC's")
    command = [*cxx, *flags, "-fopenmp", f"-I{build.SOURCES}"]
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
    linked = [*cxx, "-fsanitize=thread", *map(str, objects), "-lpthread", "-o", str(program)]
    if subprocess.run(linked, capture_output=True).returncode:
        pytest.skip("the compiler has no thread sanitizer")
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert result.stdout.split() == ["right"], result.stderr[-4000:]
    assert result.returncode == 0
