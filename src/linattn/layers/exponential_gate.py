"""Exponential input gates without overflow: the running maximum that keeps them in range."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn import _checks, engine
from linattn.backends._protocol import EMPTY, STEEPEST, Stabilized, state_dtype
from linattn.layers.sequences import sequence_of_token


def stabilize(
    f: Tensor, i: Tensor, m: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto"
) -> Stabilized:
    """m_t = max(f_t + m_{t-1}, i_t);  g_t = f_t + m_{t-1} - m_t ≤ 0;  j_t = i_t - m_t ≤ 0.

    Args:
        f: natural log of the decay, ≤ 0 (-inf allowed): [B, T, X], or [X], the same for every token.
        i: [B, T, X], natural log of the input gate: any number, or -inf for no input, as at padding.
        m: [N, X], ``final`` of what was read before; None or EMPTY is nothing.
        cu_seqlens: [N+1], the boundaries of packed sequences (B = 1).
        backend: whose kernel may do it, where it has one.

    Before the first input there is nothing: ``m_before`` is EMPTY, so that e^{m_before} is 0, and g is 0, for any decay
    of a state of zero will do. There is no loop over tokens: with F the running sum of f in float64, m_t is F_t plus
    the running maximum of ``m`` and i_s - F_s.

    Gradients: what is read from h̃ does not depend on m. So g and j take it as a constant, but for the ``m`` given,
    whose gradient flows through the g and ``m_before`` of the first token. m, ``final`` and ``rescale`` have their true
    derivatives: they are part of the state returned.

    Raises ValueError naming the argument that does not fit, a positive f only on a CPU. Source: the stabiliser
    of RWKV-4 (arXiv 2305.13048, appendix D) and of xLSTM (arXiv 2405.04517, eq. 15).
    """
    sizes: dict[str, int] = {}
    _checks.tensor("i", i, "B T X", sizes)
    _checks.tensor("f", f, "X" if isinstance(f, Tensor) and f.dim() == 1 else "B T X", sizes)
    if f.device.type == "cpu" and not torch.compiler.is_compiling():
        _checks.log_decay(f, "f")
    B, T, X = i.shape
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, B)
        if not torch.compiler.is_compiling():
            _checks.boundaries(cu_seqlens, T)
    sizes["N"] = B if cu_seqlens is None else len(cu_seqlens) - 1
    if m is not None:
        _checks.tensor("m", m, "N X", sizes)
    f = f.expand(B, T, X)
    found = engine.stabilized(f, i, m, cu_seqlens, backend)
    if found is not None:
        return found

    dtype, exact = state_dtype(i.dtype), torch.float32 if i.device.type == "mps" else torch.float64
    f, i = f.to(exact), i.to(exact)
    start = i.new_full((sizes["N"], X), EMPTY) if m is None else m.to(exact).clamp(min=EMPTY)
    F = f.clamp(min=STEEPEST).cumsum(1)
    # A NaN is no maximum: it spoils its own input and what follows from it, not the gates of others.
    over = i.nan_to_num(nan=-torch.inf, neginf=-torch.inf) - F
    if cu_seqlens is None:
        over = torch.maximum(start[:, None], over.gather(1, over.detach().cummax(1).indices))
        m = F + over
        m_before = torch.cat([start[:, None], m.detach()], 1)[:, :T]
        last = m[:, -1] if T else start
        scale_of_last = last.detach() if T else last
    else:
        sequence = sequence_of_token(cu_seqlens, T)
        begins = (torch.arange(T, device=i.device) == cu_seqlens[sequence])[:, None]
        padded = torch.nn.functional.pad(F[0], (0, 0, 1, 0))  # the sum before each token
        over = over.gather(1, _segmented_argmax(over.detach(), sequence))
        m = F + torch.maximum((start - padded[cu_seqlens[:-1]])[sequence], over)
        shifted = torch.nn.functional.pad(m[0], (0, 0, 1, 0))
        m_before = torch.where(begins, start[sequence], shifted[:T].detach())[None]
        some = (cu_seqlens.diff() > 0)[:, None]
        last = torch.where(some, shifted[cu_seqlens[1:]], start)
        scale_of_last = torch.where(some, last.detach(), start)
    now = m.detach()
    g, j = f + m_before - now, i - now
    # Rounding may leave a difference above 0 where it should be 0; the gradient is to pass nevertheless.
    g, j = (x - x.detach().clamp(min=0) for x in (g, j))
    g = torch.where(m_before <= EMPTY / 2, 0, g)
    final = last.to(dtype, copy=True)  # a slice would keep every maximum alive
    return Stabilized(g.to(dtype), j.to(dtype), m_before, m, final, (scale_of_last - final.to(exact)).exp())


def _segmented_argmax(x: Tensor, sequence: Tensor) -> Tensor:
    """x [1, T, X], sequence [T], never falling: the place of the largest x so far in the token's sequence, [1, T, X].

    By ranks, to which a whole number for each sequence can be added without rounding.
    """
    token = torch.arange(x.shape[1], device=x.device)[:, None].expand_as(x)
    rank = torch.empty_like(token).scatter_(1, x.argsort(1), token)
    return (rank + sequence[:, None] * x.shape[1]).cummax(1).indices
