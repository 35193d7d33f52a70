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

from linattn.backends import _boundary, _fused
from linattn.backends._boundary import (
    DIVIDED,
    KERNELS,
    STABILIZERS,
    DividedKernel,
    Grads,
    Kernel,
    Saved,
    StabilizingKernel,
    check_boundaries,
)
from linattn.backends._ops import Node, Op, differentiable, traced
from linattn.backends._protocol import Backend, Divisor, MatrixInputs, Request, Stabilized, repeat_heads
from linattn.backends.triton import fused
from linattn.backends.triton.table import MEASURED, WALKED
from linattn.recurrence import Decay, Engine, Mode, Normalizer, Read, Recurrence, Write

# Of keys; larger values are cut into pieces of at most this, and of at least PIECE.
LARGEST = {torch.bfloat16: 256, torch.float16: 128, torch.float32: 128}
PIECE = 64
TRAINED = 128  # of values in training, unless gates are of channels: gradients of more take longer
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


_NOTHING = Saved(None, None)


class _Sweeps(Kernel):
    """The backend behind the registered ops."""

    reads_gates = False
    reads_ends = False

    def saved_shapes(self, x: MatrixInputs, mode: str) -> tuple[list[int] | None, list[int] | None]:
        from linattn.backends.triton import launch

        return launch.sums_shape(x), launch.starts_shape(x)

    def forward(self, x: MatrixInputs, ends: list[int] | None, mode: str, save: bool) -> tuple[Tensor, Tensor, Saved]:
        from linattn.backends.triton import launch

        if launch.walks(x):
            return *launch.tokens(x), _NOTHING
        grads = None
        if save:
            unseen = not x.v.requires_grad  # in a compiled graph autograd has been there before: whatever there is
            need_g = x.g is not None and (unseen or x.g.requires_grad)
            grads = need_g, x.state is not None and (unseen or x.state.requires_grad)
        o, S, starts, sums = launch.forward(x, grads)
        return o, S, Saved(sums, starts)

    def backward(
        self, x: MatrixInputs, ends: list[int] | None, mode: str, saved: Saved, do: Tensor, dS: Tensor | None,
        need_g: bool,
    ) -> Grads:  # fmt: skip
        from linattn.backends.triton import launch

        return launch.backward(x, do, dS, need_g, starts=saved.states, sums=saved.writes)


_SWEEPS = _Sweeps()


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    o, S, saved = _SWEEPS.forward(MatrixInputs(*args), None, "", True)
    return o, S, *saved


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    ctx.save_for_backward(*inputs[:10], *output[2:])
    ctx.rest = inputs[10:]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, do: Tensor | None, dS: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    from linattn.backends.triton import launch

    *tensors, sums, starts = ctx.saved_tensors
    x, need = MatrixInputs(*tensors, *ctx.rest), ctx.needs_input_grad
    do = torch.zeros_like(x.v) if do is None else do
    return *launch.backward(x, do, dS, need[3], need[8], starts, sums), *(None,) * 4


_EAGER = Op(_forward, _keep, _gradient)  # as the registered op, without its words and checks: for the host's time


class _Divided(DividedKernel):
    def forward(self, x: MatrixInputs, by: Divisor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from linattn.backends.triton import launch

        if launch.walks(x):
            return launch.tokens_divided(x, by)
        training = any(isinstance(t, Tensor) and t.requires_grad for t in (*x, *by))
        return launch.forward_divided(x, by, training)

    def backward(
        self, x: MatrixInputs, by: Divisor, o: Tensor, s: Tensor, do: Tensor, dS: Tensor | None, dz: Tensor | None,
        need_g: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        from linattn.backends.triton import launch

        return launch.backward_divided(x, by, o, s, do, dS, dz, need_g)


class _Stabilizing(StabilizingKernel):
    def forward(self, f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None) -> Stabilized:
        from linattn.backends.triton import launch

        return launch.stabilize(f, i, m, cu_seqlens)

    def backward(
        self, f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, maxima: Tensor, rescale: Tensor,
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        from linattn.backends.triton import launch

        return launch.stabilize_gradient(f, i, m, cu_seqlens, maxima, rescale, grads)


def _pieces(x: MatrixInputs) -> int:
    """How many heads each value head is run as, as values do not know of each other; walked tokens need none."""
    _, T, _, V = x.v.shape
    largest, training = LARGEST[x.v.dtype], torch.is_grad_enabled()
    if training and V % PIECE == 0 and (x.g is None or x.g.dim() in (1, 3)):
        largest = min(largest, TRAINED)
    if largest >= V or (T <= WALKED and not training):
        return 1
    return next(n for n in range(-(-V // largest), V + 1) if V % n == 0)


def _split(x: MatrixInputs, n: int) -> MatrixInputs:
    """Each value head as n heads, which share queries, keys and gates."""
    H = x.v.shape[2] * n
    g = None if x.g is None else repeat_heads(x.g, H, 0 if x.g.dim() < 3 else 2)
    S = None if x.state is None else x.state.unflatten(3, (n, -1)).transpose(2, 3).flatten(1, 2)
    v, beta, u = x.v.unflatten(3, (n, -1)).flatten(2, 3), _repeated(x.beta, H, 2), _repeated(x.u, H, 0)
    return x._replace(v=v, g=g, beta=beta, u=u, state=S)


def _joined(o: Tensor, S: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Output and state of the heads that :func:`_split` came from."""
    return o.unflatten(2, (-1, n)).flatten(3), S.unflatten(1, (-1, n)).transpose(2, 3).flatten(3)


def _repeated(x: Tensor | None, heads: int, dim: int) -> Tensor | None:
    return None if x is None else repeat_heads(x, heads, dim)


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
        largest, keys, values = LARGEST[request.dtype], request.key_size or 0, request.value_size or 0
        if keys > largest:
            return f"its key size ends at {largest} for {request.dtype}, this is {keys}"
        if values > largest and values % PIECE:
            return f"its value sizes above {largest} for {request.dtype} are multiples of {PIECE}, this is {values}"
        return None

    def weighs(self, recurrence: Recurrence) -> bool:
        return recurrence.write is Write.ADDITIVE and _sums_of(recurrence.decay, recurrence.read)

    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        n = _pieces(inputs)
        if n > 1:
            return _joined(*self.matrix(_split(inputs, n), mode), n)
        if traced(inputs.v):
            return _boundary.matrix(inputs, Mode.CHUNKWISE.value, self.name)
        check_boundaries(inputs.cu_seqlens, inputs.v.shape[1])
        if differentiable(inputs):
            o, S, *_ = Node.apply(*inputs, _EAGER)
            return o, S
        return _SWEEPS.forward(inputs, None, "", False)[:2]

    def normalized(self, inputs: MatrixInputs, by: Divisor, mode: Mode | None) -> tuple[Tensor, Tensor, Tensor]:
        n = _pieces(inputs)
        if n > 1:
            H = inputs.v.shape[2] * n
            weight, z, m = _repeated(by.weight, H, 2), _repeated(by.z, H, 1), _repeated(by.m, H, 2)
            o, S, z = self.normalized(_split(inputs, n), Divisor(weight, z, m, by.eps), mode)
            return *_joined(o, S, n), z[:, ::n].contiguous()
        return _boundary.divided(inputs, by, self.name)

    def stabilized(self, f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None) -> Stabilized:
        return _boundary.stabilized(f, i, m, cu_seqlens, self.name)


KERNELS[Triton.name] = _SWEEPS
DIVIDED[Triton.name] = _Divided()
STABILIZERS[Triton.name] = _Stabilizing()
_fused.KERNELS["cuda"] = fused.KERNELS
