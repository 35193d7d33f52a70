"""Triton kernels: every additive recurrence on a GPU, forward, backward and one token at a time.

``triton`` is imported at the first call only. Gates are not looked at (that would wait for the device): a positive
log-decay is not refused here.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn import _checks
from linattn.backends import _boundary
from linattn.backends._boundary import KERNELS, SUMS, Grads, Kernel, Saved, SumKernel
from linattn.backends._protocol import Backend, MatrixInputs, Request, SumInputs
from linattn.backends.triton.table import MEASURED
from linattn.recurrence import Decay, Engine, Mode, Normalizer, Read, Write

LARGEST = {torch.bfloat16: 256, torch.float16: 128, torch.float32: 128}
_INSTALLED = importlib.util.find_spec("triton") is not None  # here, as torch.compile traces no cached function
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python on the CPU, for tests


_capabilities: dict[torch.device, tuple[int, int]] = {}


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device not in _capabilities:
        if torch.version.hip or not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(device)  # which torch.compile knows to be constant
        _capabilities[device] = (properties.major, properties.minor)
    return _capabilities[device]


def _run(x: MatrixInputs) -> tuple[Tensor, Tensor]:
    from linattn.backends.triton import launch

    return launch.tokens(x) if launch.walks(x) else launch.forward(x)


class _Eager(torch.autograd.Function):
    """What the registered ops do, for eager calls: they would take longer than small kernels."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        x = MatrixInputs(*args)
        ctx.save_for_backward(*x[:10])
        ctx.rest = x[10:]
        ctx.set_materialize_grads(False)
        return _run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
        from linattn.backends.triton import launch

        x = MatrixInputs(*ctx.saved_tensors, *ctx.rest)
        do = torch.zeros_like(x.v) if do is None else do
        grads = launch.backward(x, do, dS, ctx.needs_input_grad[3], ctx.needs_input_grad[8])
        wanted = zip(grads, ctx.needs_input_grad, x, strict=False)
        return (*(grad if need and given is not None else None for grad, need, given in wanted), *(None,) * 4)


class _Sweeps(Kernel):
    """The backend behind the registered ops."""

    reads_gates = False

    def saved_shapes(self, x: MatrixInputs, mode: str) -> tuple[list[int], list[int]]:
        return [0], [0]

    def forward(self, x: MatrixInputs, ends: list[int] | None, mode: str, save: bool) -> tuple[Tensor, Tensor, Saved]:
        o, S = _run(x)
        nothing = x.v.new_empty(0, dtype=torch.float32)
        return o, S, Saved(nothing, nothing.clone())

    def backward(
        self, x: MatrixInputs, ends: list[int] | None, mode: str, saved: Saved, do: Tensor, dS: Tensor, need_g: bool
    ) -> Grads:
        from linattn.backends.triton import launch

        return launch.backward(x, do, dS, need_g)


class _Sums(SumKernel):
    def forward(self, x: SumInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from linattn.backends.triton import launch

        return launch.token_sums(x) if launch.walks(x) else launch.forward_sums(x)

    def backward(
        self, x: SumInputs, do: Tensor, ds: Tensor, dS: Tensor | None, dz: Tensor | None, need_g: bool
    ) -> tuple[Tensor | None, ...]:
        from linattn.backends.triton import launch

        return launch.backward_sums(x, do, ds, dS, dz, need_g)


def _transformed(x: MatrixInputs | SumInputs) -> bool:
    """Whether torch must see an op: tensor subclasses (fake ones, for example), torch.func, dispatch modes."""
    return (
        type(x.v) is not Tensor
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _sums_of(decay: Decay, read: Read) -> bool:
    return decay in (Decay.NONE, Decay.HEAD, Decay.TOKEN_HEAD) and read is Read.AFTER


class Triton(Backend):
    """Fused kernels for NVIDIA GPUs."""

    name = "triton"
    modes = (Mode.CHUNKWISE,)

    def unavailable(self, device: torch.device) -> str | None:
        if not _INSTALLED:
            return "the package triton is not installed"
        capability = _capability(device) if device.type == "cuda" else None
        if capability in MEASURED or _INTERPRETED:
            return None
        if device.type != "cuda":
            return f"it runs on CUDA devices, not {device.type!r}"
        if capability is None:
            return "there is no CUDA device here"
        return f"it has been checked on compute capability 9.0, not {capability[0]}.{capability[1]}"

    def unsuited(self, request: Request) -> str | None:
        recurrence = request.recurrence
        if recurrence.engine is not Engine.MATRIX:
            return "it has no kernel for elementwise states"
        if recurrence.write is not Write.ADDITIVE:
            return f"it has no kernel for write={recurrence.write.value!r}"
        if request.dtype == torch.float64:
            return "it has no kernel for float64"
        if request.mode not in (None, Mode.CHUNKWISE):
            return f"it runs mode='chunkwise' only, not {request.mode.value!r}"
        if recurrence.normalizer is Normalizer.SUM and not _sums_of(recurrence.decay, recurrence.read):
            return "it has no kernel for a sum normaliser with this decay and order of reading"
        # the engine divides by a sum in float32, whatever the inputs are
        dtype = torch.float32 if recurrence.normalizer is Normalizer.SUM else request.dtype
        for what, size in (("key", request.key_size), ("value", request.value_size)):
            if size is not None and size > LARGEST[dtype]:
                return f"its {what} size ends at {LARGEST[dtype]} for {dtype}, this is {size}"
        return None

    def sums(self, inputs: SumInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or _transformed(inputs):
            return _boundary.sums(inputs, self.name)
        self._check_boundaries(inputs)
        return SUMS[self.name].forward(inputs)

    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or _transformed(inputs):
            return _boundary.matrix(inputs, Mode.CHUNKWISE.value, self.name)
        self._check_boundaries(inputs)
        return _Eager.apply(*inputs) if torch.is_grad_enabled() else _run(inputs)

    def _check_boundaries(self, inputs: MatrixInputs | SumInputs) -> None:
        """Those that can be looked at now."""
        cu = inputs.cu_seqlens
        if cu is not None and not (cu.is_cuda and torch.cuda.is_current_stream_capturing()):
            _checks.boundaries(cu, inputs.v.shape[1])


KERNELS[Triton.name] = _Sweeps()
SUMS[Triton.name] = _Sums()
