"""One kernel for the output and for every gradient, one that joins segments, one for a single token.

Output and gradients of the additive recurrence are the same sum with other letters in it. With W_ij the decay between
two tokens, and a state sum_j y_j z_j^T of which a program holds a block of z's channels::

    out_i = sum_j (x_i . y_j) W_ij z_j

              x    y    z    mate  direction   the channels of the gate are those of
    o         q    k    v          forward     x and y
    dv        k    q    do         backward    x and y
    dq        do   v    k    q     forward     z and out (OUTER)
    dk        v    do   q    k     backward    z and out (OUTER)

Legend: C tokens a chunk, r its rows; DX, DZ the sizes of x and z, KX the power of two above DX, BZ the block of z; H
heads, HX of them in x and y, HZ in z and mate; S the state [KX, BZ] in float32, with inner gates its transpose
(FLIP), so that the rescaled factor of its update is the right one; gates in log2 units, G their running sum in the
chunk. Backward in time is forward over rows numbered from the end, where a row's gate is the next token's. LATE,
reading before the own write, is reading after the write of the row before: y, z and the gate come from there, and
those of the last row join the state at the end.

Decays of a head weigh each pair by 2^(G_i - G_j) <= 1. Decays of channels are divided out: x 2^G, y 2^-G. That needs G
within [-LIMIT, 0], so a chunk ends where its own gates leave that range: after 64 tokens with ordinary gates, after one
with a gate of -inf. A chunk of one token takes its gate out of G first, and is exact for any gate.

The gradient of the gate needs no further product. With a_i = q_i dq_i and b_j = k_j dk_j, both without the pair i = j,
which no gate decays: dg_l = sum_{i >= l} a_i - sum_{j >= l} b_j + S_T dS_T (i > l with LATE).
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE, HEAD, CHANNEL, TOKEN_HEAD, TOKEN_CHANNEL = (tl.constexpr(n) for n in range(5))
LOG2E = tl.constexpr(1.4426950408889634)
ZERO = tl.constexpr(-1000.0)  # natural logarithm: e^ZERO is 0; finite, as 0 * inf and inf - inf are not


@triton.jit
def _running_sum(a, low, HALF: tl.constexpr, SUM: tl.constexpr):
    """Sums over this row and those before it: products with a triangle of ones, exact enough in two bf16 parts."""
    if HALF:
        ones = tl.where(low, 1.0, 0.0).to(tl.bfloat16)
        if a.dtype == tl.bfloat16:
            return tl.dot(ones, a)
        high = a.to(tl.bfloat16)
        return tl.dot(ones, high, tl.dot(ones, (a - high.to(tl.float32)).to(tl.bfloat16)))
    else:
        return tl.cumsum(a.to(SUM), 0)


@triton.jit
def _bounds(cu, n, T, L, segments):
    """First token and length of sequence or segment ``n``."""
    if cu is not None:
        start = tl.maximum(tl.load(cu + n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu + n + 1).to(tl.int64), T)
    else:
        row = (n // segments).to(tl.int64) * T
        start = row + (n % segments).to(tl.int64) * L
        end = tl.minimum(start + L, row + T)
    return start, tl.maximum(end - start, 0).to(tl.int32)


@triton.jit
def _head_gates(g, t0, start, length, lead, h, r, H: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr):
    """Gates of the rows from ``t0`` on."""
    row = t0 + r
    at = row - 1 if SHIFT else row
    token = start + (length + lead - 1 - at if REVERSE else at)
    return tl.load(g + token * H + h, mask=(row < length + lead) & (at >= lead), other=0.0)


@triton.jit
def _chunk(
    t0, S, ahead, gates, after, summed, dbonus, fixed, bonus,
    x, y, z, g, u, mate, out, total, moved, dg, du,
    scale, start, length, lead, tokens, h, block, r, cx, cz, cg,
    H: tl.constexpr, HX: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    KX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, OUTER: tl.constexpr, REVERSE: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of :func:`sweep` from row ``t0``: the number of rows done and what the sweep carries."""
    VECTOR: tl.constexpr = DECAY == CHANNEL or DECAY == TOKEN_CHANNEL
    SCALAR: tl.constexpr = DECAY == HEAD or DECAY == TOKEN_HEAD
    FIXED: tl.constexpr = DECAY == HEAD or DECAY == CHANNEL
    SHIFT: tl.constexpr = REVERSE or LATE
    FLIP: tl.constexpr = VECTOR and not OUTER
    STRICT: tl.constexpr = moved is not None
    HALF: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    SUM: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float32 else tl.float32
    DG: tl.constexpr = DZ if OUTER else DX
    BG: tl.constexpr = BZ if OUTER else KX
    step: tl.constexpr = -1 if REVERSE else 1

    low = r[:, None] >= r[None, :]

    m = tl.minimum(length + lead - t0, C)
    first = start + (length + lead - 1 - t0 if REVERSE else t0)  # the token of row 0
    live = (r < m) & (t0 + r >= lead)
    earlier = live & (t0 + r > lead)  # rows that have one before them
    gated = earlier if SHIFT else live
    in_x, in_y, here, in_g = live[:, None], (earlier if LATE else live)[:, None], live[:, None], gated[:, None]
    before = in_y
    if DX % KX != 0:
        in_x, in_y = in_x & (cx < DX)[None, :], in_y & (cx < DX)[None, :]
    if DZ % BZ != 0:
        here, before = here & (cz < DZ)[None, :], before & (cz < DZ)[None, :]
    if DG % BG != 0:
        in_g = in_g & (cg < DG)[None, :]
    # 64-bit offsets for the chunk, 32-bit ones within it
    fx = (first * HX + h // (H // HX)) * DX
    fz = (first * HZ + h // (H // HZ)) * DZ
    fo = (first * H + h) * DZ
    rx = (step * HX * DX) * r[:, None] + cx[None, :]
    rz = (step * HZ * DZ) * r[:, None] + cz[None, :]
    ro = (step * H * DZ) * r[:, None] + cz[None, :]
    if LATE:  # what the row before wrote
        by = tl.load(y + (fx - step * HX * DX) + rx, mask=in_y, other=0.0)
        bz = tl.load(z + (fz - step * HZ * DZ) + rz, mask=before, other=0.0)
    else:
        by = tl.load(y + fx + rx, mask=in_y, other=0.0)
        bz = tl.load(z + fz + rz, mask=here, other=0.0)
    if out is not None:
        bx = tl.load(x + fx + rx, mask=in_x, other=0.0)
    if moved is not None and not VECTOR:  # early, as it is no factor of a product: the compiler leaves it where it is
        bm = tl.load(mate + fz + rz, mask=here, other=0.0)
        fm, rm = (block * tokens + first) * H + h, step * H * r
        if REVERSE:
            # with LATE, no gate decays what the first token reads
            other = tl.load(moved + fm + rm, mask=live & (t0 + r < length + lead - 1) if LATE else live, other=0.0)

    # gates: their running sum G, and its end GL
    if DECAY == TOKEN_HEAD:
        bg = tl.maximum(ahead.to(SUM), ZERO) * LOG2E
        ahead = _head_gates(g, t0 + C, start, length, lead, h, r, H, REVERSE, SHIFT)  # no load waits for the next chunk
        G = tl.cumsum(bg, 0)
        GL = tl.sum(bg, 0)
    if FIXED:
        none = lead + 1 if SHIFT else lead  # rows from the first on that bring no gate
        seen = tl.maximum(t0 + tl.minimum(r + 1, m) - none, 0) - tl.maximum(t0 - none, 0)
        last = tl.maximum(t0 + m - none, 0) - tl.maximum(t0 - none, 0)
    if DECAY == HEAD:
        G = seen.to(SUM) * fixed
        GL = last.to(SUM) * fixed
    if VECTOR:
        if DECAY == TOKEN_CHANNEL:
            fg = (first * H + h) * DG - (step * H * DG if SHIFT else 0)
            bg = tl.load(g + fg + ((step * H * DG) * r[:, None] + cg[None, :]), mask=in_g, other=0.0)
            G = _running_sum(tl.maximum(bg, ZERO).to(bg.dtype), low, HALF, SUM)
            G = (G * LOG2E).to(tl.float32)
            GL = tl.sum(tl.where((r == C - 1)[:, None], G, 0.0), 0)
        else:
            G = seen.to(tl.float32)[:, None] * fixed[None, :]
            GL = last.to(tl.float32) * fixed
        if tl.min(GL, 0) < -LIMIT:  # only the rows that stay in range, but at least one
            m = tl.maximum(tl.sum(tl.where((r < m) & (tl.min(G, 1) >= -LIMIT), 1, 0), 0), 1)
            GL = tl.sum(tl.where((r == m - 1)[:, None], G, 0.0), 0)
            G = tl.where((r < m)[:, None], G, float("inf"))
            here = here & (r < m)[:, None]
        if total is not None:
            gates += GL
        if m == 1:  # its gate leaves G and decays the state at once
            S = S * tl.exp2(GL)[None, :]
            G = G - GL[None, :]
            GL = GL * 0.0

    if VECTOR and OUTER:
        written = (bz * tl.exp2(-G)).to(DOT)
    else:
        written = bz.to(DOT)
    if VECTOR and not OUTER:
        keys = (by * tl.exp2(-G)).to(DOT)
    else:
        keys = by.to(DOT)

    if out is not None:
        if VECTOR and not OUTER:
            read = (bx * tl.exp2(G)).to(DOT)
        else:
            read = bx.to(DOT)
        state = tl.trans(S.to(DOT)) if FLIP else S.to(DOT)
        acc = tl.dot(read, state, input_precision=PRECISION)
        P = tl.dot(read, tl.trans(keys), input_precision=PRECISION)
        if STRICT:  # apart from the pairs that no gate decays
            alone = tl.sum(tl.where(r[:, None] == r[None, :], P, 0.0), 1)
        if SCALAR:
            P = P * tl.exp2((G[:, None] - G[None, :]).to(tl.float32))
            acc = acc * tl.exp2(G.to(tl.float32))[:, None]
        P = tl.where((r[:, None] > r[None, :]) if STRICT else low, P, 0.0)
        acc = tl.dot(P.to(DOT), written, acc, input_precision=PRECISION)
        if VECTOR and OUTER:
            acc = acc * tl.exp2(G)

        if moved is not None:  # the gradient of the gate
            if VECTOR:
                bm = tl.load(mate + fz + rz, mask=here, other=0.0)
                change, kept, fm, rm = acc * scale * bm, here, fo, ro
            else:
                change, kept = tl.sum(acc * scale * bm, 1), live
            if not REVERSE:
                tl.store(moved + fm + rm, change, mask=kept)
            else:
                rows = (t0 + r > lead) & (r < m)  # no gate decays what the last token writes
                change = tl.where(rows[:, None] if VECTOR else rows, change, 0.0)
                if VECTOR:
                    other = here
                    if LATE:
                        other = other & (t0 + r < length + lead - 1)[:, None]
                    other = tl.load(moved + fm + rm, mask=other, other=0.0)
                change = other - change
                if VECTOR:
                    back = _running_sum(change, low, HALF, tl.float32) + after[None, :]
                else:
                    back = tl.cumsum(change, 0) + after
                after += tl.sum(change, 0)
                if LATE:
                    back -= other
                if FIXED:
                    summed += tl.sum(tl.where(kept, back, 0.0), 0)
                else:
                    tl.store(dg + fm + rm, back.to(dg.dtype.element_ty), mask=kept)

        if STRICT:
            acc += alone[:, None] * bz
        if u is not None:
            # the row's own write
            oy = tl.load(y + fx + rx, mask=in_x, other=0.0).to(tl.float32)
            oz = tl.load(z + fz + rz, mask=here, other=0.0).to(tl.float32)
            if OUTER:
                own = tl.sum(bx * oy, 1)[:, None] * oz
                acc += own * bonus[None, :]
                if du is not None:
                    dbonus += scale * tl.sum(own * tl.load(mate + fz + rz, mask=here, other=0.0), 0)
            else:
                acc += tl.sum(bx * oy * bonus[None, :], 1)[:, None] * oz
        tl.store(out + fo + ro, (acc * scale).to(out.dtype.element_ty), mask=here)

    if SCALAR:
        written = (bz * tl.exp2(tl.minimum(GL - G, 0.0).to(tl.float32))[:, None]).to(DOT)
        S = S * tl.exp2(GL.to(tl.float32))
        gates += GL
    if moved is not None and not REVERSE and not LATE:  # the last token's write is decayed by nothing
        written = tl.where((t0 + r < length - 1)[:, None], written, 0.0).to(DOT)
    if FLIP:
        S = tl.dot(tl.trans(written), keys, S, input_precision=PRECISION)
    else:
        S = tl.dot(tl.trans(keys), written, S, input_precision=PRECISION)
    if VECTOR:
        S = S * tl.exp2(GL)[None, :]
    return m, S, ahead, gates, after, summed, dbonus


@triton.jit(do_not_specialize=["T", "L", "segments", "scale"])
def sweep(
    x, y, z, g, u, mate, cu, init, dS,
    out, final, total, moved, rest, dg, du,
    scale, T, L, segments,
    H: tl.constexpr, HX: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    KX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, OUTER: tl.constexpr, REVERSE: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum above. What is None is absent or unwanted; ``out`` None leaves the states alone.

    total: the sum of the gates, of segments to be joined. For the gate's gradient the forward sweep writes a_i to
    ``moved`` and S_T dS_T to ``rest``, and the backward sweep reads both and writes ``dg``.
    """
    VECTOR: tl.constexpr = DECAY == CHANNEL or DECAY == TOKEN_CHANNEL
    SCALAR: tl.constexpr = DECAY == HEAD or DECAY == TOKEN_HEAD
    FLIP: tl.constexpr = VECTOR and not OUTER
    FIXED: tl.constexpr = DECAY == HEAD or DECAY == CHANNEL
    SHIFT: tl.constexpr = REVERSE or LATE
    SUM: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float32 else tl.float32
    DG: tl.constexpr = DZ if OUTER else DX
    BG: tl.constexpr = BZ if OUTER else KX
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ

    pid = tl.program_id(0)
    block = pid % NZ
    nh = pid // NZ
    h = nh % H
    n = nh // H
    start, length = _bounds(cu, n, T, L, segments)
    tokens = T if cu is not None else (T.to(tl.int64) * (tl.num_programs(0) // (NZ * H * segments)))

    # chunks lie alike in both directions: backward in time the first one may begin with rows past the end
    lead = (C - length % C) % C if REVERSE else 0

    r = tl.arange(0, C)
    cx = tl.arange(0, KX)
    cz = block * BZ + tl.arange(0, BZ)
    cg = cz if OUTER else cx
    in_g = cg < DG

    of_state = nh.to(tl.int64) * (DX * DZ)
    if FLIP:
        in_state = cx[None, :] * DZ + cz[:, None]
        has_state = (cx < DX)[None, :] & (cz < DZ)[:, None]
    else:
        in_state = (cx[:, None] + cz[None, :] * DX) if OUTER else (cx[:, None] * DZ + cz[None, :])
        has_state = (cx < DX)[:, None] & (cz < DZ)[None, :]
    if init is not None:
        S = tl.load(init + of_state + in_state, mask=has_state, other=0.0).to(tl.float32)
        if REVERSE:
            S = S / scale
    else:
        S = tl.zeros([BZ, KX] if FLIP else [KX, BZ], tl.float32)

    nothing = length.to(tl.float32) * 0.0
    fixed, gates, after, summed, bonus, dbonus = nothing, nothing, nothing, nothing, nothing, nothing
    ahead = nothing
    if DECAY == TOKEN_HEAD:
        ahead = _head_gates(g, 0, start, length, lead, h, r, H, REVERSE, SHIFT)
    if VECTOR:
        zero = tl.zeros([BG], tl.float32)
        fixed, gates, after, summed = zero, zero, zero, zero
    if SCALAR:
        fixed, gates = length.to(SUM) * 0.0, length.to(SUM) * 0.0
    if DECAY == CHANNEL:
        fixed = tl.maximum(tl.load(g + h * DG + cg, mask=in_g, other=0.0).to(tl.float32), ZERO) * LOG2E
    if DECAY == HEAD:
        fixed = tl.maximum(tl.load(g + h).to(SUM), ZERO) * LOG2E
    if u is not None:
        bonus = tl.load(u + h * DG + cg, mask=in_g, other=0.0).to(tl.float32)
        dbonus = tl.zeros([BG], tl.float32)
    if dg is not None:
        if VECTOR:
            after = tl.load(rest + nh.to(tl.int64) * DG + cg, mask=in_g, other=0.0)
        else:
            after = tl.load(rest + nh.to(tl.int64) * NZ + block)

    if VECTOR:
        t0 = length * 0
        while t0 < length + lead:
            m, S, ahead, gates, after, summed, dbonus = _chunk(
                t0, S, ahead, gates, after, summed, dbonus, fixed, bonus,
                x, y, z, g, u, mate, out, total, moved, dg, du,
                scale, start, length, lead, tokens, h, block, r, cx, cz, cg,
                H, HX, HZ, DX, DZ, KX, BZ, C, DECAY, LATE, OUTER, REVERSE, LIMIT, PRECISION,
            )  # fmt: skip
            t0 += m
    else:  # a loop that the compiler can pipeline
        for t0 in range(0, length + lead, C):
            _, S, ahead, gates, after, summed, dbonus = _chunk(
                t0, S, ahead, gates, after, summed, dbonus, fixed, bonus,
                x, y, z, g, u, mate, out, total, moved, dg, du,
                scale, start, length, lead, tokens, h, block, r, cx, cz, cg,
                H, HX, HZ, DX, DZ, KX, BZ, C, DECAY, LATE, OUTER, REVERSE, LIMIT, PRECISION,
            )  # fmt: skip

    if SHIFT and length > 0:  # what the last row leaves to one after it
        last = start + (0 if REVERSE else length - 1)
        if DECAY == TOKEN_HEAD:
            fixed = tl.maximum(tl.load(g + last * H + h).to(SUM), ZERO) * LOG2E
        if DECAY == TOKEN_CHANNEL:
            fixed = tl.load(g + (last * H + h) * DG + cg, mask=in_g, other=0.0).to(tl.float32)
            fixed = tl.maximum(fixed, ZERO) * LOG2E
        if SCALAR:
            S = S * tl.exp2(fixed.to(tl.float32))
            gates += fixed
        if VECTOR:
            S = S * tl.exp2(fixed)[None, :]
            gates += fixed
    if rest is not None and not REVERSE:
        ds = tl.load(dS + of_state + in_state, mask=has_state, other=0.0)
        if VECTOR:
            tl.store(rest + nh.to(tl.int64) * DG + cg, tl.sum(S * ds, 0), mask=in_g)
        else:
            tl.store(rest + nh.to(tl.int64) * NZ + block, tl.sum(tl.sum(S * ds, 0), 0))
    if LATE and final is not None and length > 0:
        last = start + (0 if REVERSE else length - 1)
        by = tl.load(y + (last * HX + h // (H // HX)) * DX + cx, mask=cx < DX, other=0.0)
        bz = tl.load(z + (last * HZ + h // (H // HZ)) * DZ + cz, mask=cz < DZ, other=0.0)
        by, bz = by.to(tl.float32), bz.to(tl.float32)
        S += bz[:, None] * by[None, :] if FLIP else by[:, None] * bz[None, :]
    if final is not None:
        tl.store(final + of_state + in_state, S * scale if REVERSE else S, mask=has_state)
    if total is not None:
        if VECTOR:
            tl.store(total + nh.to(tl.int64) * DG + cg, gates, mask=in_g)
        else:
            tl.store(total + nh, gates.to(tl.float32) if SCALAR else 0.0)
    if dg is not None and FIXED:
        if VECTOR:
            tl.store(dg + nh.to(tl.int64) * DG + cg, summed, mask=in_g)
        else:
            tl.store(dg + nh.to(tl.int64) * NZ + block, summed)
    if du is not None:
        tl.store(du + nh.to(tl.int64) * DZ + cz, dbonus, mask=cz < DZ)


@triton.jit(do_not_specialize=["segments"])
def join(
    total, init, parts, states,
    segments,
    H: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr, VECTOR: tl.constexpr, REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """State before each segment, from the one before all (``init``) and what each adds (``parts``): a scan."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(DX * DZ, BLOCK)
    nh = pid // blocks
    row = (nh // H).to(tl.int64)
    h = nh % H
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = c < DX * DZ
    S = tl.zeros([BLOCK], tl.float32)
    if init is not None:
        S = tl.load(init + (row * H + h) * (DX * DZ) + c, mask=live, other=0.0)
    for i in range(0, segments):
        at = (row * segments + (segments - 1 - i if REVERSE else i)) * H + h
        tl.store(states + at * (DX * DZ) + c, S, mask=live)
        if VECTOR:
            decay = tl.load(total + at * DX + c // DZ, mask=live, other=0.0)
        else:
            decay = tl.load(total + at)
        S = S * tl.exp2(decay) + tl.load(parts + at * (DX * DZ) + c, mask=live, other=0.0)


@triton.jit(do_not_specialize=["scale"])
def token(
    q, k, v, g, u, state, out, final,
    scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One token: each element of the state is read once and written once."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    nh = (pid // blocks).to(tl.int64)
    h = nh % H
    group = (nh // H) * G + h // (H // G)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    in_k = ck < K
    in_v = cv < V
    place = nh * (K * V) + ck[:, None] * V + cv[None, :]
    mask = in_k[:, None] & in_v[None, :]
    if state is not None:
        S = tl.load(state + place, mask=mask, other=0.0)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    bq = tl.load(q + group * K + ck, mask=in_k, other=0.0).to(tl.float32)
    bk = tl.load(k + group * K + ck, mask=in_k, other=0.0).to(tl.float32)
    bv = tl.load(v + nh * V + cv, mask=in_v, other=0.0).to(tl.float32)
    if LATE:
        o = tl.sum(bq[:, None] * S, 0)
        if u is not None:
            o += tl.sum(bq * bk * tl.load(u + h * K + ck, mask=in_k, other=0.0).to(tl.float32), 0) * bv
    if DECAY == HEAD:
        S = S * tl.exp2(tl.load(g + h).to(tl.float32) * LOG2E)
    elif DECAY == TOKEN_HEAD:
        S = S * tl.exp2(tl.load(g + nh).to(tl.float32) * LOG2E)
    elif DECAY == CHANNEL:
        S = S * tl.exp2(tl.load(g + h * K + ck, mask=in_k, other=0.0).to(tl.float32) * LOG2E)[:, None]
    elif DECAY == TOKEN_CHANNEL:
        S = S * tl.exp2(tl.load(g + nh * K + ck, mask=in_k, other=0.0).to(tl.float32) * LOG2E)[:, None]
    S += bk[:, None] * bv[None, :]
    if not LATE:
        o = tl.sum(bq[:, None] * S, 0)
    tl.store(final + place, S, mask=mask)
    tl.store(out + nh * V + cv, (o * scale).to(out.dtype.element_ty), mask=in_v)
