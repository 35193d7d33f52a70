"""HGRN: an elementwise recurrence whose forget gate is also its input gate.

    h_t = e^{g_t} * h_{t-1} + (1 - e^{g_t}) * x_t

Source: Qin et al., "Hierarchically Gated Recurrent Neural Network for Sequence Modeling", arXiv 2311.04823.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.forget_gate import LowerBoundedGate
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm
from linattn.recurrence import Argument, Decay, Domain, Engine, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(Engine.SCAN, Decay.TOKEN_CHANNEL)


def hgrn(
    x: Tensor,
    g: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h_t = e^{g_t} * h_{t-1} + (1 - e^{g_t}) * x_t, for each channel: a weighted mean of the x so far.

    Args:
        x: [B, T, V], the inputs.
        g: [B, T, V], natural log of the forget gate, ≤ 0.
        state: [N, V] to continue from, float32 (float64 for float64 inputs).
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns h [B, T, V] in x's dtype and the final state [N, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2311.04823 (its real part: no phase).
    """
    sizes: dict[str, int] = {}
    _checks.tensor("x", x, "B T V", sizes)
    _checks.tensor("g", g, "B T V", sizes)
    _checks.same_device({"x": x, "g": g})
    written = (x * -torch.expm1(g.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)
    return engine.scan(written, g, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend)


class HGRNState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and h [N, width]."""

    conv: Tensor
    recurrent: Tensor


class HGRN(Mixer):
    """HGRN; y = W_o (RMSNorm(hgrn(silu(W_i x), g)) · silu(W_g x)), g = log(β + (1 - β) σ(W_f x)), no biases.

    β rises with the layer (:class:`linattn.layers.forget_gate.LowerBoundedGate`).

    Args:
        d_model: width of the input and output.
        expand: width of the state over d_model.
        conv_size: width of the short convolution on W_i x and W_f x; 0 leaves it out.
        norm_eps: of the RMSNorm.

    The state is an :class:`HGRNState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2311.04823; without its phases, as in flash-linear-attention.
    """

    state_type = HGRNState

    def __init__(
        self,
        d_model: int,
        *,
        expand: float = 1.0,
        conv_size: int = 0,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.width = round(d_model * expand)
        if self.width < 1:
            raise _checks.fail("expand", expand, f"a state of at least one channel for d_model={d_model}")
        self.in_proj = Linear(d_model, 3 * self.width, bias=False)
        self.conv1d = ShortConvolution(2 * self.width, conv_size, activation=False)
        self.forget_gate = LowerBoundedGate(self.width, layer_index, num_layers)
        self.norm = RMSNorm(self.width, eps=norm_eps)
        self.out_proj = Linear(self.width, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, HGRNState]:
        tail, recurrent = (None, None) if state is None else state
        inputs, z = self.in_proj(x).split((2 * self.width, self.width), dim=-1)
        inputs, tail = self.conv1d(inputs, tail, mask=mask, cu_seqlens=cu_seqlens)
        i, f = inputs.chunk(2, dim=-1)
        h, recurrent = hgrn(
            F.silu(i), mask_gate(self.forget_gate(f), mask),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(h, z)), HGRNState(tail, recurrent)


register(
    Mechanism(
        name="hgrn",
        title="HGRN",
        recurrence=RECURRENCE,
        arguments=(
            Argument("x", "B T V", meaning="inputs"),
            Argument("g", "B T V", Domain.LOG_DECAY, "log of the forget gate of each channel"),
        ),
        function=hgrn,
        layer=HGRN,
        equation="h_t = e^{g_t} ⊙ h_{t-1} + (1 − e^{g_t}) ⊙ x_t",
        paper="Hierarchically Gated Recurrent Neural Network for Sequence Modeling, arXiv 2311.04823",
        when="The smallest state: one number a channel. Cheap, remembers gist rather than what was said.",
    )
)
