"""Every launch that a call makes compiles, in its shipped settings, without a GPU: it fits, and keeps to registers.

A few in every run of the tests; all of them, for every target, with LINATTN_COMPILE=all.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linattn.backends._boundary import DIVIDED, KERNELS
from linattn.backends._protocol import Divisor, Stabilized
from linattn.backends.triton import LARGEST, fused, launch
from linattn.benchmark.launches import Launch, draw, recorded
from linattn.recurrence import Decay, Read

# target, bytes of shared memory that a program may have
TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_100": (GPUTarget("cuda", 100, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}
# Bytes that a thread may spill, by the size of a head. Steep gates take most, and float32, whose products are several.
SPILL = {
    torch.bfloat16: {64: 512, 128: 1024, 256: 2560},
    torch.float16: {64: 1024, 128: 2560},
    torch.float32: {64: 1536, 128: 3584},
}
SPILL_SHARED = 3584  # on sm_80, where heads share keys
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
READS = {
    "after": (Read.AFTER, False),
    "before": (Read.BEFORE, False),
    "bonus": (Read.BEFORE, True),
    "sum": (Read.AFTER, False),
    "wide": (Read.AFTER, False),  # keys twice the size, and weights
    "shared": (Read.AFTER, False),  # weights, and one key for all heads
    "wide shared": (Read.AFTER, False),
}
WEIGHTED = ("wide", "shared", "wide shared")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def launches(decay: Decay, read: str, dtype: torch.dtype, size: int) -> Iterator[Launch]:
    """Of a training step and of a token, each only once: whole rows and, with segments to be joined, cut ones."""
    when, bonus = READS[read]
    seen = set()
    with pytest.MonkeyPatch.context() as patch, recorded(run=False) as found:
        for processors, length in ((1, 4096), (1000, 4096), (1, 1)):
            patch.setattr(launch, "_processors", lambda device, processors=processors: processors)
            sizes = {"B": 1, "T": length, "H": 16, "K": 2 * size if "wide" in read else size, "V": size}
            x, do, dS = draw(decay, dtype, sizes, device="meta", read=when, bonus=bonus)
            if "shared" in read:
                x = x._replace(q=x.q[:, :, :1], k=x.k[:, :, :1])
            if read in WEIGHTED:
                x = x._replace(beta=torch.empty_like(x.v[..., 0], dtype=torch.float32))
            if read == "sum":
                z, weight = x.state[..., 0].contiguous(), torch.empty_like(x.v[..., 0], dtype=torch.float32)
                by = Divisor(weight, z, weight, 1e-6)
                o, s, _, _ = DIVIDED["triton"].forward(x, by)
                if length > 1:
                    DIVIDED["triton"].backward(x, by, o, s, do, dS, z, x.g is not None)
                continue
            KERNELS["triton"].forward(x, None, "chunkwise", True)
            if length > 1:
                launch.backward(x, do, dS, x.g is not None)
    for each in found:
        if each.key not in seen:
            seen.add(each.key)
            yield each


def compiled(each: Launch, target: GPUTarget) -> Any:
    """As Triton compiles it at the launch, where pointers and sizes are multiples of 16."""
    names, named = each.kernel.arg_names, each.named
    signature, constants, attributes = {}, {}, {}
    first_constant = len(each.tensors) + len(each.numbers)
    for place, name in enumerate(names):
        value = named[name]
        if value is None or place >= first_constant:
            signature[name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[place,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(fn=each.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": each.warps, "num_stages": each.stages})


def spilled(kernel: Any, folder: Path) -> int:
    """Bytes of a thread's registers that had to go to memory."""
    if "amdgcn" in kernel.asm:
        return 4 * sum(map(int, re.findall(r"\.[sv]gpr_spill_count: *(\d+)", kernel.asm["amdgcn"])))
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "cuobjdump", "-res-usage", file]
    return int(re.search(r"STACK:(\d+)", subprocess.run(command, capture_output=True, text=True).stdout)[1])


def fails_in_triton(each: Launch, name: str) -> bool:
    """Triton 3.6 itself fails for sm_100 on kernels that divide by gates of channels, and on sweeps forward in time
    that sum for the gradient of those of heads."""
    if name != "sm_100" or each.kernel.__name__ != "sweep":
        return name == "sm_100" and each.kernel.__name__ == "divide"
    named = each.named
    gates = named["moved" if named["OUTER"] else "behind"]
    return named["DECAY"] in (2, 4) or (not named["REVERSE"] and gates is not None)


def check(each: Launch, name: str, dtype: torch.dtype, size: int, folder: Path) -> None:
    """Shared memory and registers suffice."""
    if fails_in_triton(each, name):
        return
    target, limit = TARGETS[name]
    kernel = compiled(each, target)
    what = f"{name} {each.kernel.__name__} {each.constants}"
    assert kernel.metadata.shared <= limit, f"{what}: {kernel.metadata.shared} bytes of shared memory"
    bytes_spilled = spilled(kernel, folder)
    allowed = SPILL[dtype][size] * (1 if name == "sm_90" else 2)  # the settings are those of an H200
    if name == "sm_80" and each.kernel.__name__ == "shared":
        allowed = SPILL_SHARED
    assert bytes_spilled <= allowed, f"{what}: {bytes_spilled} bytes spilled"


# target, decay, read, dtype, size, and how many of the launches
FEW = [
    ("sm_90", Decay.NONE, "after", torch.bfloat16, 128, 3),
    ("sm_90", Decay.TOKEN_HEAD, "after", torch.bfloat16, 128, 5),
    ("sm_90", Decay.TOKEN_CHANNEL, "after", torch.bfloat16, 128, 4),
    ("sm_90", Decay.TOKEN_HEAD, "sum", torch.bfloat16, 256, 6),
    ("sm_90", Decay.TOKEN_HEAD, "wide", torch.bfloat16, 64, None),
    ("sm_90", Decay.TOKEN_HEAD, "wide shared", torch.bfloat16, 64, None),
    ("sm_80", Decay.TOKEN_HEAD, "after", torch.bfloat16, 64, 2),
    ("sm_100", Decay.NONE, "after", torch.bfloat16, 64, 2),
    ("gfx942", Decay.NONE, "after", torch.bfloat16, 64, 2),
]
# The settings are those of an H200: what a gfx942 has of shared memory is enough for heads of 64.
ALL = [
    (name, decay, read, dtype, size, None)
    for name, decay, read, dtype in itertools.product(TARGETS, Decay, READS, SPILL)
    for size in SPILL[dtype]
    if name != "gfx942" or (size == 64 and dtype == torch.bfloat16)
    if read not in WEIGHTED or size == 64
    if "shared" not in read or dtype in launch.SHARED
    if read != "wide shared" or name == "sm_90"
    if read not in ("sum", *WEIGHTED) or decay not in (Decay.CHANNEL, Decay.TOKEN_CHANNEL)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decay", "read", "dtype", "size", "few"), ALL if os.environ.get("LINATTN_COMPILE") == "all" else FEW
)
def test_settings_fit(
    name: str, decay: Decay, read: str, dtype: torch.dtype, size: int, few: int | None, tmp_path: Path
) -> None:
    for each in itertools.islice(launches(decay, read, dtype, size), few):
        check(each, name, dtype, size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("B", "length", "packed"), [(8, 1, False), (8, 4096, False), (1, 4096, True)])
def test_the_running_maximum_fits(B: int, length: int, packed: bool, tmp_path: Path) -> None:
    gates = torch.empty(B, length, 16, device="meta")
    state = torch.empty(8, 16, device="meta")
    cu_seqlens = torch.empty(9, dtype=torch.int64, device="meta") if packed else None
    with recorded(run=False) as found:
        s = launch.stabilize(gates, gates, state, cu_seqlens)
        launch.stabilize_gradient(gates, gates, state, cu_seqlens, s.m, s.rescale, tuple(Stabilized(*s)))
    assert len(found) == (2 if length == 1 else 4)
    for each in found:
        check(each, "sm_90", torch.bfloat16, 64, tmp_path)


@pytest.mark.slow
def test_a_packed_convolution_fits(tmp_path: Path) -> None:
    x, weight = torch.empty(1, 4096, 128, device="meta", dtype=torch.bfloat16), torch.empty(128, 1, 4, device="meta")
    cu_seqlens = torch.empty(9, dtype=torch.int64, device="meta")
    given = (x, weight, None, None, None, cu_seqlens, True)
    with recorded(run=False) as found:
        fused._convolution(*given)
        fused._convolution_backward(x, None, *given)
    for each in found:
        check(each, "sm_90", torch.bfloat16, 64, tmp_path)


def test_every_size_has_a_bound() -> None:
    assert {dtype: max(sizes) for dtype, sizes in SPILL.items()} == LARGEST
