"""RG-LRU (Griffin): a real-gated linear recurrent unit, which scales its input to keep the size of the state.

    h_t = e^{g_t} * h_{t-1} + √(1 - e^{2 g_t}) * x_t,    h_1 = x_1

Source: De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models",
arXiv 2402.19427.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear, einsum
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.sequences import positions, sequence_of_token
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import Argument, Decay, Domain, Engine, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(Engine.SCAN, Decay.TOKEN_CHANNEL)
STEEPEST = 1000.0  # the largest slope of the root, which is infinite where nothing is forgotten
POWER = 8.0  # the paper's c


def rg_lru(
    x: Tensor,
    g: Tensor,
    *,
    first: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h_t = e^{g_t} * h_{t-1} + √(1 - e^{2 g_t}) * x_t, for each channel; a sequence's first input is written whole.

    Args:
        x: [B, T, V], the inputs, after their gate.
        g: [B, T, V], natural log of the decay, ≤ 0.
        first: bool [B, T], True for the tokens that are the first of their sequence. None: where there is no
            ``state``, the first of each row or packed sequence; otherwise none.
        state: [N, V] to continue from, float32 (float64 for float64 inputs).
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    The slope of the root is bounded by 1000, as in the reference implementation: gradients stay finite at g = 0.

    Returns h [B, T, V] in x's dtype and the final state [N, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2402.19427.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("x", x, "B T V", sizes)
    _checks.tensor("g", g, "B T V", sizes)
    B, T, _ = x.shape
    if first is not None and (not isinstance(first, Tensor) or first.dtype != torch.bool or first.shape != (B, T)):
        came = f"{first.dtype} {list(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        raise _checks.fail("first", came, f"torch.bool {[B, T]}")
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, B)
        if not torch.compiler.is_compiling():
            _checks.boundaries(cu_seqlens, T)
    _checks.same_device({"x": x, "g": g, "first": first, "cu_seqlens": cu_seqlens})
    if first is None and state is None:
        token = torch.arange(T, device=x.device)
        start = 0 if cu_seqlens is None else cu_seqlens[sequence_of_token(cu_seqlens, T)]
        first = (token == start)[None]
    room = -torch.expm1(2 * g.to(torch.promote_types(x.dtype, torch.float32)))
    share = _root(room)
    if first is not None:
        share = torch.where(first[..., None], 1, share)
    return engine.scan((x * share).to(x.dtype), g, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend)


def _root(x: Tensor) -> Tensor:
    """√x with a slope of at most STEEPEST."""
    slope = 0.5 * x.detach().clamp(min=(0.5 / STEEPEST) ** 2).rsqrt()
    return x.detach().sqrt() + slope * (x - x.detach())


class RGLRUState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], h [N, width], and the tokens read, [N]."""

    conv: Tensor
    recurrent: Tensor
    position: Tensor


class RGLRU(Mixer):
    """Griffin's recurrent block; y = W_o (rg_lru(i · u, g) · gelu(W_y x + b_y)) + b_o with u = conv(W_x x + b_x).

    i = σ(W_i u + b_i) and g = -8 softplus(Λ) σ(W_r u + b_r), whose matrices have a block for each head; gelu is its
    tanh approximation. Parameters start as in RecurrentGemma: e^{-softplus(Λ)} uniform in its square over
    [0.9², 0.999²], the blocks and the convolution normal with variances of 0.01 over their number of inputs.

    Args:
        d_model: width of the input and output.
        num_heads: blocks of the gates' matrices; None takes blocks of a size near d_model/4, at least 32 and at most
            RecurrentGemma's 256.
        expand: width of the state over d_model.
        conv_size: width of the short convolution, which has a bias and no activation.

    The state is an :class:`RGLRUState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2402.19427; RecurrentGemma, arXiv 2404.07839.
    """

    state_type = RGLRUState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        expand: float = 1.0,
        conv_size: int = 4,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.width = round(d_model * expand)
        if num_heads is None:
            num_heads = default_heads(self.width, min(max(d_model // 4, 32), 256))
        self.num_heads, block = num_heads, divide("num_heads", num_heads, self.width, "expand * d_model")
        self.in_proj = Linear(d_model, 2 * self.width)
        self.conv1d = ShortConvolution(self.width, conv_size, bias=True, activation=False)
        # The blocks of the input gate, then those of the recurrence gate.
        self.gate_weight = nn.Parameter(torch.empty(2, num_heads, block, block).normal_(std=math.sqrt(0.01 / block)))
        self.gate_bias = nn.Parameter(torch.zeros(2, num_heads, block))
        self.decay = no_weight_decay(torch.empty(self.width).uniform_(0.9**2, 0.999**2).rsqrt().sub(1).log())
        self.out_proj = Linear(self.width, d_model)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)
        if self.conv1d.weight is not None and self.conv1d.bias is not None:
            nn.init.normal_(self.conv1d.weight, std=math.sqrt(0.01 / conv_size))
            nn.init.zeros_(self.conv1d.bias)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, RGLRUState]:
        tail, recurrent, offset = (None, None, None) if state is None else state
        position, offset = positions(x, offset, mask, cu_seqlens)
        u, y = self.in_proj(x).chunk(2, dim=-1)
        u, tail = self.conv1d(u, tail, mask=mask, cu_seqlens=cu_seqlens)
        blocks = einsum("bthi,jhio->bjtho", u.unflatten(-1, (self.num_heads, -1)), self.gate_weight)
        i, r = (blocks + self.gate_bias[:, None]).flatten(3).sigmoid().unbind(1)
        g = -POWER * promote(r) * F.softplus(promote(self.decay))
        h, recurrent = rg_lru(
            u * i, mask_gate(g, mask), first=(position == 0).expand(x.shape[:2]),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(h * F.gelu(y, approximate="tanh")), RGLRUState(tail, recurrent, offset)


register(
    Mechanism(
        name="rg_lru",
        aliases=("rglru", "griffin", "hawk"),
        title="RG-LRU (Griffin)",
        recurrence=RECURRENCE,
        arguments=(
            Argument("x", "B T V", meaning="inputs, after their gate"),
            Argument("g", "B T V", Domain.LOG_DECAY, "decay of each channel"),
        ),
        function=rg_lru,
        layer=RGLRU,
        equation="h_t = e^{g_t} ⊙ h_{t-1} + √(1 − e^{2 g_t}) ⊙ x_t,  h_1 = x_1",
        paper="Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models, "
        "arXiv 2402.19427",
        when="One number a channel, best beside local attention; the recurrent block of RecurrentGemma.",
    )
)
