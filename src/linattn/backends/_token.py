"""One token of the matrix recurrence: the definition that the reference interprets and generation runs."""

from __future__ import annotations

from torch import Tensor

from linattn.recurrence import Read, Write


def token(
    S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    u: Tensor | None,
    write: Write,
    read: Read,
) -> tuple[Tensor, Tensor]:
    """S [N, H, K, V]; q, k, a, b [N, H, K]; v [N, H, V]; decay = e^g [.., H, 1 or K]; beta [N, H]; u [H, K].

    Returns (o [N, H, V] before scaling, new S).
    """
    decayed = S if decay is None else S * decay.unsqueeze(-1)
    if write is Write.LOW_RANK:
        assert a is not None and b is not None
        new = decayed + b.unsqueeze(-1) * (a.unsqueeze(-2) @ S)
    else:
        new = decayed
    if write is Write.DELTA:
        assert beta is not None
        v = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ decayed).squeeze(-2))
    new = new + k.unsqueeze(-1) * v.unsqueeze(-2)
    if read is Read.AFTER:
        return (q.unsqueeze(-2) @ new).squeeze(-2), new
    o = (q.unsqueeze(-2) @ S).squeeze(-2)
    if u is not None:
        o = o + (q * u * k).sum(-1, keepdim=True) * v
    return o, new
