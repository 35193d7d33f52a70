"""Chunks of matrix products in torch: any device, forward and hand-written backward, memory O(T (K + V)).

Legend, for one chunk of C tokens (rows) and decays e_t = e^{g_t}; D is 1 or K, the channels of the gate:

    F_t = e_{m+1} ... e_t         decay since the chunk's anchor m, its middle; before it 1 / (e_{t+1} ... e_m)
    M   = Diag(e_1 ... e_m) S     the state at the anchor (the "head" decay)
    S'  = Diag(e_{m+1} ... e_C) (M + Y^T U)               (the "tail" decay)

Dividing the state by F makes the decay disappear inside the chunk: queries become q F, keys k / F, and every mechanism
is the same few products. A low-rank write adds one triangular system. With left rows q and a (they read the state) and
right rows y and b (they are written to it):

    P = tril(q y^T)     o = q M + P U
    additive   U = v
    delta      U = (I - stril(a y^T))^{-1} (v + a M)                a = -k, y = beta k
    low rank   W = (I - stril(a b^T))^{-1} (a M + stril(a y^T) v)   and b^T W joins y^T v, stril/tril(q b^T) W joins P v

Three tiers, chosen by the data of each segment of chunks:
  - ordinary: F stays within e^{±64}, as above. F is a running product, not e^{sum}: neighbours keep full precision;
  - strong: the segment is cut into chunks of 16 and every pair of tokens is weighed by its own product of decays, all
    ≤ 1. Exact for any gate, −inf included;
  - one token: the recurrence itself.
mode="recurrent" is chunks of one token, mode="parallel" one chunk of all tokens: the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.backends import _boundary
from linattn.backends._boundary import KERNELS, Grads, Kernel, Saved
from linattn.backends._packing import Bucket, buckets
from linattn.backends._protocol import Backend, MatrixInputs, Request, check_values, repeat_heads, state_dtype
from linattn.backends._token import token
from linattn.recurrence import Mode, Read, Write

CHUNK = 64
STRONG_CHUNK = 16
RANGE = math.exp(-64)  # the smallest decay that an ordinary chunk may have on either side of its anchor
SEGMENT = {"cpu": 1 << 18}  # elements of [n, B, H, C, max(K, V)] worked on together: the cache of a CPU core
SEGMENT_OTHER = 1 << 23
BASE = 8  # triangular blocks inverted row by row; larger ones from halves


def _segments(T: int, C: int, per: int) -> Iterator[tuple[int, int, int]]:
    """(first token, chunks, tokens a chunk) of each segment of ``per`` chunks; a last, shorter chunk stands alone."""
    whole = T // C
    for i in range(0, whole, per):
        yield i * C, min(per, whole - i), C
    if T % C:
        yield whole * C, 1, T % C


def _plan(x: MatrixInputs, mode: str) -> list[tuple[int, int, int]]:
    (B, T, H, V), K = x.v.shape, x.k.shape[-1]
    C = {"recurrent": 1, "parallel": max(T, 1)}.get(mode, CHUNK)
    per = SEGMENT.get(x.v.device.type, SEGMENT_OTHER) // (C * max(B * H * max(K, V), 1))
    return list(_segments(T, C, min(max(1, per), CHUNK) if C == 1 else max(1, per)))


def _kept(n: int, C: int) -> int:
    """How many states of a segment the forward keeps for the backward: one a chunk, but none a token."""
    return n if C > STRONG_CHUNK else 1


def _load(x: Tensor, t0: int, n: int, C: int, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, T, G, ...] -> [n, B, H, C, ...], contiguous, in the compute dtype."""
    part = x[:, t0 : t0 + n * C].unflatten(1, (n, C)).movedim((1, 2), (0, 3))
    if part.shape[2] != heads:
        part = repeat_heads(part, heads)
    return part.to(dtype).contiguous()


def _store(target: Tensor, value: Tensor, t0: int, scale: float = 1.0) -> None:
    """scale * [n, B, H, C, ...] -> its places in [B, T, G, ...], summed over the heads of a group."""
    n, _, H, C = value.shape[:4]
    if target.shape[2] != H:
        value = value.unflatten(2, (target.shape[2], -1)).sum(3)
    place = target[:, t0 : t0 + n * C].unflatten(1, (n, C)).movedim((1, 2), (0, 3))
    place.copy_(value) if scale == 1 else torch.mul(value, scale, out=place)


def _inverse(L: Tensor) -> Tensor:
    """(I - L)^{-1} for strictly lower triangular L [.., C, C].

    Blocks of 8 by substitution, then [[A, 0], [B, D]]^{-1} from the halves: backward stable, unlike a Neumann series.
    """
    C, size = L.shape[-1], BASE
    while size < C:
        size *= 2
    if size != C:
        L = torch.nn.functional.pad(L, (0, size - C, 0, size - C))
    X = torch.zeros_like(L)
    steps = size // BASE
    diagonal = L.unflatten(-1, (steps, BASE)).unflatten(-3, (steps, BASE)).diagonal(0, -4, -2).movedim(-1, -3)
    block = torch.eye(BASE, dtype=L.dtype, device=L.device).expand(diagonal.shape).contiguous()
    for i in range(1, BASE):
        block[..., i, :i] = (diagonal[..., i, :i, None] * block[..., :i, :i]).sum(-2)
    X.unflatten(-1, (steps, BASE)).unflatten(-3, (steps, BASE)).diagonal(0, -4, -2).movedim(-1, -3).copy_(block)
    half = BASE
    while half < size:
        grid = (size // (2 * half), 2 * half)
        Ls, Xs = (Y.unflatten(-1, grid).unflatten(-3, grid).diagonal(0, -4, -2).movedim(-1, -3) for Y in (L, X))
        lower = Xs[..., half:, half:] @ Ls[..., half:, :half] @ Xs[..., :half, :half]
        Xs[..., half:, :half] = lower
        half *= 2
    return X[..., :C, :C]


def _add(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def _product(x: Tensor, y: Tensor, total: Tensor | None = None) -> Tensor:
    """x y, added to ``total`` in place where it is given."""
    if total is None:
        return x @ y
    flat = total.flatten(0, 2)
    torch.baddbmm(flat, x.flatten(0, 2), y.flatten(0, 2), out=flat)
    return total


def _from_right(x: Tensor) -> Tensor:
    """Sum over this row and all later ones."""
    return x.flip(-2).cumsum(-2).flip(-2)


@dataclass
class _Rows:
    """Rows that read (``left``) or write the state: raw, rescaled, and the gradients of both.

    ``late``: left rows that read the state before their own token's decay.
    """

    raw: Tensor
    scaled: Tensor
    left: bool
    late: bool
    d_scaled: Tensor | None = None
    d_raw: Tensor | None = None


class _Ordinary:
    """Rescaling. Also serves no decay at all, where every factor is 1 and left out."""

    def __init__(self, g: Tensor | None) -> None:
        self.F: Tensor | None = None
        self.head = self.tail = None
        self.dG: Tensor | None = None
        if g is None:
            return
        e = g.exp()
        m = e.shape[-2] // 2
        F = torch.empty_like(e)
        torch.cumprod(e[..., m:, :], -2, out=F[..., m:, :])
        self.head, self.tail = torch.ones_like(F[..., 0, :]), F[..., -1, :]
        if m:
            torch.cumprod(e[..., :m, :], -2, out=F[..., :m, :])
            self.head = F[..., m - 1, :].clone()
            F[..., :m, :] /= self.head.unsqueeze(-2)
        self.F = F

    def in_range(self) -> bool:
        if self.F is None:
            return True
        return bool(torch.minimum(self.head.amin(), self.tail.amin()) >= RANGE)  # type: ignore[union-attr]

    @property
    def post(self) -> Tensor | None:
        """What a chunk's writes decay by until its end."""
        return self.tail

    @property
    def whole(self) -> Tensor | None:
        """A whole chunk's decay."""
        return None if self.head is None or self.tail is None else self.head * self.tail

    def _late(self) -> Tensor:
        assert self.F is not None and self.head is not None
        return torch.cat([self.head.reciprocal().unsqueeze(-2), self.F[..., :-1, :]], -2)

    def rows(self, x: Tensor, left: bool, late: bool = False) -> _Rows:
        if self.F is None:
            scaled = x
        elif left:
            scaled = x * (self._late() if late else self.F)
        else:
            scaled = x / self.F
        return _Rows(x, scaled, left, late)

    def pair(self, x: _Rows, y: _Rows, strict: bool) -> Tensor:
        return (x.scaled @ y.scaled.mT).tril_(-1 if strict else 0)

    def pair_backward(self, dP: Tensor, x: _Rows, y: _Rows, strict: bool) -> None:
        dP = dP.tril_(-1 if strict else 0)
        x.d_scaled = _product(dP, y.scaled, x.d_scaled)
        y.d_scaled = _product(dP.mT, x.scaled, y.d_scaled)

    def gradient(self, rows: _Rows, need_g: bool) -> Tensor:
        """Gradient of the raw rows; with ``need_g`` that of log F is collected."""
        d = rows.d_scaled
        assert d is not None
        if self.F is None:
            return d
        if need_g:
            dG = rows.scaled * d
            if self.F.shape[-1] == 1:
                dG = dG.sum(-1, keepdim=True)
            if rows.late:
                dG = torch.cat([dG[..., 1:, :], torch.zeros_like(dG[..., :1, :])], -2)
            if self.dG is None:
                self.dG = dG if rows.left else dG.neg_()
            else:
                self.dG.add_(dG, alpha=1 if rows.left else -1)
        if rows.left:
            return d.mul_(self._late() if rows.late else self.F)
        return d.div_(self.F)

    def gate_gradient(self, Ms: Tensor, Ss: Tensor, dSs: Tensor) -> Tensor:
        """dg [n, B, H, C, D]. Shifting the anchor changes nothing, so only the last token feels the state's end."""
        assert self.dG is not None
        end = (Ss[1:] * dSs).sum(-1)
        if self.dG.shape[-1] == 1:
            end = end.sum(-1, keepdim=True)
        self.dG[..., -1, :] += end
        return _from_right(self.dG)


class _Strong:
    """Every pair weighed by its own product of decays: R_ij = e_{j+1} ... e_i ≤ 1."""

    head = post = None

    def __init__(self, g: Tensor) -> None:
        e = g.exp()
        C = e.shape[-2]
        R = e.new_zeros(*e.shape[:-2], C, C, e.shape[-1])
        for i in range(C):
            if i:
                R[..., i, :i, :] = R[..., i - 1, :i, :] * e[..., i, None, :]
            R[..., i, i, :] = 1
        self.R, self.A = R, e.cumprod(-2)
        self.whole = self.A[..., -1, :]
        self.dg: Tensor | None = None

    def _weights(self, late: bool) -> Tensor:
        return torch.cat([torch.zeros_like(self.R[..., :1, :, :]), self.R[..., :-1, :, :]], -3) if late else self.R

    def rows(self, x: Tensor, left: bool, late: bool = False) -> _Rows:
        return _Rows(x, x * self._state_weight(left, late), left, late)

    def _state_weight(self, left: bool, late: bool) -> Tensor:
        if not left:
            return self.R[..., -1, :, :]
        if late:
            return torch.cat([torch.ones_like(self.A[..., :1, :]), self.A[..., :-1, :]], -2)
        return self.A

    def pair(self, x: _Rows, y: _Rows, strict: bool) -> Tensor:
        R = self._weights(x.late)
        if R.shape[-1] == 1:
            P = (x.raw @ y.raw.mT) * R[..., 0]
        else:
            P = (x.raw.unsqueeze(-2) * R).mul_(y.raw.unsqueeze(-3)).sum(-1)
        return P.tril_(-1) if strict else P

    def pair_backward(self, dP: Tensor, x: _Rows, y: _Rows, strict: bool) -> None:
        dP = dP.tril_(-1 if strict else 0)
        R = self._weights(x.late)
        if R.shape[-1] == 1:
            Z = dP * R[..., 0]
            x.d_raw, y.d_raw = _product(Z, y.raw, x.d_raw), _product(Z.mT, x.raw, y.d_raw)
            weight = (Z * (x.raw @ y.raw.mT)).unsqueeze(-1)
        else:
            Z = dP.unsqueeze(-1) * R
            x.d_raw = _add(x.d_raw, (Z * y.raw.unsqueeze(-3)).sum(-2))
            Z *= x.raw.unsqueeze(-2)
            y.d_raw = _add(y.d_raw, Z.sum(-3))
            weight = Z.mul_(y.raw.unsqueeze(-3))
        # token l decays every pair with j < l ≤ i (l < i for late rows)
        C = weight.shape[-2]
        below = weight.flip(-3).cumsum(-3).flip(-3)
        if x.late:
            below = torch.cat([below[..., 1:, :, :], torch.zeros_like(below[..., :1, :, :])], -3)
        before = torch.ones(C, C, dtype=weight.dtype, device=weight.device).tril(-1).unsqueeze(-1)
        self.dg = _add(self.dg, (below * before).sum(-2))

    def gradient(self, rows: _Rows, need_g: bool) -> Tensor:
        d, total = rows.d_scaled, rows.d_raw
        if d is not None:
            if need_g:
                z = rows.scaled * d
                if self.A.shape[-1] == 1:
                    z = z.sum(-1, keepdim=True)
                if rows.left:  # token l decays every row i ≥ l, or i > l
                    z = _from_right(z)
                if rows.late or not rows.left:  # and every written row j < l
                    z = z if rows.left else z.cumsum(-2)
                    edge = torch.zeros_like(z[..., :1, :])
                    z = torch.cat([z[..., 1:, :], edge] if rows.left else [edge, z[..., :-1, :]], -2)
                self.dg = _add(self.dg, z)
            d = d * self._state_weight(rows.left, rows.late)
            total = d if total is None else total + d
        assert total is not None
        return total

    def gate_gradient(self, Ms: Tensor, Ss: Tensor, dSs: Tensor) -> Tensor:
        end = (Ms * dSs).sum(-1) * self.whole
        if self.A.shape[-1] == 1:
            end = end.sum(-1, keepdim=True)
        return end.unsqueeze(-2) + (0 if self.dg is None else self.dg)


_Decays = _Ordinary | _Strong


def _columns(x: Tensor, decay: Tensor | None, states: bool = False) -> Tensor:
    """x with its key channels scaled: rows [n, B, H, C, K], or with ``states`` [n, B, H, K, V], by decay [.., D]."""
    return x if decay is None else x * decay.unsqueeze(-1 if states else -2)


def _walk(
    d: _Decays, S: Tensor, added: Tensor | None, X: Tensor | None, Y: Tensor | None, right: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Chunk after chunk: states at the anchors Ms [n, B, H, K, V], between chunks Ss [n + 1, ...], writes U = X + Y M.

    Each chunk adds ``added`` and right^T U, whichever is there.
    """
    source = added if added is not None else X
    assert source is not None
    n, whole = source.shape[0], d.whole
    added = None if added is None else _columns(added, d.post, states=True)
    Ss = S.new_empty(n + 1, *S.shape)
    Ss[0] = S
    U = None
    if X is not None and Y is not None and right is not None:
        U, Y, right = torch.empty_like(X), _columns(Y, d.head), _columns(right, d.post)
    for i in range(n):
        carried = Ss[i] if whole is None else Ss[i] * whole[i if whole.shape[0] > 1 else 0].unsqueeze(-1)
        if added is not None:
            torch.add(carried, added[i], out=Ss[i + 1])
            carried = Ss[i + 1]
        if U is not None and X is not None and Y is not None and right is not None:
            torch.baddbmm(*(t[i].flatten(0, 1) for t in (X, Y, Ss)), out=U[i].flatten(0, 1))
            out = Ss[i + 1].flatten(0, 1)
            torch.baddbmm(carried.flatten(0, 1), right[i].flatten(0, 1).mT, U[i].flatten(0, 1), out=out)
    return _columns(Ss[:n], d.head, states=True), Ss, U


def _walk_back(
    d: _Decays, dS: Tensor, read: Tensor, dU: Tensor | None, Y: Tensor | None, right: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk backwards: dSs [n, ...] at the chunks' ends, dWs = post dSs, and dS at the segment's start.

    ``read`` = q^T do. ``dU`` (do's part of the writes' gradient) receives right dW.
    """
    n, whole = read.shape[0], d.whole
    read = _columns(read, d.head, states=True)
    dSs = torch.empty_like(read)
    if Y is not None and right is not None:
        Y, right = _columns(Y, d.head), _columns(right, d.post)
    for i in reversed(range(n)):
        dSs[i] = dS
        dS = read[i] + (dS if whole is None else dS * whole[i if whole.shape[0] > 1 else 0].unsqueeze(-1))
        if dU is not None and Y is not None and right is not None:
            flat_U, flat_S = dU[i].flatten(0, 1), dS.flatten(0, 1)
            torch.baddbmm(flat_U, right[i].flatten(0, 1), dSs[i].flatten(0, 1), out=flat_U)
            torch.baddbmm(flat_S, Y[i].flatten(0, 1).mT, flat_U, out=flat_S)
    return dSs, _columns(dSs, d.post, states=True), dS


@dataclass
class _Segment:
    """The tensors of n chunks, [n, B, H, C, ...], in the compute dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    u: Tensor | None  # [H, 1, K]
    write: Write
    read: Read

    def operands(self, d: _Decays) -> tuple[_Rows, _Rows, _Rows | None, _Rows | None]:
        """Queries, written keys, and the low-rank term's two sides."""
        y = self.k if self.beta is None else self.k * self.beta.unsqueeze(-1)
        a = b = None
        if self.write is Write.DELTA:
            a = d.rows(-self.k, left=True)
        elif self.a is not None and self.b is not None:
            a, b = d.rows(self.a, left=True, late=True), d.rows(self.b, left=False)
        return d.rows(self.q, left=True, late=self.read is Read.BEFORE), d.rows(y, left=False), a, b

    def attention(self, d: _Decays, q: _Rows, y: _Rows) -> Tensor:
        P = d.pair(q, y, strict=q.late)
        if self.u is not None:
            P.diagonal(0, -2, -1).copy_((q.raw * self.u * y.raw).sum(-1))
        return P

    def forward(self, d: _Decays, S: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Output before scaling, the states between the chunks Ss [n + 1, ...], and the low-rank writes."""
        q, y, a, b = self.operands(d)
        added = X = Y = right = None
        if b is None and a is not None:
            inverse = _inverse(d.pair(a, y, strict=True))
            X, Y, right = inverse @ self.v, inverse @ a.scaled, y.scaled
        else:
            added = y.scaled.mT @ self.v
        if a is not None and b is not None:
            inverse = _inverse(d.pair(a, b, strict=True))
            X, Y, right = inverse @ (d.pair(a, y, strict=True) @ self.v), inverse @ a.scaled, b.scaled
        Ms, Ss, U = _walk(d, S, added, X, Y, right)
        P = self.attention(d, q, y)
        o = _product(q.scaled, Ms, P @ (U if U is not None and b is None else self.v))
        if b is not None and U is not None:
            o = _product(d.pair(q, b, strict=q.late), U, o)
        return o, Ss, U

    def states(self, d: _Decays, S: Tensor, U: Tensor | None) -> Tensor:
        """The states between the chunks, Ss [n + 1, ...], walked again."""
        _, y, _, b = self.operands(d)
        if U is None:
            return _walk(d, S, y.scaled.mT @ self.v, None, None, None)[1]
        added = y.scaled.mT @ (U if b is None else self.v)
        return _walk(d, S, added if b is None else _product(b.scaled.mT, U, added), None, None, None)[1]

    def backward(
        self, d: _Decays, Ss: Tensor, U: Tensor | None, do: Tensor, dS: Tensor, need_g: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of the segment's tensors by name, and of the state before it, given all states Ss."""
        q, y, a, b = self.operands(d)
        tied = a is not None and b is None  # the write's key is also the low-rank term's
        wrote = U if tied and U is not None else self.v
        Ms = _columns(Ss[:-1], d.head, states=True)
        P = self.attention(d, q, y)
        dwrote = P.mT @ do
        inverse = Y = dU = None
        if tied and a is not None:
            inverse = _inverse(d.pair(a, y, strict=True))
            Y, dU, right = inverse @ a.scaled, dwrote, y.scaled
        elif a is not None and b is not None:
            inverse = _inverse(d.pair(a, b, strict=True))
            Y, dU, right = inverse @ a.scaled, d.pair(q, b, strict=q.late).mT @ do, b.scaled
        else:
            right = None
        dSs, dWs, dS = _walk_back(d, dS, q.scaled.mT @ do, dU, Y, right)

        q.d_scaled = do @ Ms.mT
        y.d_scaled = wrote @ dWs.mT
        dP = do @ wrote.mT
        grads: dict[str, Tensor] = {}
        dq_bonus = dy_bonus = None
        if self.u is not None:
            diagonal = dP.diagonal(0, -2, -1).unsqueeze(-1)
            dq_bonus, dy_bonus = diagonal * self.u * y.raw, diagonal * self.u * q.raw
            grads["u"] = (diagonal * q.raw * y.raw).sum((0, 1, 3))
        d.pair_backward(dP, q, y, strict=q.late)
        if a is None:
            grads["v"] = _product(y.scaled, dWs, dwrote)
        else:
            assert inverse is not None and dU is not None and U is not None
            dX = inverse.mT @ dU
            a.d_scaled = dX @ Ms.mT
            if b is None:
                grads["v"] = dX
                d.pair_backward(dX @ U.mT, a, y, strict=True)
            else:
                b.d_scaled = U @ dWs.mT
                d.pair_backward(do @ U.mT, q, b, strict=q.late)
                d.pair_backward(dX @ U.mT, a, b, strict=True)
                d.pair_backward(dX @ self.v.mT, a, y, strict=True)
                grads["v"] = _product(d.pair(a, y, strict=True).mT, dX, _product(y.scaled, dWs, dwrote))
        dq, dy = d.gradient(q, need_g), d.gradient(y, need_g)
        grads["q"] = dq if dq_bonus is None else dq + dq_bonus
        dy = dy if dy_bonus is None else dy + dy_bonus
        if self.beta is not None:
            grads["beta"] = (dy * self.k).sum(-1)
            dy = dy * self.beta.unsqueeze(-1)
        if a is not None:
            da = d.gradient(a, need_g)
            if b is None:
                dy = dy - da
            else:
                grads["a"], grads["b"] = da, d.gradient(b, need_g)
        grads["k"] = dy
        if need_g:
            grads["g"] = d.gate_gradient(Ms, Ss, dSs)
        return grads, dS


class _Chunks(Kernel):
    def saved_shapes(self, x: MatrixInputs, mode: str) -> tuple[list[int], list[int]]:
        if x.cu_seqlens is not None:  # packed: the backward walks each bucket again
            return [0], [0]
        (B, _, H, V), K = x.v.shape, x.k.shape[-1]
        writes = [0] if x.write is Write.ADDITIVE else list(x.v.shape)
        return writes, [sum(_kept(n, C) for _, n, C in _plan(x, mode)) + 1, B, H, K, V]

    def _segment(self, x: MatrixInputs, t0: int, n: int, C: int) -> _Segment:
        H, dtype = x.v.shape[2], state_dtype(x.v.dtype)

        def load(t: Tensor | None) -> Tensor | None:
            return None if t is None else _load(t, t0, n, C, H, dtype)

        g = x.g
        if g is not None:
            if g.dim() < 3:  # fixed: [H] or [H, K] -> [1, 1, H, C, D]
                g = g.to(dtype).reshape(1, 1, H, 1, -1).expand(1, 1, H, C, -1)
            else:
                g = load(g if g.dim() == 4 else g.unsqueeze(-1))
        q, k, v = load(x.q), load(x.k), load(x.v)
        assert q is not None and k is not None and v is not None
        u = None if x.u is None else x.u.to(dtype).unsqueeze(1)
        return _Segment(q, k, v, g, load(x.beta), load(x.a), load(x.b), u, x.write, x.read)

    def _pieces(self, x: MatrixInputs, t0: int, n: int, C: int, mode: str) -> list[tuple[int, _Segment, _Decays]]:
        """The segment, or, where the gates are too strong to rescale, smaller pieces of it."""
        s = self._segment(x, t0, n, C)
        if C > 1 or s.g is None:
            ordinary = _Ordinary(s.g)
            if ordinary.in_range():
                return [(t0, s, ordinary)]
        assert s.g is not None
        if C <= STRONG_CHUNK or mode == Mode.PARALLEL.value:
            return [(t0, s, _Strong(s.g))]
        pieces: list[tuple[int, _Segment, _Decays]] = []
        for start, m, c in _segments(n * C, STRONG_CHUNK, n * C):
            part = self._segment(x, t0 + start, m, c)
            assert part.g is not None
            pieces.append((t0 + start, part, _Strong(part.g)))
        return pieces

    def _first_state(self, x: MatrixInputs, rows: int) -> Tensor:
        dtype = state_dtype(x.v.dtype)
        if x.state is not None:
            return x.state.to(dtype)
        return x.v.new_zeros(rows, x.v.shape[2], x.k.shape[-1], x.v.shape[-1], dtype=dtype)

    def _buckets(self, x: MatrixInputs, ends: list[int]) -> Iterator[tuple[Bucket, MatrixInputs]]:
        """Packed sequences as padded batches. Fixed gates become gates of tokens, which stand still at padding."""
        g = x.g
        if g is not None and g.dim() < 3:
            g = g.expand(1, x.v.shape[1], *g.shape)
        tokens = {"q": x.q, "k": x.k, "v": x.v, "g": g, "beta": x.beta, "a": x.a, "b": x.b}
        for bucket in buckets(ends, x.v.device):
            gathered: dict[str, Any] = {name: None if t is None else bucket.gather(t) for name, t in tokens.items()}
            state = None if x.state is None else x.state[bucket.rows]
            yield bucket, x._replace(**gathered, state=state, cu_seqlens=None)

    def forward(self, x: MatrixInputs, ends: list[int] | None, mode: str, save: bool) -> tuple[Tensor, Tensor, Saved]:
        B, dtype = x.v.shape[0], state_dtype(x.v.dtype)
        o = x.v.new_empty(x.v.shape)
        writes, states = x.v.new_empty(0, dtype=dtype), x.v.new_empty(0, dtype=dtype)
        if ends is not None:
            S = self._first_state(x, len(ends) - 1).clone()
            for bucket, part in self._buckets(x, ends):
                o_part, S[bucket.rows], _ = self.forward(part, None, mode, False)
                bucket.scatter(o, o_part)
            return o, S, Saved(writes, states)
        plan, S = _plan(x, mode), self._first_state(x, B)
        if save:
            states = S.new_empty(sum(_kept(n, C) for _, n, C in plan) + 1, *S.shape)
            states[0] = S
            writes = writes if x.write is Write.ADDITIVE else x.v.new_empty(x.v.shape, dtype=dtype)
        first = 0
        for t0, n, C in plan:
            kept = _kept(n, C)
            for t, s, d in self._pieces(x, t0, n, C, mode):
                out, Ss, U = s.forward(d, S)
                S = Ss[-1]
                _store(o, out, t, x.scale)
                if save:
                    if kept > 1:  # one piece, in chunks of C or of a part of it
                        states[first + 1 : first + kept + 1] = Ss[1:].unflatten(0, (kept, -1))[:, -1]
                    else:
                        states[first + 1] = S
                    if U is not None:
                        _store(writes, U, t)
            first += kept
        return o, S.clone(), Saved(writes, states)

    def backward(
        self, x: MatrixInputs, ends: list[int] | None, mode: str, saved: Saved, do: Tensor, dS: Tensor, need_g: bool
    ) -> Grads:
        dtype = state_dtype(x.v.dtype)
        tokens = {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta, "a": x.a, "b": x.b}
        grads = {name: None if t is None else t.new_empty(t.shape) for name, t in tokens.items()}
        summed = {"g": x.g if need_g else None, "u": x.u}  # in the compute dtype: fixed gates sum over all tokens
        grads |= {name: None if t is None else t.new_zeros(t.shape, dtype=dtype) for name, t in summed.items()}
        dS = dS.clone()
        if ends is not None:
            for bucket, part in self._buckets(x, ends):
                _, _, kept = self.forward(part, None, mode, True)
                piece = self.backward(part, None, mode, kept, bucket.gather(do), dS[bucket.rows], need_g)
                dS[bucket.rows] = piece.state
                for name, target in grads.items():
                    grad = getattr(piece, name)
                    if target is None:
                        continue
                    if name == "u":
                        target += grad
                    elif name == "g" and target.dim() < 3:
                        target += grad[bucket.real].sum(0)
                    else:
                        bucket.scatter(target, grad)
        else:
            last = saved.states.shape[0] - 1
            for t0, n, C in reversed(_plan(x, mode)):
                first = last - _kept(n, C)
                held = Saved(saved.writes, saved.states[first : last + 1])
                dS = self._backward_segment(x, self._pieces(x, t0, n, C, mode), held, do, dS, need_g, grads)
                last = first
        for name, like in summed.items():
            grad = grads[name]
            grads[name] = None if grad is None or like is None else grad.to(like.dtype)
        return Grads(**grads, state=dS)  # type: ignore[arg-type]

    def _backward_segment(
        self, x: MatrixInputs, pieces: list[tuple[int, _Segment, _Decays]], saved: Saved,
        do: Tensor, dS: Tensor, need_g: bool, grads: dict[str, Tensor | None],
    ) -> Tensor:  # fmt: skip
        """Fill the segment's part of ``grads``; returns the gradient of the state before it."""
        H, dtype = x.v.shape[2], state_dtype(x.v.dtype)
        writes: list[Tensor | None] = [
            None if x.write is Write.ADDITIVE else _load(saved.writes, t, s.q.shape[0], s.q.shape[3], H, dtype)
            for t, s, _ in pieces
        ]
        walked = [saved.states]
        if len(pieces) > 1 or len(saved.states) != len(pieces[0][1].q) + 1:  # not kept chunk by chunk
            walked = []
            for (_, s, d), U in zip(pieces, writes, strict=True):
                walked.append(s.states(d, walked[-1][-1] if walked else saved.states[0], U))
        for (t0, s, d), U, Ss in reversed(list(zip(pieces, writes, walked, strict=True))):
            got, dS = s.backward(d, Ss, U, _load(do, t0, s.q.shape[0], s.q.shape[3], H, dtype) * x.scale, dS, need_g)
            for name, value in got.items():
                target = grads[name]
                assert target is not None
                if name == "u":
                    target += value
                elif name == "g" and target.dim() < 3:
                    target += value.sum((0, 1, 3)).reshape(target.shape)
                elif name == "g" and target.dim() == 3:
                    _store(target, value.squeeze(-1), t0)
                else:
                    _store(target, value, t0)
        return dS

    def scan(self, x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        """Rows of about sqrt(T) tokens side by side, then their carries one after another: exact, only products ≤ 1."""
        B, T, D = x.shape
        C = max(1, math.isqrt(T))
        n = -(-T // C)
        h = x.new_zeros(B, n * C, D)
        h[:, :T] = x
        A = x.new_ones(B, n * C, D)
        A[:, :T] = decay
        h, A = h.view(B, n, C, D), A.view(B, n, C, D)
        for t in range(1, C):
            h[:, :, t].addcmul_(A[:, :, t], h[:, :, t - 1])
            A[:, :, t] *= A[:, :, t - 1]
        for i in range(n):
            h[:, i].addcmul_(A[:, i], state.unsqueeze(1))
            state = h[:, i, -1]
        return h.view(B, n * C, D)[:, :T].clone()


class Chunked(Backend):
    """Matrix products over chunks of 64 tokens, on any device torch knows."""

    name = "chunked"
    modes = (Mode.CHUNKWISE, Mode.RECURRENT, Mode.PARALLEL)

    def refuses(self, request: Request) -> str | None:
        return None

    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        x = inputs
        if x.v.shape[1] == 1 and x.cu_seqlens is None and mode in (None, Mode.RECURRENT):
            return _one_token(x)
        return _boundary.matrix(x, (mode or Mode.CHUNKWISE).value, self.name)

    def scan(
        self, x: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mode: Mode | None
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            check_values(g, cu_seqlens, x.shape[1])
        return _boundary.scan(x, g, state, cu_seqlens, self.name)


def _one_token(x: MatrixInputs) -> tuple[Tensor, Tensor]:
    """Generation: plain differentiable torch, no op boundary."""
    if not torch.compiler.is_compiling():
        check_values(x.g, None, 1)
    (B, _, H, V), K, dtype = x.v.shape, x.k.shape[-1], state_dtype(x.v.dtype)
    with torch.autocast(x.v.device.type, enabled=False):
        q, k = (repeat_heads(t[:, 0], H, 1).to(dtype) for t in (x.q, x.k))
        beta, a, b = (None if t is None else t[:, 0].to(dtype) for t in (x.beta, x.a, x.b))
        decay = None
        if x.g is not None:
            g = x.g if x.g.dim() < 3 else x.g[:, 0]
            decay = (g if x.g.dim() % 2 == 0 else g.unsqueeze(-1)).to(dtype).exp()
        S = x.v.new_zeros(B, H, K, V, dtype=dtype) if x.state is None else x.state
        u = None if x.u is None else x.u.to(dtype)
        o, S = token(S, q, k, x.v[:, 0].to(dtype), decay, beta, a, b, u, x.write, x.read)
        return (x.scale * o).to(x.v.dtype).unsqueeze(1), S


KERNELS[Chunked.name] = _Chunks()
