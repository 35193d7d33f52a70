"""What layers do beside the recurrence, each in one pass: the short convolution and the norms, with their gradients.

Legend: a program has a tile of BT tokens (BR rows) and BC channels (BN numbers); everything is float32 inside.
Gradients of parameters are summed over what a program walks, and the sums of programs by torch: in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inputs(x, tail, t, begin, number, live, c, row: tl.constexpr, C: tl.constexpr, PAST: tl.constexpr):
    """Inputs of tokens ``t`` of sequences that begin at ``begin``; what came before those is in ``tail`` or zero."""
    in_c = (c < C)[None, :]
    value = tl.load(
        x + t.to(tl.int64)[:, None] * row + c[None, :], mask=(live & (t >= begin))[:, None] & in_c, other=0.0
    )
    value = value.to(tl.float32)
    if tail is not None:
        early = live & (t < begin)
        at = (number * PAST + (PAST + t - begin)).to(tl.int64)[:, None] * C + c[None, :]
        value += tl.load(tail + at, mask=early[:, None] & in_c, other=0.0).to(tl.float32)
    return value


@triton.jit
def _where(cu, t, live, T, N, halvings):
    """First token, end and number of the sequences of tokens ``t``: of T tokens each, or N between boundaries ``cu``,
    which are halved until one is left."""
    if cu is None:
        number = t // T
        return number * T, number * T + T, number
    else:
        number = t * 0
        after = number + N
        for _ in range(0, halvings):
            middle = (number + after) // 2
            begun = tl.load(cu + middle, mask=live, other=0) <= t
            number = tl.where(begun, middle, number)
            after = tl.where(begun, after, middle)
        begin, end = tl.load(cu + number, mask=live, other=0), tl.load(cu + number + 1, mask=live, other=0)
        return begin.to(tl.int32), end.to(tl.int32), number


@triton.jit(do_not_specialize=["T", "tokens", "N", "halvings"])
def convolve(
    x, weight, bias, tail, cu, y,
    T, tokens, N, halvings,
    row: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ACTIVE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y_t = f(bias + sum_j weight_j x_{t-W+1+j}), f silu or nothing."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    t = tl.program_id(0) // blocks * BT + tl.arange(0, BT)
    live = t < tokens
    begin, _, number = _where(cu, t, live, T, N, halvings)
    a = tl.zeros([BT, BC], tl.float32)
    if bias is not None:
        a += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        w = tl.load(weight + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        a += w[None, :] * _inputs(x, tail, t - (W - 1 - j), begin, number, live, c, row, C, W - 1)
    if ACTIVE:
        a = a * tl.sigmoid(a)
    at = t.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(y + at, a.to(y.dtype.element_ty), mask=live[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["T", "tokens", "N", "halvings"])
def convolve_slope(
    x, weight, bias, tail, cu, dy, da, sums,
    T, tokens, N, halvings,
    row: tl.constexpr, dy_row: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ACTIVE: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of what f is of, which is found again, and into ``sums`` [tiles of tokens, W + 1, C] those of the
    weight and the bias."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    tile = tl.program_id(0) // blocks
    t = tile * BT + tl.arange(0, BT)
    live = t < tokens
    in_c = c < C
    here = live[:, None] & in_c[None, :]
    begin, _, number = _where(cu, t, live, T, N, halvings)
    grad = tl.load(dy + t.to(tl.int64)[:, None] * dy_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    if ACTIVE:
        a = tl.zeros([BT, BC], tl.float32)
        if bias is not None:
            a += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(W):
            w = tl.load(weight + c * W + j, mask=in_c, other=0.0).to(tl.float32)
            a += w[None, :] * _inputs(x, tail, t - (W - 1 - j), begin, number, live, c, row, C, W - 1)
        share = tl.sigmoid(a)
        grad = grad * share * (1.0 + a * (1.0 - share))
    tl.store(da + t.to(tl.int64)[:, None] * C + c[None, :], grad, mask=here)
    to = sums + tile.to(tl.int64) * ((W + 1) * C) + c
    for j in tl.static_range(W):
        value = _inputs(x, tail, t - (W - 1 - j), begin, number, live, c, row, C, W - 1)
        tl.store(to + j * C, tl.sum(grad * value, 0), mask=in_c)
    tl.store(to + W * C, tl.sum(grad, 0), mask=in_c)


@triton.jit(do_not_specialize=["T", "tokens", "N", "halvings"])
def convolve_back(
    da, weight, cu, dx,
    T, tokens, N, halvings,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs: that of token t has a part from each of t to t + W - 1."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    t = tl.program_id(0) // blocks * BT + tl.arange(0, BT)
    live = t < tokens
    in_c = c < C
    _, end, _ = _where(cu, t, live, T, N, halvings)
    grad = tl.zeros([BT, BC], tl.float32)
    for s in tl.static_range(W):
        same = live & (t + s < end)
        w = tl.load(weight + c * W + (W - 1 - s), mask=in_c, other=0.0).to(tl.float32)
        at = (t + s).to(tl.int64)[:, None] * C + c[None, :]
        grad += w[None, :] * tl.load(da + at, mask=same[:, None] & in_c[None, :], other=0.0)
    at = t.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=live[:, None] & in_c[None, :])


@triton.jit
def _normed(
    x, gate, rows, n, live, at, scale, eps,
    row: tl.constexpr, gate_row: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """x, gate, u less its average, and 1 over its size, of a tile."""
    bx = tl.load(x + rows[:, None] * row + at + n[None, :], mask=live, other=0.0).to(tl.float32)
    bz = bx
    u = bx
    if GATED > 0:
        bz = tl.load(gate + rows[:, None] * gate_row + at + n[None, :], mask=live, other=0.0).to(tl.float32)
    if GATED == 1:
        u = bx * bz * tl.sigmoid(bz)
    if CENTRED:
        u = tl.where(live, u - (tl.sum(u, 1) / N)[:, None], 0.0)
    return bx, bz, u, tl.rsqrt(tl.sum(u * u, 1) * scale + eps)


@triton.jit(do_not_specialize=["R", "scale", "eps"])
def norm(
    x, weight, bias, gate, y,
    R, scale, eps,
    row: tl.constexpr, gate_row: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WEIGHTS: tl.constexpr,
    CENTRED: tl.constexpr, GATED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows of M parts of N numbers, each divided by its size. GATED: 1 before, 2 after, 0 not at all."""
    part = tl.program_id(0) % M
    rows = (tl.program_id(0) // M).to(tl.int64) * BR + tl.arange(0, BR)
    n = tl.arange(0, BN)
    live = (rows < R)[:, None] & (n < N)[None, :]
    _, bz, u, r = _normed(x, gate, rows, n, live, part * N, scale, eps, row, gate_row, N, CENTRED, GATED)
    h = u * r[:, None]
    of_weight = (part * N + n) % WEIGHTS
    if weight is not None:
        h = h * tl.load(weight + of_weight, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        h += tl.load(bias + of_weight, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED == 2:
        h = h * bz * tl.sigmoid(bz)
    tl.store(y + rows[:, None] * (M * N) + part * N + n[None, :], h.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["R", "scale", "eps", "walk"])
def norm_gradient(
    x, weight, bias, gate, dy, dx, dgate, dweight, dbias,
    R, scale, eps, walk,
    row: tl.constexpr, gate_row: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WEIGHTS: tl.constexpr,
    CENTRED: tl.constexpr, GATED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of x and gate, and into dweight and dbias [programs, M N] those of the parameters.

    With c = u less its average, r = (scale |c|^2 + eps)^-1/2 and e the gradient of c r: dc = r e - scale r^3 (e . c) c.
    """
    part = tl.program_id(0) % M
    place = tl.program_id(0) // M
    n = tl.arange(0, BN)
    in_n = n < N
    in_row = part * N + n
    bw = tl.zeros([BN], tl.float32) + 1.0
    bb = tl.zeros([BN], tl.float32)
    if weight is not None:
        bw = tl.load(weight + in_row % WEIGHTS, mask=in_n, other=0.0).to(tl.float32)
    if bias is not None:
        bb = tl.load(bias + in_row % WEIGHTS, mask=in_n, other=0.0).to(tl.float32)
    dw = tl.zeros([BN], tl.float32)
    db = tl.zeros([BN], tl.float32)
    for step in tl.range(0, walk):
        rows = (place * walk + step).to(tl.int64) * BR + tl.arange(0, BR)
        live = (rows < R)[:, None] & in_n[None, :]
        bx, bz, u, r = _normed(x, gate, rows, n, live, part * N, scale, eps, row, gate_row, N, CENTRED, GATED)
        at = rows[:, None] * (M * N) + in_row[None, :]
        e = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
        unit = u * r[:, None]
        share = tl.sigmoid(bz)
        slope = share * (1.0 + bz * (1.0 - share))
        if GATED == 2:
            h = unit * bw[None, :] + bb[None, :]
            tl.store(dgate + at, (e * h * slope).to(dgate.dtype.element_ty), mask=live)
            e = e * bz * share
        dw += tl.sum(e * unit, 0)
        db += tl.sum(e, 0)
        e = e * bw[None, :]
        e = r[:, None] * (e - unit * (scale * tl.sum(e * unit, 1))[:, None])
        if CENTRED:
            e = tl.where(live, e - (tl.sum(e, 1) / N)[:, None], 0.0)
        if GATED == 1:
            tl.store(dgate + at, (e * bx * slope).to(dgate.dtype.element_ty), mask=live)
            e = e * bz * share
        tl.store(dx + at, e.to(dx.dtype.element_ty), mask=live)
    if dweight is not None:
        tl.store(dweight + place.to(tl.int64) * (M * N) + in_row, dw, mask=in_n)
    if dbias is not None:
        tl.store(dbias + place.to(tl.int64) * (M * N) + in_row, db, mask=in_n)


@triton.jit(do_not_specialize=["R"])
def glu(
    a, dy, out, R, row: tl.constexpr, dy_row: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """silu(a) b of rows (a, b); with ``dy`` its gradient."""
    blocks: tl.constexpr = (N + BN - 1) // BN
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BR + tl.arange(0, BR)
    live = (rows < R)[:, None] & (n < N)[None, :]
    at = rows[:, None] * row + n[None, :]
    ba = tl.load(a + at, mask=live, other=0.0).to(tl.float32)
    bb = tl.load(a + at + N, mask=live, other=0.0).to(tl.float32)
    share = tl.sigmoid(ba)
    if dy is None:
        tl.store(out + rows[:, None] * N + n[None, :], (ba * share * bb).to(out.dtype.element_ty), mask=live)
    else:
        e = tl.load(dy + rows[:, None] * dy_row + n[None, :], mask=live, other=0.0).to(tl.float32)
        to = out + rows[:, None] * (2 * N) + n[None, :]
        tl.store(to, (e * bb * share * (1.0 + ba * (1.0 - share))).to(out.dtype.element_ty), mask=live)
        tl.store(to + N, (e * ba * share).to(out.dtype.element_ty), mask=live)
