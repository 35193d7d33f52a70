"""Every shipped setting compiles for the GPU it was measured on, and the kernels for others, without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linattn.backends.triton import kernels, table
from linattn.backends.triton.launch import LIMIT, PRECISION

# target, bytes of shared memory a program may have
TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_100": (GPUTarget("cuda", 100, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}
ROLES = ("o", "dv", "dq", "dk")
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(target: GPUTarget, dtype: torch.dtype, decay: int, role: str, size: int) -> Any:
    """The sweep of ``role`` with everything that a training step asks of it."""
    outer, reverse = role in ("dq", "dk"), role in ("dv", "dk")
    settings = table.settings(dtype, decay, outer, size)
    kind = POINTERS[dtype]
    gate = {0: None, 1: "*fp32", 2: "*fp32", 3: "*fp32", 4: kind}[decay]
    pointers: dict[str, str | None] = dict.fromkeys(kernels.sweep.arg_names[:16])
    pointers |= {"x": kind, "y": kind, "z": kind, "out": kind, "g": gate, "init": "*fp32"}
    if not outer:
        pointers["final"] = "*fp32"
    elif decay:
        pointers |= {"mate": kind, "moved": "*fp32", "rest": "*fp32"}
        pointers |= {"dS": "*fp32"} if role == "dq" else {"dg": gate if decay == 4 else "*fp32"}
    constants: dict[str, object] = {
        "H": 16, "HX": 16, "HZ": 16, "DX": size, "DZ": size, "KX": size, "BZ": settings.block, "C": settings.chunk,
        "DECAY": decay, "LATE": False, "OUTER": outer, "REVERSE": reverse,
        "LIMIT": LIMIT[dtype], "PRECISION": PRECISION[dtype],
    }  # fmt: skip
    constants |= {name: None for name, kind in pointers.items() if kind is None}
    names = kernels.sweep.arg_names
    signature = {name: pointers.get(name) or "i32" for name in names} | {"scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernels.sweep,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"},
    )
    options = {"num_warps": settings.warps, "num_stages": settings.stages}
    return triton.compile(source, target=target, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("decay", [0, 3, 4])
def test_settings_fit(decay: int, role: str) -> None:
    target, limit = TARGETS["sm_90"]
    kernel = compiled(target, torch.bfloat16, decay, role, 128)
    assert kernel.metadata.shared <= limit
    assert "wgmma" in kernel.asm["ptx"]


# Triton 3.6 itself fails on the sweeps of gates of channels for sm_100.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "decay"), [("sm_80", 0), ("sm_80", 4), ("sm_100", 0), ("gfx942", 0), ("gfx942", 4)])
def test_compiles_elsewhere(name: str, decay: int) -> None:
    target, limit = TARGETS[name]
    assert compiled(target, torch.bfloat16, decay, "o", 64).metadata.shared <= limit
