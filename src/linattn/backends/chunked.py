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
  - ordinary: F stays within e^{±64}, and some gate is mild, as above. F is a running product, not e^{sum}: neighbours
    keep full precision;
  - strong: the segment is cut into chunks of 16 and every pair of tokens is weighed by its own product of decays, all
    ≤ 1. Exact for any gate, −inf included;
  - one token: the recurrence itself.
mode="recurrent" is chunks of one token, mode="parallel" one chunk of all tokens: the same code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.backends import _boundary
from linattn.backends._boundary import KERNELS, SCANS, SELECTIVE, Grads, Kernel, Saved, state_like
from linattn.backends._elementwise import elementwise
from linattn.backends._packing import Bucket, buckets
from linattn.backends._protocol import (
    Backend,
    MatrixInputs,
    Request,
    SelectiveInputs,
    check_values,
    repeat_heads,
    state_dtype,
)
from linattn.backends._selective import Segments, one_token
from linattn.backends._token import token
from linattn.recurrence import Engine, Mode, Read, Write

CHUNK = 64
LOW_RANK_CHUNK = 32  # the triangular system of a longer one loses precision
STRONG_CHUNK = 16
RANGE = math.exp(-64)  # the smallest decay that an ordinary chunk may have on either side of its anchor
LASTS = 0.25  # the mildest decay a token, in the mean over a chunk, that an ordinary chunk must have in some channel
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
    chunk = CHUNK
    if x.write is not Write.ADDITIVE:  # with one channel a write overwrites all: a product, no difference of sums
        chunk = LOW_RANK_CHUNK if K > 1 else 1
    C = {"recurrent": 1, "parallel": max(T, 1)}.get(mode, chunk)
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
    if C == 1:
        return torch.ones_like(L)
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
    """Rows that read (``left``) or write the state: raw, rescaled, and their gradients.

    ``scaled`` rows meet each other, by way of the chunk's anchor; ``outer`` ones meet the state at the chunk's start
    (left) or end. ``late``: left rows that read the state before their own token's decay. ``d_state`` is the gradient
    of the rescaled rows through the state, ``d_pair`` that through the pairs inside the chunk, of rescaled (ordinary)
    or raw (strong) rows.
    """

    raw: Tensor
    scaled: Tensor
    outer: Tensor
    left: bool
    late: bool
    d_state: Tensor | None = None
    d_pair: Tensor | None = None


class _Decays(ABC):
    """The decays of a segment's chunks, and how rows meet under them.

    ``dg`` collects the gates' gradient where it is wanted. A token's decay lies on every path from an earlier token (or
    the state) to itself or a later one (or the state after); the paths are summed as they are, for sums over all rows
    of which most cancel would lose the small gradients of strong gates.
    """

    head: Tensor | None = None  # decay from the chunk's start to its anchor; None: the anchor is where rows meet states
    post: Tensor | None = None  # decay from the anchor to the chunk's end
    whole: Tensor | None = None  # decay of the whole chunk
    dg: Tensor | None = None
    later: Tensor | None = None  # rows' parts of it that every token up to theirs shares
    earlier: Tensor | None = None  # rows' parts of it that every token after theirs shares
    scalar = False  # one gate a head

    def __init__(self, need_g: bool) -> None:
        self.need_g = need_g

    @abstractmethod
    def weight(self, left: bool, late: bool) -> Tensor | None:
        """What rows are scaled by to meet at the anchor; None is 1."""

    @abstractmethod
    def pair(self, x: _Rows, y: _Rows, strict: bool) -> Tensor:
        """How much left row i reads of right row j: [.., C, C], lower triangular."""

    @abstractmethod
    def pair_backward(self, dP: Tensor, P: Tensor, x: _Rows, y: _Rows, strict: bool) -> None:
        """The rows' gradients (and the gates') through P = pair(x, y), given that of P."""

    def rows(self, x: Tensor, left: bool, late: bool = False) -> _Rows:
        """Rows, scaled to meet each other and the state."""
        weight, rest = self.weight(left, late), self._rest(left)
        scaled = x if weight is None else x * weight
        outer = scaled if weight is None or rest is None else x * (weight * rest)
        return _Rows(x, scaled, outer, left, late)

    def _rest(self, left: bool) -> Tensor | None:
        """The decay between the anchor and the end of the chunk where rows meet the state."""
        rest = self.head if left else self.post
        return None if rest is None else rest.unsqueeze(-2)

    @abstractmethod
    def gradient(self, rows: _Rows) -> Tensor:
        """Gradient of the raw rows, all told."""

    def through_state(self, rows: _Rows, d_outer: Tensor) -> None:
        """Take the gradient of the outer rows through the state (before any pair's) and collect the gates'."""
        rest = self._rest(rows.left)
        rows.d_state = d_outer if rest is None else d_outer.mul_(rest)
        if self.need_g:  # a left row is decayed by the tokens l ≤ i (late: l < i), a written one by those after it
            self._collect_rows(rows, self._sum(rows.scaled * rows.d_state), rows.left)

    def _collect_rows(self, rows: _Rows, z: Tensor, up_to: bool) -> None:
        if rows.late:
            z = torch.cat([z[..., 1:, :], torch.zeros_like(z[..., :1, :])], -2)
        if up_to:
            self.later = _add(self.later, z)
        else:
            self.earlier = _add(self.earlier, z)

    def gate_gradient(self, Ss: Tensor, dSs: Tensor) -> Tensor:
        """dg [n, B, H, C, D], with the path that crosses the whole chunk, from the state before it to the one after."""
        across = self._sum((Ss * dSs).sum(-1))
        if self.whole is not None:
            across = across * self.whole
        dg = across.unsqueeze(-2) + (0 if self.dg is None else self.dg)
        if self.later is not None:
            dg = dg + _from_right(self.later)
        if self.earlier is not None:
            dg[..., 1:, :] += self.earlier.cumsum(-2)[..., :-1, :]
        return dg

    def _sum(self, z: Tensor) -> Tensor:
        return z.sum(-1, keepdim=True) if self.scalar else z

    def _collect_scalar_pairs(self, weight: Tensor, late: bool) -> None:
        """:meth:`_collect_pairs` for weight [.., C, C]: sums over j < l by a product, then those over i."""
        C = weight.shape[-1]
        before = torch.ones(C, C, dtype=weight.dtype, device=weight.device).triu(1)
        self.dg = _add(self.dg, (weight @ before).tril_(-1 if late else 0).sum(-2).unsqueeze(-1))

    def _collect_pairs(self, weight: Tensor, late: bool) -> None:
        """weight [.., C, C, D]: token l decays every pair with j < l ≤ i (l < i for late rows)."""
        C = weight.shape[-2]
        below = weight.flip(-3).cumsum(-3).flip(-3)
        if late:
            below = torch.cat([below[..., 1:, :, :], torch.zeros_like(below[..., :1, :, :])], -3)
        before = torch.ones(C, C, dtype=weight.dtype, device=weight.device).tril(-1).unsqueeze(-1)
        self.dg = _add(self.dg, below.mul_(before).sum(-2))


class _Ordinary(_Decays):
    """Rescaling. Also serves no decay at all, where every factor is 1 and left out."""

    def __init__(self, g: Tensor | None, need_g: bool = False) -> None:
        super().__init__(need_g)
        self.F: Tensor | None = None
        if g is None:
            return
        e = g.exp()
        m = e.shape[-2] // 2
        F = torch.empty_like(e)
        torch.cumprod(e[..., m:, :], -2, out=F[..., m:, :])
        self.head, self.post = torch.ones_like(F[..., 0, :]), F[..., -1, :]
        if m:
            torch.cumprod(e[..., :m, :], -2, out=F[..., :m, :])
            self.head = F[..., m - 1, :].clone()
            F[..., :m, :] /= self.head.unsqueeze(-2)
        self.F, self.whole, self.scalar = F, self.head * self.post, F.shape[-1] == 1

    def in_range(self) -> bool:
        """Nothing over- or underflows, and something lasts: where all gates are strong, their gradients are too small
        to be had as differences of sums.
        """
        if self.F is None or self.head is None or self.post is None or self.whole is None or self.F.numel() == 0:
            return True
        lasts = self.whole.amax() >= LASTS ** self.F.shape[-2]
        return bool((torch.minimum(self.head.amin(), self.post.amin()) >= RANGE) & lasts)

    def weight(self, left: bool, late: bool) -> Tensor | None:
        if self.F is None or self.head is None:
            return None
        if not left:
            return self.F.reciprocal()
        return torch.cat([self.head.reciprocal().unsqueeze(-2), self.F[..., :-1, :]], -2) if late else self.F

    def pair(self, x: _Rows, y: _Rows, strict: bool) -> Tensor:
        return (x.scaled @ y.scaled.mT).tril_(-1 if strict else 0)

    def pair_backward(self, dP: Tensor, P: Tensor, x: _Rows, y: _Rows, strict: bool) -> None:
        dP = dP.tril_(-1 if strict else 0)
        if not self.need_g or self.scalar:  # one buffer serves both gradients
            x.d_state = _product(dP, y.scaled, x.d_state)
            y.d_state = _product(dP.mT, x.scaled, y.d_state)
            if self.need_g:
                self._collect_scalar_pairs(dP * P, x.late)
        else:
            x.d_pair = _product(dP, y.scaled, x.d_pair)
            y.d_pair = _product(dP.mT, x.scaled, y.d_pair)

    def gradient(self, rows: _Rows) -> Tensor:
        d = rows.d_state
        assert d is not None
        if rows.d_pair is not None:  # with a gate for every channel the pairs' paths are had as a difference after all
            dG = rows.scaled * rows.d_pair
            self._collect_rows(rows, dG if rows.left else dG.neg_(), up_to=True)
            d = d.add_(rows.d_pair)
        weight = self.weight(rows.left, rows.late)
        return d if weight is None else d.mul_(weight)


class _Strong(_Decays):
    """Every pair weighed by its own product of decays: R_ij = e_{j+1} ... e_i ≤ 1."""

    def __init__(self, g: Tensor, need_g: bool = False) -> None:
        super().__init__(need_g)
        e = g.exp()
        C = e.shape[-2]
        R = e.new_zeros(*e.shape[:-2], C, C, e.shape[-1])
        for i in range(C):
            if i:
                R[..., i, :i, :] = R[..., i - 1, :i, :] * e[..., i, None, :]
            R[..., i, i, :] = 1
        self.R, self.A = R, e.cumprod(-2)
        self.whole, self.scalar = self.A[..., -1, :], e.shape[-1] == 1

    def weight(self, left: bool, late: bool) -> Tensor:
        if not left:
            return self.R[..., -1, :, :]
        return torch.cat([torch.ones_like(self.A[..., :1, :]), self.A[..., :-1, :]], -2) if late else self.A

    def _products(self, late: bool) -> Tensor:
        return torch.cat([torch.zeros_like(self.R[..., :1, :, :]), self.R[..., :-1, :, :]], -3) if late else self.R

    def pair(self, x: _Rows, y: _Rows, strict: bool) -> Tensor:
        R = self._products(x.late)
        P = (
            (x.raw @ y.raw.mT) * R[..., 0]
            if self.scalar
            else (x.raw.unsqueeze(-2) * R).mul_(y.raw.unsqueeze(-3)).sum(-1)
        )
        return P.tril_(-1) if strict else P

    def pair_backward(self, dP: Tensor, P: Tensor, x: _Rows, y: _Rows, strict: bool) -> None:
        dP = dP.tril_(-1 if strict else 0)
        R = self._products(x.late)
        if self.scalar:
            Z = dP * R[..., 0]
            x.d_pair, y.d_pair = _product(Z, y.raw, x.d_pair), _product(Z.mT, x.raw, y.d_pair)
            if self.need_g:
                self._collect_scalar_pairs(dP * P, x.late)
        else:
            Z = dP.unsqueeze(-1) * R
            x.d_pair = _add(x.d_pair, (Z * y.raw.unsqueeze(-3)).sum(-2))
            Z *= x.raw.unsqueeze(-2)
            y.d_pair = _add(y.d_pair, Z.sum(-3))
            if self.need_g:
                self._collect_pairs(Z.mul_(y.raw.unsqueeze(-3)), x.late)

    def gradient(self, rows: _Rows) -> Tensor:
        total = rows.d_pair
        if rows.d_state is not None:
            d = rows.d_state * self.weight(rows.left, rows.late)
            total = d if total is None else total + d
        assert total is not None
        return total


def _walk(
    d: _Decays, S: Tensor, added: Tensor | None, low_rank: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Chunk after chunk: the states between them, Ss [n + 1, B, H, K, V], and the low-rank writes U.

    Each chunk adds ``added`` and, with ``low_rank`` = (base, left, right), right^T U, where U = base + left S.
    """
    n = (added if added is not None else low_rank[0]).shape[0]  # type: ignore[index]
    Ss = S.new_empty(n + 1, *S.shape)
    Ss[0] = S
    U = None if low_rank is None else torch.empty_like(low_rank[0])
    for i in range(n):
        _carry(Ss[i], d, i, None if added is None else added[i], out=Ss[i + 1])
        if U is not None and low_rank is not None:
            base, left, right = (t[i].flatten(0, 1) for t in low_rank)
            written, out = U[i].flatten(0, 1), Ss[i + 1].flatten(0, 1)
            torch.baddbmm(base, left, Ss[i].flatten(0, 1), out=written)
            torch.baddbmm(out, right.mT, written, out=out)
    return Ss, U


def _walk_back(
    d: _Decays, dS: Tensor, read: Tensor, dU: Tensor | None, low_rank: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The walk backwards: dSs [n, ...], the gradients of the states after the chunks, and that of the first state.

    ``read`` = q^T do; ``dU``, do's part of the writes' gradient, is completed; ``low_rank`` = (left, right).
    """
    n = read.shape[0]
    dSs = torch.empty_like(read)
    for i in reversed(range(n)):
        dSs[i] = dS
        dS = _carry(dSs[i], d, i, read[i], out=read[i])
        if low_rank is not None and dU is not None:
            left, right = (t[i].flatten(0, 1) for t in low_rank)
            flat_U, flat_S = dU[i].flatten(0, 1), dS.flatten(0, 1)
            torch.baddbmm(flat_U, right, dSs[i].flatten(0, 1), out=flat_U)
            torch.baddbmm(flat_S, left.mT, flat_U, out=flat_S)
    return dSs, dS


def _carry(S: Tensor, d: _Decays, i: int, added: Tensor | None, out: Tensor) -> Tensor:
    """S [B, H, K, V] decayed by all of chunk i, plus ``added``."""
    if d.whole is None:
        return out.copy_(S) if added is None else torch.add(S, added, out=out)
    decay = d.whole[i if d.whole.shape[0] > 1 else 0].unsqueeze(-1)
    return torch.mul(S, decay, out=out) if added is None else torch.addcmul(added, S, decay, out=out)


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
        added = low_rank = None
        if a is None or b is not None:
            added = y.outer.mT @ self.v
        if a is not None:
            right = y if b is None else b
            base = self.v if b is None else d.pair(a, y, strict=True) @ self.v
            inverse = _inverse(d.pair(a, right, strict=True))
            low_rank = inverse @ base, inverse @ a.outer, right.outer
        Ss, U = _walk(d, S, added, low_rank)
        o = _product(q.outer, Ss[:-1], self.attention(d, q, y) @ (U if U is not None and b is None else self.v))
        if b is not None and U is not None:
            o = _product(d.pair(q, b, strict=q.late), U, o)
        return o, Ss, U

    def states(self, d: _Decays, S: Tensor, U: Tensor | None) -> Tensor:
        """The states between the chunks, Ss [n + 1, ...], walked again."""
        _, y, _, b = self.operands(d)
        added = y.outer.mT @ (self.v if U is None or b is not None else U)
        return _walk(d, S, added if b is None or U is None else _product(b.outer.mT, U, added))[0]

    def backward(
        self, d: _Decays, Ss: Tensor, U: Tensor | None, do: Tensor, dS: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of the segment's tensors by name, and of the state before it, given all states Ss."""
        q, y, a, b = self.operands(d)
        wrote = U if a is not None and b is None and U is not None else self.v  # a tied write's key is the term's too
        Ss = Ss[:-1]
        P = self.attention(d, q, y)
        dwrote = P.mT @ do
        dU = dX = inverse = low_rank = Q = L = None
        if a is not None:
            right = y if b is None else b
            L = d.pair(a, right, strict=True)
            Q = None if b is None else d.pair(q, b, strict=q.late)
            dU = dwrote if Q is None else Q.mT @ do
            inverse = _inverse(L)
            low_rank = inverse @ a.outer, right.outer
        dSs, dS = _walk_back(d, dS, q.outer.mT @ do, dU, low_rank)
        if inverse is not None and dU is not None:
            dX = inverse.mT @ dU

        d.through_state(q, do @ Ss.mT)
        d.through_state(y, wrote @ dSs.mT)
        dP = do @ wrote.mT
        grads: dict[str, Tensor] = {}
        dq_bonus = dy_bonus = None
        if self.u is not None:
            diagonal = dP.diagonal(0, -2, -1).unsqueeze(-1)
            dq_bonus, dy_bonus = diagonal * self.u * y.raw, diagonal * self.u * q.raw
            grads["u"] = (diagonal * q.raw * y.raw).sum((0, 1, 3))
        if a is None or dX is None or U is None or L is None:
            grads["v"] = _product(y.outer, dSs, dwrote)
        else:
            d.through_state(a, dX @ Ss.mT)
            if b is None or Q is None:
                grads["v"] = dX
                d.pair_backward(dX @ U.mT, L, a, y, strict=True)
            else:
                d.through_state(b, U @ dSs.mT)
                Lv = d.pair(a, y, strict=True)
                grads["v"] = _product(Lv.mT, dX, _product(y.outer, dSs, dwrote))
                d.pair_backward(do @ U.mT, Q, q, b, strict=q.late)
                d.pair_backward(dX @ U.mT, L, a, b, strict=True)
                d.pair_backward(dX @ self.v.mT, Lv, a, y, strict=True)
        d.pair_backward(dP, P, q, y, strict=q.late)
        dq, dy = d.gradient(q), d.gradient(y)
        grads["q"] = dq if dq_bonus is None else dq + dq_bonus
        dy = dy if dy_bonus is None else dy + dy_bonus
        if self.beta is not None:
            grads["beta"] = (dy * self.k).sum(-1)
            dy = dy * self.beta.unsqueeze(-1)
        if a is not None:
            da = d.gradient(a)
            if b is None:
                dy = dy - da
            else:
                grads["a"], grads["b"] = da, d.gradient(b)
        grads["k"] = dy
        if d.need_g:
            grads["g"] = d.gate_gradient(Ss, dSs)
        return grads, dS


class _Chunks(Kernel):
    def saved_shapes(self, x: MatrixInputs, mode: str) -> tuple[list[int] | None, list[int] | None]:
        if x.cu_seqlens is not None:  # packed: the backward walks each bucket again
            return None, None
        (B, _, H, V), K = x.v.shape, x.k.shape[-1]
        writes = None if x.write is Write.ADDITIVE else list(x.v.shape)
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

    def _pieces(
        self, x: MatrixInputs, t0: int, n: int, C: int, mode: str, need_g: bool = False
    ) -> list[tuple[int, _Segment, _Decays]]:
        """The segment, or, where the gates are too strong to rescale, smaller pieces of it.

        Where a gate's gradient sums over all tokens (fixed gates) or over long chunks (the parallel form), that of
        channels is not had precisely by rescaling, whatever the gates.
        """
        s = self._segment(x, t0, n, C)
        whole = mode == Mode.PARALLEL.value
        precise = need_g and x.g is not None and (x.g.dim() == 2 or (whole and x.g.dim() == 4))
        if s.g is None or (C > 1 and not precise):
            ordinary = _Ordinary(s.g, need_g)
            if ordinary.in_range():
                return [(t0, s, ordinary)]
        assert s.g is not None
        if C <= STRONG_CHUNK or whole:
            return [(t0, s, _Strong(s.g, need_g))]
        pieces: list[tuple[int, _Segment, _Decays]] = []
        for start, m, c in _segments(n * C, STRONG_CHUNK, n * C):
            part = self._segment(x, t0 + start, m, c)
            assert part.g is not None
            pieces.append((t0 + start, part, _Strong(part.g, need_g)))
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
        if ends is not None:
            S = self._first_state(x, len(ends) - 1).clone()
            for bucket, part in self._buckets(x, ends):
                o_part, S[bucket.rows], _ = self.forward(part, None, mode, False)
                bucket.scatter(o, o_part)
            return o, S, Saved(None, None)
        plan, S = _plan(x, mode), self._first_state(x, B)
        writes = states = None
        if save:
            states = S.new_empty(sum(_kept(n, C) for _, n, C in plan) + 1, *S.shape)
            states[0] = S
            writes = None if x.write is Write.ADDITIVE else x.v.new_empty(x.v.shape, dtype=dtype)
        first = 0
        for t0, n, C in plan:
            kept = _kept(n, C)
            for t, s, d in self._pieces(x, t0, n, C, mode):
                out, Ss, U = s.forward(d, S)
                S = Ss[-1]
                _store(o, out, t, x.scale)
                if states is not None:
                    if kept > 1:  # one piece, in chunks of C or of a part of it
                        states[first + 1 : first + kept + 1] = Ss[1:].unflatten(0, (kept, -1))[:, -1]
                    else:
                        states[first + 1] = S
                    if U is not None and writes is not None:
                        _store(writes, U, t)
            first += kept
        return o, S.clone(), Saved(writes, states)

    def backward(
        self, x: MatrixInputs, ends: list[int] | None, mode: str, saved: Saved, do: Tensor, dS: Tensor | None,
        need_g: bool,
    ) -> Grads:  # fmt: skip
        dtype = state_dtype(x.v.dtype)
        tokens = {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta, "a": x.a, "b": x.b}
        grads = {name: None if t is None else t.new_empty(t.shape) for name, t in tokens.items()}
        summed = {"g": x.g if need_g else None, "u": x.u}  # in the compute dtype: fixed gates sum over all tokens
        grads |= {name: None if t is None else t.new_zeros(t.shape, dtype=dtype) for name, t in summed.items()}
        dS = torch.zeros_like(state_like(x)) if dS is None else dS.clone()
        if ends is not None:
            for bucket, part in self._buckets(x, ends):
                _, _, kept = self.forward(part, None, mode, True)
                piece = self.backward(part, None, mode, kept, bucket.gather(do), dS[bucket.rows], need_g)
                assert piece.state is not None
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
            assert saved.states is not None
            last = saved.states.shape[0] - 1
            for t0, n, C in reversed(_plan(x, mode)):
                first = last - _kept(n, C)
                pieces, states = self._pieces(x, t0, n, C, mode, need_g), saved.states[first : last + 1]
                dS = self._backward_segment(x, pieces, saved.writes, states, do, dS, grads)
                last = first
        for name, like in summed.items():
            grad = grads[name]
            grads[name] = None if grad is None or like is None else grad.to(like.dtype)
        return Grads(**grads, state=dS)  # type: ignore[arg-type]

    def _backward_segment(
        self, x: MatrixInputs, pieces: list[tuple[int, _Segment, _Decays]], written: Tensor | None, states: Tensor,
        do: Tensor, dS: Tensor, grads: dict[str, Tensor | None],
    ) -> Tensor:  # fmt: skip
        """Fill the segment's part of ``grads``; returns the gradient of the state before it."""
        H, dtype = x.v.shape[2], state_dtype(x.v.dtype)
        writes: list[Tensor | None] = [
            None
            if x.write is Write.ADDITIVE or written is None
            else _load(written, t, s.q.shape[0], s.q.shape[3], H, dtype)
            for t, s, _ in pieces
        ]
        walked = [states]
        if len(pieces) > 1 or len(states) != len(pieces[0][1].q) + 1:  # not kept chunk by chunk
            walked = []
            for (_, s, d), U in zip(pieces, writes, strict=True):
                walked.append(s.states(d, walked[-1][-1] if walked else states[0], U))
        for (t0, s, d), U, Ss in reversed(list(zip(pieces, writes, walked, strict=True))):
            got, dS = s.backward(d, Ss, U, _load(do, t0, s.q.shape[0], s.q.shape[3], H, dtype) * x.scale, dS)
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


class Chunked(Backend):
    """Matrix products over chunks of 64 tokens (32 of a low-rank write), on any device torch knows."""

    name = "chunked"
    modes = (Mode.CHUNKWISE, Mode.RECURRENT, Mode.PARALLEL)

    def unsuited(self, request: Request) -> str | None:
        if request.recurrence.engine is Engine.SELECTIVE and request.mode is Mode.PARALLEL:
            return "a selective scan has no parallel form: that would be a matrix of all pairs of tokens a channel"
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

    def selective_scan(self, inputs: SelectiveInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        if inputs.x.shape[1] == 1 and inputs.cu_seqlens is None and mode in (None, Mode.RECURRENT):
            return one_token(inputs)
        return _boundary.selective(inputs, (mode or Mode.CHUNKWISE).value, self.name)


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
SCANS[Chunked.name] = elementwise
SELECTIVE[Chunked.name] = Segments()
