"""mLSTM (xLSTM): a decay per token and head, and an input gate that may be exponential.

    C_t = e^{f_t} C_{t-1} + e^{i_t} k_t v_t^T,    n_t = e^{f_t} n_{t-1} + e^{i_t} k_t
    h_t = C_t^T q_t / max(|n_t^T q_t|, 1)

The state is held divided by e^{m_t}, m_t = max(f_t + m_{t-1}, i_t), so that no gate can overflow.
Source: Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv 2405.04517.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.backends._protocol import state_dtype
from linattn.engine import NormalizedState
from linattn.layers.exponential_gate import stabilize
from linattn.layers.group_norm import GroupNorm
from linattn.layers.linear import Linear, linear
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Normalizer, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_HEAD, normalizer=Normalizer.SUM)
PLAIN = Recurrence(decay=Decay.TOKEN_HEAD)


class MLSTMState(NamedTuple):
    """C [N, H, K, V] and n [N, H, K], both divided by e^m, and m [N, H], which is 0 at the start."""

    C: Tensor
    n: Tensor
    m: Tensor


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
    state: MLSTMState | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, MLSTMState | Tensor]:
    """h_t = scale * C_t^T q_t / max(|scale * n_t^T q_t|, 1), C_t = e^{f_t} C_{t-1} + e^{i_t} k_t v_t^T, n_t likewise.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype.
        i: [B, T, H], natural log of the input gate: any number, or -inf for no input.
        f: [B, T, H], natural log of the decay, ≤ 0, as the log-sigmoid of a preactivation.
        normalize: divide; False is the h_t = scale * C_t^T q_t of the mLSTM with a sigmoid input gate
            (arXiv 2503.14376), whose i is ≤ 0 and needs no m.
        eps: added to max(|ñ_t^T q_t|, e^{-m_t}), the denominator of the scaled state, as xLSTM does.
        state: MLSTMState(C, n, m) to continue from; [N, H, K, V] with ``normalize=False``.
        scale, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns h [B, T, H, V] in v's dtype and the final state.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2405.04517.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T H V", sizes)
    _checks.tensor("q", q, "B T G K", sizes, v.dtype)
    _checks.tensor("i", i, "B T H", sizes)
    _checks.tensor("f", f, "B T H", sizes)
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, v.shape[0])
    _checks.same_device({"v": v, "i": i, "f": f, "cu_seqlens": cu_seqlens})
    options: dict[str, Any] = {"scale": scale, "cu_seqlens": cu_seqlens, "mode": mode, "backend": backend}
    dtype = state_dtype(v.dtype)
    if not normalize:
        weight = i.to(dtype).exp()
        return engine.matrix(PLAIN, q, k, v, g=f, weight=weight, state=state, **options)  # type: ignore[return-value, arg-type]
    sizes["N"] = i.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if state is None:
        before, m = None, i.new_zeros(sizes["N"], sizes["H"], dtype=dtype)
    elif isinstance(state, tuple) and len(state) == 3:
        for name, part, dims in zip(MLSTMState._fields, state, ("N H K V", "N H K", "N H"), strict=True):
            _checks.tensor(f"state.{name}", part, dims, sizes, dtype)
            _checks.same_device({"v": v, f"state.{name}": part})
        before, m = NormalizedState(*state[:2]), state[2]
    else:
        raise _checks.fail("state", type(state).__name__, "an MLSTMState(C, n, m)")
    s = stabilize(f, i if state_dtype(i.dtype) == dtype else i.to(dtype), m, cu_seqlens, backend)
    h, after = engine.matrix(RECURRENCE, q, k, v, g=s.g, weight=s.j.exp(), m=s.m, eps=eps, state=before, **options)
    assert isinstance(after, NormalizedState)
    rescale = s.rescale.to(dtype)
    return h, MLSTMState(after.S * rescale[..., None, None], after.z * rescale[..., None], s.final)


class MLSTMLayerState(NamedTuple):
    """The MLSTMState, or C [N, H, K, V] alone with a sigmoid input gate."""

    recurrent: MLSTMState | Tensor


class MLSTM(Mixer):
    """The mLSTM layer of xLSTM-7B; y = W_o (LayerNorm(mlstm(W_q x, W_k x, W_v x, i, f)) · σ(W_z x)).

    The gates' preactivations are capped, c tanh((W x + b)/c) in float32: i is one, f the log-sigmoid of the other. Only
    they have biases. At the start their weights are zero, the biases of i -10, those of f from 3 to 6 over the heads.

    Args:
        d_model: width of the input and output.
        num_heads: None takes key heads of a size near d_model/8, at least 32 and at most xLSTM-7B's 256.
        expand_k, expand_v: widths of keys and values over d_model.
        input_gate: "exponential", e^i; "sigmoid", σ(i), and no normaliser (arXiv 2503.14376).
        gate_soft_cap: c; None caps nothing.
        eps: of the normaliser.
        norm_eps: of the LayerNorm on each head's output.

    The state is an :class:`MLSTMLayerState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2503.13427 (xLSTM-7B), 2405.04517.
    """

    state_type = MLSTMLayerState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        input_gate: str = "exponential",
        gate_soft_cap: float | None = 15.0,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        key_dim, value_dim = round(d_model * expand_k), round(d_model * expand_v)
        if num_heads is None:
            num_heads = default_heads(math.gcd(key_dim, value_dim), min(max(d_model // 8, 32), 256))
        self.num_heads = num_heads
        self.head_dim = divide("num_heads", num_heads, key_dim, "expand_k * d_model")
        self.head_v_dim = divide("num_heads", num_heads, value_dim, "expand_v * d_model")
        _checks.one_of("input_gate", input_gate, ("exponential", "sigmoid"))
        self.input_gate, self.gate_soft_cap, self.eps = input_gate, gate_soft_cap, eps
        self.sizes = (key_dim, key_dim, value_dim, value_dim)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.gate_weight = nn.Parameter(torch.zeros(2 * num_heads, d_model))  # of i, then of f
        bias = torch.cat([torch.full((num_heads,), -10.0), torch.linspace(3, 6, num_heads)])
        self.gate_bias = no_weight_decay(bias)
        self.norm = GroupNorm(num_heads, self.head_v_dim, eps=norm_eps, bias=False)
        self.out_proj = Linear(value_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, MLSTMLayerState]:
        q, k, v, z = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in (q, k, v))
        gates = promote(linear(x, self.gate_weight, self.gate_bias))
        if self.gate_soft_cap is not None:
            gates = self.gate_soft_cap * torch.tanh(gates / self.gate_soft_cap)
        i, f = gates.chunk(2, dim=-1)
        normalize = self.input_gate == "exponential"
        i = i if normalize else F.logsigmoid(i)
        if mask is not None:
            i = i.masked_fill(~mask[..., None], -torch.inf)
        h, recurrent = mlstm(
            q, k, v, i, mask_gate(F.logsigmoid(f), mask), normalize=normalize, eps=self.eps,
            state=None if state is None else state[0], cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(h) * z.sigmoid()), MLSTMLayerState(recurrent)


register(
    Mechanism(
        name="mlstm",
        aliases=("xlstm",),
        title="mLSTM (xLSTM)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            KEY,
            VALUE,
            Argument("i", "B T H", meaning="log of the input gate"),
            Argument("f", "B T H", Domain.LOG_DECAY, "decay of each head, the log of the forget gate"),
        ),
        function=mlstm,
        layer=MLSTM,
        equation="C_t = e^{f_t} C_{t-1} + e^{i_t} k_t v_tᵀ,  n_t = e^{f_t} n_{t-1} + e^{i_t} k_t,  "
        "h_t = C_tᵀ q_t / max(|n_tᵀ q_t|, 1)",
        paper="xLSTM: Extended Long Short-Term Memory, arXiv 2405.04517",
        when="Forgets per head and can weigh one token exponentially above all others; the mixer of xLSTM-7B.",
    )
)
