"""One kernel for the output and for every gradient, one that joins segments, one for a few tokens.

Output and gradients of the additive recurrence are the same sum with other letters in it. With W_ij the decay between
two tokens, and a state sum_j y_j z_j^T of which a program holds a block of z's channels::

    out_i = sum_j (x_i . y_j) W_ij z_j

              x    y    z    direction   the channels of the gate are those of
    o         q    k    v    forward     x and y
    dv        k    q    do   backward    x and y
    dq        do   v    k    forward     z and out (OUTER)
    dk        v    do   q    backward    z and out (OUTER)

Legend: C tokens a chunk, r its rows; DX, DZ the sizes of x and z, KX the power of two above DX, BZ the block of z; H
heads, HX of them in x and y, HZ in z; S the state [KX, BZ] in float32, with inner gates its transpose (FLIP), so that
the rescaled factor of its update is the right one; gates in log2 units, G their running sum in the chunk. Backward in
time is forward over rows numbered from the end, where a row's gate is the next token's; or, with gates of a head, G
sums those of the tokens behind in the chunk. LATE, reading before the own write, is reading after the write of the row
before: y, z and the gate come from there, and those of the last row join the state at the end.

Decays of a head weigh each pair by 2^(G_i - G_j) <= 1. G is summed once for all sweeps (`sum_gates`), so that none
waits for a sum, and log2 scale is added where rows of out are multiplied by it.

Decays of channels are divided out, q 2^G and k 2^-G, which needs G in that range. Where it is in every chunk of a row,
that is done once for all sweeps (`divide`), which then know no gates but the sum of each chunk's (SCALED), and what an
OUTER one gives is scaled back. Other rows are steep: the sweeps divide by themselves, and a chunk ends where its own
gates leave the range, after one token with a gate of -inf. A chunk of one token takes its gate out of G first, and is
exact for any gate. Both kinds of sweep are launched, and a program whose row is of the other kind ends at once: nothing
waits for the data.

The gradient of the gate needs no product of its own (`gate_gradient`): with a_i = q_i dq_i and b_j = k_j dk_j,
dg_l = sum_{i >= l} a_i - sum_{j >= l} b_j + S_T dS_T (i > l with LATE), bonus apart. Gates of a head have the sums over
channels of a and b from the sweeps, before dq and dk are rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.backends.triton.table import DIVIDED

NONE, HEAD, CHANNEL, TOKEN_HEAD, TOKEN_CHANNEL = (tl.constexpr(n) for n in range(5))
SCALED = tl.constexpr(DIVIDED)  # added to the decay of channels: divided out before
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
def _slot(cu, n, start, T, L, segments, C: tl.constexpr):
    """Place of the first chunk of sequence or segment ``n`` among all chunks."""
    if cu is not None:
        return start // C + n
    else:
        return (n // segments).to(tl.int64) * tl.cdiv(T, C) + (n % segments).to(tl.int64) * (L // C)


@triton.jit
def _is_steep(steep, slot, count, h, H: tl.constexpr):
    """Whether one of ``count`` chunks is."""
    c = tl.arange(0, 128)
    found = tl.zeros([128], tl.int32)
    for at in range(0, count, 128):
        found = tl.maximum(found, tl.load(steep + (slot + at + c) * H + h, mask=at + c < count, other=0))
    return tl.max(found, 0) > 0


@triton.jit
def _divisor(s, m, eps, GIVEN: tl.constexpr, SUM: tl.constexpr):
    """max(|s|, e^-m) + eps, or max(|s|, eps) where no m is GIVEN; and whether |s| is the larger."""
    size = tl.abs(s)
    if GIVEN:
        floor = tl.exp(-m.to(SUM)).to(tl.float32)
        return tl.maximum(size, floor) + eps, size >= floor
    else:
        return tl.maximum(size, eps), size >= eps


@triton.jit
def _of_rows(a, none, t0, start, length, lead, h, r, H: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr):
    """A number for each of the rows from ``t0`` on, or ``none``."""
    if a is None:
        return none
    else:
        row = t0 + r
        at = row - 1 if SHIFT else row
        token = start + (length + lead - 1 - at if REVERSE else at)
        return tl.load(a + token * H + h, mask=(row < length + lead) & (at >= lead), other=0.0)


@triton.jit
def _sums_of(sums, chunk, h, r, H: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr):
    """Running sums of a head's gates in a chunk, as :func:`sum_gates` wrote them, and the sum of all."""
    at = sums + (chunk * H + h) * (2 * C)
    return tl.load(at + (C + r if REVERSE else r)), tl.load(at + (C - 1))


@triton.jit
def _chunk(
    t0, S, Z, gates, along, fixed, bonus,
    x, y, z, g, u, skip, mate, sums, rows, columns, weight, factor, ds, qz, maxima,
    out, total, moved, skipped, own, norms,
    scale, lift, eps, start, length, lead, slot, block, h, r, cx, cz, cg,
    H: tl.constexpr, HX: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    KX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, OUTER: tl.constexpr, REVERSE: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of :func:`sweep` from row ``t0``: the number of rows done and what the sweep carries."""
    VECTOR: tl.constexpr = DECAY == CHANNEL or DECAY == TOKEN_CHANNEL
    SCALAR: tl.constexpr = DECAY == HEAD or DECAY == TOKEN_HEAD
    FIXED: tl.constexpr = DECAY == HEAD or DECAY == CHANNEL
    WEIGHED: tl.constexpr = weight is not None or factor is not None or ds is not None or qz is not None
    LIFTED: tl.constexpr = SCALAR and not LATE  # out is scaled by its gates
    # The order of two products: registers do not suffice everywhere for the results of both. As measured.
    STATE_FIRST: tl.constexpr = not WEIGHED and not (DECAY == HEAD or (SCALAR and OUTER))
    BEHIND: tl.constexpr = SCALAR and REVERSE and not LATE  # a row's gates are those of the tokens behind in the chunk
    SHIFT: tl.constexpr = (REVERSE or LATE) and not BEHIND
    FLIP: tl.constexpr = VECTOR and not OUTER
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
    if moved is not None or skipped is not None:  # early, as it is no factor of a product, so stays where it is put
        bm = tl.load(mate + fz + rz, mask=here, other=0.0)
    of_token = (first * H + h) + (step * H) * r
    chunk = slot + ((length + lead - t0) // C - 1 if REVERSE else t0 // C)
    of_chunk, in_chunk = chunk * H + h, (C - 1 - r if REVERSE else r)
    if sums is not None:
        G, GL = _sums_of(sums, chunk, h, r, H, C, REVERSE)
    elif DECAY == TOKEN_HEAD:
        bg = _of_rows(g, scale, t0, start, length, lead, h, r, H, REVERSE, SHIFT)
    if weight is not None:
        bw = tl.load(weight + of_chunk * C + in_chunk)
    if factor is not None:
        bf = tl.load(factor + of_chunk * C + in_chunk)
    if ds is not None:
        bd = tl.load(ds + of_chunk * C + in_chunk)

    # gates: their running sum G, and its end GL
    if DECAY == TOKEN_HEAD and sums is None:
        bg = tl.maximum(bg.to(SUM), ZERO) * LOG2E
        G = tl.cumsum(bg, 0)
        GL = tl.sum(bg, 0)
    if FIXED:
        none = lead + 1 if SHIFT else lead  # rows from the first on that bring no gate
        upto = r if BEHIND else tl.minimum(r + 1, m)
        seen = tl.maximum(t0 + upto - none, 0) - tl.maximum(t0 - none, 0)
        last = tl.maximum(t0 + m - none, 0) - tl.maximum(t0 - none, 0)
    if DECAY == HEAD:
        G = seen.to(SUM) * fixed
        GL = last.to(SUM) * fixed
    if SCALAR:
        gates += GL
        GX = G
        if rows is not None:
            GX = tl.load(rows + of_chunk * C + in_chunk)
        if LIFTED:
            GX += lift
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
        if STATE_FIRST:
            acc = tl.dot(read, state, input_precision=PRECISION)
        P = tl.dot(read, tl.trans(keys), input_precision=PRECISION)
        if ds is not None:  # x or y has one more channel, the other a one
            P += bd[None, :] if REVERSE else bd[:, None]
        if columns is not None:
            P = P * tl.exp2((GX[:, None] - tl.load(columns + of_chunk * C + in_chunk)[None, :]).to(tl.float32))
        elif SCALAR:
            P = P * tl.exp2((GX[:, None] - G[None, :]).to(tl.float32))
        if weight is not None and columns is None:
            P = P * bw[None, :]
        P = tl.where(low, P, 0.0)
        if not STATE_FIRST:
            acc = tl.dot(read, state, input_precision=PRECISION)
        if ds is not None:
            acc += Z[None, :] if REVERSE else bd[:, None] * Z[None, :]
        if SCALAR:
            acc = acc * tl.exp2(GX.to(tl.float32))[:, None]
        acc = tl.dot(P.to(DOT), written, acc, input_precision=PRECISION)
        if VECTOR and OUTER:
            acc = acc * tl.exp2(G)
        if qz is not None:  # while the product is under way
            s = tl.sum(P, 1) * (1.0 if LIFTED else scale) + tl.load(qz + of_chunk * C + in_chunk)
            top = _of_rows(maxima, s, t0, start, length, lead, h, r, H, REVERSE, False)
            divisor, _ = _divisor(s, top, eps, maxima is not None, SUM)
            acc = acc * (1.0 / divisor)[:, None]
            tl.store(norms + of_token, s, mask=live & (block == 0))
        if factor is not None and not REVERSE:
            acc = acc * bf[:, None]
        if moved is not None:
            of_block = of_chunk * ((DZ + BZ - 1) // BZ) + block
            tl.store(moved + of_block * C + in_chunk, tl.sum(acc * bm, 1) * (1.0 if LIFTED else scale))
        if skipped is not None:
            along += tl.sum(bz.to(tl.float32) * bm, 1)

        if u is not None:
            # the row's own write
            oy = tl.load(y + fx + rx, mask=in_x, other=0.0).to(tl.float32)
            oz = tl.load(z + fz + rz, mask=here, other=0.0).to(tl.float32)
            if OUTER:
                alone = tl.sum(bx * oy, 1)
                acc += alone[:, None] * oz * bonus[None, :]
                if not REVERSE:
                    tl.store(own + of_token, alone, mask=live & (r < m))
            else:
                acc += tl.sum(bx * oy * bonus[None, :], 1)[:, None] * oz
        if factor is not None and REVERSE:
            acc = acc * bf[:, None]
        if not LIFTED:
            acc = acc * scale
        if skip is not None:
            acc += bonus * bz
        tl.store(out + fo + ro, acc.to(out.dtype.element_ty), mask=here)

    if SCALAR:
        kept = tl.exp2(tl.minimum(GL - G, 0.0).to(tl.float32))
        decay = tl.exp2(GL.to(tl.float32))
        S = S * decay
        if ds is not None:
            Z = Z * decay
    elif WEIGHED:
        kept = tl.where(live, 1.0, 0.0)
    if weight is not None:
        kept = kept * bw
    if ds is not None:
        Z += tl.sum(bz.to(tl.float32) * (kept * bd if REVERSE else kept)[:, None], 0)
    if SCALAR or weight is not None:  # the smaller of the two
        if KX < BZ:
            keys = (by * kept[:, None]).to(DOT)
        else:
            written = (bz * kept[:, None]).to(DOT)
    if FLIP:
        S = tl.dot(tl.trans(written), keys, S, input_precision=PRECISION)
    else:
        S = tl.dot(tl.trans(keys), written, S, input_precision=PRECISION)
    if VECTOR:
        S = S * tl.exp2(GL)[None, :]
    return m, S, Z, gates, along


@triton.jit
def _scaled_chunk(
    t0, S, gates, fixed, bonus,
    x, y, z, g, u, ends, qk, out, total, own,
    scale, start, length, lead, slot, h, r, cx, cz, cg,
    H: tl.constexpr, HX: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    KX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, OUTER: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`_chunk` where the gates are divided out of q and k; W_ij = 1, and ``ends`` the sums of their chunks."""
    HALF: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    DG: tl.constexpr = DZ if OUTER else DX
    BG: tl.constexpr = BZ if OUTER else KX
    step: tl.constexpr = -1 if REVERSE else 1

    low = r[:, None] >= r[None, :]
    first = start + (length + lead - 1 - t0 if REVERSE else t0)
    live = (t0 + r >= lead) & (t0 + r < length + lead)
    in_x, here, in_g = live[:, None], live[:, None], live[:, None]
    of_gates = cg < DG
    if DX % KX != 0:
        in_x = in_x & (cx < DX)[None, :]
    if DZ % BZ != 0:
        here = here & (cz < DZ)[None, :]
    if DG % BG != 0:
        in_g = in_g & of_gates[None, :]
    fx = (first * HX + h // (H // HX)) * DX
    fz = (first * HZ + h // (H // HZ)) * DZ
    fo = (first * H + h) * DZ
    rx = (step * HX * DX) * r[:, None] + cx[None, :]
    rz = (step * HZ * DZ) * r[:, None] + cz[None, :]
    ro = (step * H * DZ) * r[:, None] + cz[None, :]
    by = tl.load(y + fx + rx, mask=in_x, other=0.0).to(DOT)
    bz = tl.load(z + fz + rz, mask=here, other=0.0)
    chunk = ((length + lead - 1 - t0) if REVERSE else t0) // C
    GL = tl.load(ends + ((slot + chunk) * H + h) * DG + cg, mask=of_gates, other=0.0)
    if total is not None:
        gates += GL
    GL = tl.exp2(GL)
    if REVERSE:
        S = S * (GL[None, :] if OUTER else GL[:, None])

    if out is not None:
        bx = tl.load(x + fx + rx, mask=in_x, other=0.0).to(DOT)
        acc = tl.dot(bx, S.to(DOT), input_precision=PRECISION)
        P = tl.dot(bx, tl.trans(by), input_precision=PRECISION)
        P = tl.where((r[:, None] > r[None, :]) if LATE else low, P, 0.0)
        acc = tl.dot(P.to(DOT), bz.to(DOT), acc, input_precision=PRECISION)
        if OUTER:  # its channels are those of the gates: scaled back
            if DECAY == CHANNEL + SCALED:
                bg = fixed[None, :]
                G = (C - r if REVERSE else r + 1).to(tl.float32)[:, None] * bg
            else:
                fg = (first * H + h) * DG
                raw = tl.load(g + fg + ((step * H * DG) * r[:, None] + cg[None, :]), mask=in_g, other=0.0)
                raw = tl.maximum(raw, ZERO).to(raw.dtype)
                SUM: tl.constexpr = tl.float32 if HALF else tl.float64
                # of this token and those before it in time
                G = _running_sum(raw, r[:, None] <= r[None, :] if REVERSE else low, HALF, SUM)
                if REVERSE and not HALF:
                    G = tl.sum(raw.to(SUM), 0)[None, :] - G + raw
                G = (G * LOG2E).to(tl.float32)
                bg = raw.to(tl.float32) * LOG2E
            if REVERSE:
                E = tl.exp2(-G)
            else:
                E = tl.exp2(G - bg) if LATE else tl.exp2(G)
            acc = acc * E
            if u is not None:
                weight = tl.sum(bx.to(tl.float32) * by.to(tl.float32), 1)
                acc += weight[:, None] * tl.exp2(bg) * E * bz.to(tl.float32) * bonus[None, :]
                if not REVERSE:
                    tl.store(own + (first * H + h) + H * r, weight, mask=live)
        elif u is not None:
            weight = tl.load(qk + (first * H + h) + (step * H) * r, mask=live, other=0.0)
            acc += weight[:, None] * bz.to(tl.float32)
        tl.store(out + fo + ro, (acc * scale).to(out.dtype.element_ty), mask=here)

    S = tl.dot(tl.trans(by), bz.to(DOT), S, input_precision=PRECISION)
    if not REVERSE:
        S = S * (GL[None, :] if OUTER else GL[:, None])
    return S, gates


@triton.jit(do_not_specialize=["T", "L", "segments"])
def divide(
    q, k, g, u, cu,
    qs, ks, ends, steep, qk,
    T, L, segments,
    H: tl.constexpr, HX: tl.constexpr, K: tl.constexpr, KX: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gates divided out: q 2^G and k 2^-G, G the gates' running sum in the chunk (for q with LATE of those before).

    qs, ks: [B, T, H, K]. ends: every chunk's sum of gates; steep: whether it leaves the range, and then qs and ks are
    not written. qk: [B, T, H], q . u . k.
    """
    HALF: tl.constexpr = qs.dtype.element_ty == tl.bfloat16
    SUM: tl.constexpr = tl.float32 if HALF else tl.float64
    pid = tl.program_id(0)
    h = pid % H
    n = pid // H
    start, length = _bounds(cu, n, T, L, segments)
    slot = _slot(cu, n, start, T, L, segments, C)
    r = tl.arange(0, C)
    c = tl.arange(0, KX)
    low = r[:, None] >= r[None, :]
    if DECAY == CHANNEL:
        fixed = tl.maximum(tl.load(g + h * K + c, mask=c < K, other=0.0).to(tl.float32), ZERO) * LOG2E
    if u is not None:
        bonus = tl.load(u + h * K + c, mask=c < K, other=0.0).to(tl.float32)
    for t0 in range(0, length, C):
        live = t0 + r < length
        here = live[:, None]
        if K % KX != 0:
            here = here & (c < K)[None, :]
        first = start + t0
        fx, rx = (first * HX + h // (H // HX)) * K, (HX * K) * r[:, None] + c[None, :]
        fo, ro = (first * H + h) * K, (H * K) * r[:, None] + c[None, :]
        bq = tl.load(q + fx + rx, mask=here, other=0.0)
        bk = tl.load(k + fx + rx, mask=here, other=0.0)
        if DECAY == CHANNEL:
            bg = fixed[None, :]
            G = tl.minimum(r + 1, length - t0).to(tl.float32)[:, None] * bg
        else:
            raw = tl.load(g + fo + ro, mask=here, other=0.0)
            raw = tl.maximum(raw, ZERO).to(raw.dtype)
            bg = raw.to(tl.float32) * LOG2E
            G = (_running_sum(raw, low, HALF, SUM) * LOG2E).to(tl.float32)
        GL = tl.sum(tl.where((r == C - 1)[:, None], G, 0.0), 0)
        outside = tl.min(GL, 0) < -LIMIT
        at = (slot + t0 // C) * H + h
        tl.store(steep + at, tl.where(outside, 1, 0))
        here = here & (not outside)
        tl.store(ends + at * K + c, GL, mask=c < K)
        tl.store(qs + fo + ro, (bq * tl.exp2(G - bg if LATE else G)).to(qs.dtype.element_ty), mask=here)
        tl.store(ks + fo + ro, (bk * tl.exp2(-G)).to(ks.dtype.element_ty), mask=here)
        if u is not None:
            weight = tl.sum(bq.to(tl.float32) * bk.to(tl.float32) * bonus[None, :], 1)
            tl.store(qk + (first * H + h) + H * r, weight, mask=live)


@triton.jit(do_not_specialize=["T", "L", "segments", "scale", "least"])
def gate_gradient(
    q, k, dq, dk, g, u, own, rest, cu,
    dg, du,
    scale, T, L, segments, least,
    H: tl.constexpr, HX: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dg_l = sum_{i >= l} a_i - sum_{j >= l} b_j + rest (i > l with LATE), and du; walked from the end.

    dq, dk: [B, T, H, K], of which a_i = q_i dq_i and b_j = k_j dk_j, summed over channels where gates are of a head.
    own: do . v, of which the bonus makes scale own u (k to dq, q to dk), which no gate decays. rest: S_T dS_T, a number
    a channel or PARTS of them, or None for 0. dg, None if unwanted: as g; [rows, H] or [rows, H, K] where gates are
    fixed. least: gates below it have a gradient smaller than what rounding leaves in the difference, and multiply it by
    their size on the way to a rate: it is 0.
    """
    VECTOR: tl.constexpr = DECAY == CHANNEL or DECAY == TOKEN_CHANNEL
    FIXED: tl.constexpr = DECAY == HEAD or DECAY == CHANNEL
    NB: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    nh = pid // NB
    h = nh % H
    n = nh // H
    start, length = _bounds(cu, n, T, L, segments)
    lead = (C - length % C) % C
    r = tl.arange(0, C)
    c = (pid % NB) * BK + tl.arange(0, BK)
    low = r[:, None] >= r[None, :]
    nothing = length.to(tl.float32) * 0.0
    if VECTOR:
        after = tl.zeros([BK], tl.float32)
        if rest is not None:
            after = tl.load(rest + nh.to(tl.int64) * K + c, mask=c < K, other=0.0)
        summed = tl.zeros([BK], tl.float32)
    else:
        after, summed = nothing, nothing
        if rest is not None:
            for part in range(PARTS):
                after += tl.load(rest + nh.to(tl.int64) * PARTS + part)
    if u is not None:
        bonus = tl.load(u + h * K + c, mask=c < K, other=0.0).to(tl.float32)
        dbonus = tl.zeros([BK], tl.float32)
    for t0 in range(0, length + lead, C):
        live = (t0 + r >= lead) & (t0 + r < length + lead)
        first = start + (length + lead - 1 - t0)
        at = (first * H + h) - H * r
        kept = live
        here = live[:, None]
        if K % BK != 0:
            here = here & (c < K)[None, :]
        fx, rx = (first * HX + h // (H // HX)) * K, (-HX * K) * r[:, None] + c[None, :]
        fo, ro = (first * H + h) * K, (-H * K) * r[:, None] + c[None, :]
        bq = tl.load(q + fx + rx, mask=here, other=0.0).to(tl.float32)
        bk = tl.load(k + fx + rx, mask=here, other=0.0).to(tl.float32)
        a = bq * tl.load(dq + fo + ro, mask=here, other=0.0)
        change = a - bk * tl.load(dk + fo + ro, mask=here, other=0.0)
        if u is not None:
            both = scale * tl.load(own + at, mask=live, other=0.0)[:, None] * (bq * bk)
            dbonus += tl.sum(both, 0)
            a -= both * bonus[None, :]
        if VECTOR:
            at, kept = fo + ro, here
        else:
            a, change = tl.sum(a, 1), tl.sum(change, 1)
        if dg is not None:
            if VECTOR:
                back = _running_sum(change, low, q.dtype.element_ty == tl.bfloat16, tl.float32) + after[None, :]
            else:
                back = tl.cumsum(change, 0) + after
            after += tl.sum(change, 0)
            if LATE:
                back -= a
            if FIXED:
                summed += tl.sum(tl.where(kept, back, 0.0), 0)
            else:
                gate = tl.load(g + at, mask=kept, other=0.0)
                tl.store(dg + at, tl.where(gate < least, 0.0, back).to(dg.dtype.element_ty), mask=kept)
    if dg is not None and FIXED:
        if VECTOR:
            gate = tl.load(g + h * K + c, mask=c < K, other=0.0)
            tl.store(dg + nh.to(tl.int64) * K + c, tl.where(gate < least, 0.0, summed), mask=c < K)
        else:
            tl.store(dg + nh, tl.where(tl.load(g + h) < least, 0.0, summed))
    if u is not None:
        tl.store(du + nh.to(tl.int64) * K + c, dbonus, mask=c < K)


@triton.jit(do_not_specialize=["T", "L", "segments", "least"])
def head_gate_gradient(
    read, written, weight, g, rest, cu,
    dg, dw,
    T, L, segments, least,
    H: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr, LATE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """:func:`gate_gradient` of gates of heads without a bonus, ROWS tokens at once, and the gradient of the weights.

    The sums over channels of a and of b without its ``weight`` are given, in parts: ``read`` and ``written``, as
    ``moved`` of :func:`sweep`. dg, dw: None if unwanted.
    """
    pid = tl.program_id(0)
    n, h = pid // H, pid % H
    start, length = _bounds(cu, n, T, L, segments)
    slot = _slot(cu, n, start, T, L, segments, C)
    r = ROWS - 1 - tl.arange(0, ROWS)  # from the end
    after, summed = length.to(tl.float32) * 0.0, length.to(tl.float32) * 0.0
    if rest is not None:
        for part in range(PARTS):
            after += tl.load(rest + pid.to(tl.int64) * PARTS + part)
    blocks = tl.cdiv(length, ROWS)
    for i in range(0, blocks):
        row = (blocks - 1 - i) * ROWS + r
        live = row < length
        at = ((slot + row // C) * H + h) * (PARTS * C) + row % C
        of_token = (start + row) * H + h
        b = tl.zeros([ROWS], tl.float32)
        for part in range(PARTS):
            b += tl.load(written + at + part * C, mask=live, other=0.0)
        if dw is not None:
            tl.store(dw + of_token, b.to(dw.dtype.element_ty), mask=live)
        if dg is not None:
            a = tl.zeros([ROWS], tl.float32)
            for part in range(PARTS):
                a += tl.load(read + at + part * C, mask=live, other=0.0)
            if weight is not None:
                b = b * tl.load(weight + of_token, mask=live, other=0.0)
            back = tl.cumsum(a - b, 0) + after
            after += tl.sum(a - b, 0)
            if LATE:
                back -= a
            if DECAY == HEAD:
                summed += tl.sum(tl.where(live, back, 0.0), 0)
            else:
                gate = tl.load(g + of_token, mask=live, other=0.0)
                tl.store(dg + of_token, tl.where(gate < least, 0.0, back).to(dg.dtype.element_ty), mask=live)
    if dg is not None and DECAY == HEAD:
        tl.store(dg + pid, tl.where(tl.load(g + h) < least, 0.0, summed))


@triton.jit(do_not_specialize=["N", "T", "least"])
def chunk_gate_gradient(
    read, written, weight, g, across, cu,
    dg,
    N, T, least,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """:func:`head_gate_gradient` of a chunk, from what is known ``across`` its end [chunks, H, PARTS]: no error adds up
    over a longer row. dg: [chunks, H] where gates are fixed."""
    _, start, length, slot, chunk, h = _piece(cu, N, T, H, C, BH)
    m = length - chunk * C
    r = C - 1 - tl.arange(0, C)  # from the end, so that tokens without a gradient get none
    live = (r < m)[:, None] & (h < H)[None, :]
    at = (start + chunk * C) * H + (h[None, :] + H * r[:, None])
    of_chunk = (slot + chunk) * H + h
    a, b = tl.load(read + at, mask=live, other=0.0), tl.load(written + at, mask=live, other=0.0)
    after = tl.zeros([BH], tl.float32)
    for part in range(PARTS):
        after += tl.load(across + of_chunk * PARTS + part, mask=(h < H) & (m > 0), other=0.0)
    if weight is not None:
        b = b * tl.load(weight + at, mask=live, other=0.0)
    change = a - b
    back = after[None, :] + tl.cumsum(change, 0)
    if DECAY == HEAD:
        gate = tl.load(g + h, mask=h < H, other=0.0)
        summed = tl.sum(tl.where(live, back, 0.0), 0)
        tl.store(dg + of_chunk, tl.where(gate < least, 0.0, summed), mask=h < H)
    else:
        gate = tl.load(g + at, mask=live, other=0.0)
        tl.store(dg + at, tl.where(gate < least, 0.0, back).to(dg.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["T", "L", "segments", "scale", "eps"])
def sweep(
    x, y, z, g, u, skip, mate, cu, init, dS, ends, steep, qk, sums, rows, columns, weight, factor, ds, qz, maxima,
    zinit, dZ, behind,
    out, final, total, moved, skipped, rest, own, zfinal, kept, across, norms,
    scale, eps, T, L, segments,
    H: tl.constexpr, HX: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    KX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr, OUTER: tl.constexpr, REVERSE: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum above. What is None is absent or unwanted; ``out`` None leaves the states alone.

    ends, steep, qk: as :func:`divide` wrote them. final: the state after each row; or, with ``total``, the sum of its
    gates, what each segment adds, to be joined: the last of a row, which nothing comes after, is left out. For
    :func:`gate_gradient` the sweep of dq writes S_T dS_T to ``rest``, and do . v to ``own`` where there is a bonus;
    with gates of a head the outer ones write out . mate, of the block's channels, to ``moved`` [chunks, H, blocks, C].
    skip [H]: of z, added to out; the row's sum of z . mate is written to ``skipped`` [rows, H, blocks].

    For :func:`shared`, in inner sweeps without gates of channels, kept [chunks, H, DX, DZ] is the state before each
    chunk. With ``behind``, what the reverse sweep kept, the other one writes to ``across`` [chunks, H, blocks] what the
    pairs with a token on either side of the chunk's end bring to the gradient of a gate between them.

    weight, factor [chunks, H, C]: of the rows of z, and of out. sums: as :func:`sum_gates` wrote them. rows,
    columns [chunks, H, C]: sums with log2 factor, and less log2 weight, where these are above 0; rows, not factor.

    With a sum normaliser, the sweep of o adds qz, as :func:`keys_read` wrote it, to its own share of s [B, T, H], which
    goes to ``norms``, and divides by what :func:`_divisor` makes of it. Those of dq and dk read d ds [chunks, H, C], ds
    the gradient of s, for which the sum of keys Z is one more column of S: zinit, zfinal and dZ are to Z what init,
    final and dS are to S. None of these goes with LATE or gates of channels.
    """
    DIVIDED: tl.constexpr = DECAY >= SCALED
    VECTOR: tl.constexpr = DIVIDED or DECAY == CHANNEL or DECAY == TOKEN_CHANNEL
    SCALAR: tl.constexpr = DECAY == HEAD or DECAY == TOKEN_HEAD
    FLIP: tl.constexpr = VECTOR and not OUTER and not DIVIDED
    SHIFT: tl.constexpr = (LATE or (REVERSE and not SCALAR)) and not DIVIDED
    SUM: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float32 else tl.float32
    DG: tl.constexpr = DZ if OUTER else DX
    BG: tl.constexpr = BZ if OUTER else KX
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ

    pid = tl.program_id(0)
    block = pid % NZ
    nh = pid // NZ
    h = nh % H
    n = nh // H
    if total is not None:
        if n % segments == (0 if REVERSE else segments - 1):
            return
    start, length = _bounds(cu, n, T, L, segments)
    slot = _slot(cu, n, start, T, L, segments, C)
    if VECTOR:
        if _is_steep(steep, slot, tl.cdiv(length, C), h, H) == DIVIDED:
            return

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
    fixed, gates, bonus, along, Z, lift = nothing, nothing, nothing, nothing, nothing, nothing
    if skipped is not None:
        along = tl.zeros([C], tl.float32)
    if ds is not None:
        of_Z = nh.to(tl.int64) * DG + cg
        Z = tl.zeros([BG], tl.float32)
        if zinit is not None:
            Z = tl.load(zinit + of_Z, mask=in_g, other=0.0)
            if REVERSE:
                Z = Z / scale
    if VECTOR:
        fixed, gates = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    if SCALAR:
        fixed, gates, lift = length.to(SUM) * 0.0, length.to(SUM) * 0.0, tl.log2((nothing + scale).to(SUM))
    if DECAY == CHANNEL or DECAY == CHANNEL + SCALED:
        fixed = tl.maximum(tl.load(g + h * DG + cg, mask=in_g, other=0.0).to(tl.float32), ZERO) * LOG2E
    if DECAY == HEAD:
        fixed = tl.maximum(tl.load(g + h).to(SUM), ZERO) * LOG2E
    if u is not None:
        bonus = tl.load(u + h * DG + cg, mask=in_g, other=0.0).to(tl.float32)
    if skip is not None:
        bonus = tl.load(skip + h).to(tl.float32)

    if DIVIDED:
        for t0 in tl.range(0, length + lead, C, num_stages=STAGES):
            S, gates = _scaled_chunk(
                t0, S, gates, fixed, bonus,
                x, y, z, g, u, ends, qk, out, total, own,
                scale, start, length, lead, slot, h, r, cx, cz, cg,
                H, HX, HZ, DX, DZ, KX, BZ, C, DECAY, LATE, OUTER, REVERSE, PRECISION,
            )  # fmt: skip
    elif VECTOR:
        t0 = length * 0
        while t0 < length + lead:
            m, S, Z, gates, along = _chunk(
                t0, S, Z, gates, along, fixed, bonus,
                x, y, z, g, u, skip, mate, sums, rows, columns, weight, factor, ds, qz, maxima,
                out, total, moved, skipped, own, norms,
                scale, lift, eps, start, length, lead, slot, block, h, r, cx, cz, cg,
                H, HX, HZ, DX, DZ, KX, BZ, C, DECAY, LATE, OUTER, REVERSE, LIMIT, PRECISION,
            )  # fmt: skip
            t0 += m
    else:  # a loop that the compiler can pipeline
        for t0 in tl.range(0, length + lead, C, num_stages=STAGES):
            if kept is not None or behind is not None:
                of_chunk = (slot + ((length + lead - t0) // C - 1 if REVERSE else t0 // C)) * H + h
            if kept is not None:
                to_chunk = kept + of_chunk * (DX * DZ) + in_state
                tl.store(to_chunk, S.to(kept.dtype.element_ty), mask=has_state)
            if behind is not None:
                D = tl.load(behind + of_chunk * (DX * DZ) + in_state, mask=has_state, other=0.0)
            _, S, Z, gates, along = _chunk(
                t0, S, Z, gates, along, fixed, bonus,
                x, y, z, g, u, skip, mate, sums, rows, columns, weight, factor, ds, qz, maxima,
                out, total, moved, skipped, own, norms,
                scale, lift, eps, start, length, lead, slot, block, h, r, cx, cz, cg,
                H, HX, HZ, DX, DZ, KX, BZ, C, DECAY, LATE, OUTER, REVERSE, LIMIT, PRECISION,
            )  # fmt: skip
            if behind is not None:
                tl.store(across + of_chunk * NZ + block, tl.sum(tl.sum(S * D, 1), 0) * scale)

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
    if LATE and not DIVIDED and (final is not None or rest is not None) and length > 0:
        last = start + (0 if REVERSE else length - 1)
        by = tl.load(y + (last * HX + h // (H // HX)) * DX + cx, mask=cx < DX, other=0.0)
        bz = tl.load(z + (last * HZ + h // (H // HZ)) * DZ + cz, mask=cz < DZ, other=0.0)
        by, bz = by.to(tl.float32), bz.to(tl.float32)
        S += bz[:, None] * by[None, :] if FLIP else by[:, None] * bz[None, :]
    if rest is not None:
        change = tl.load(dS + of_state + in_state, mask=has_state, other=0.0)
        if VECTOR:
            tl.store(rest + nh.to(tl.int64) * DG + cg, tl.sum(S * change, 0), mask=in_g)
        else:
            across = tl.sum(tl.sum(S * change, 0), 0)
            if dZ is not None:
                across += tl.sum(Z * tl.load(dZ + of_Z, mask=in_g, other=0.0), 0)
            tl.store(rest + nh.to(tl.int64) * NZ + block, across)
    if final is not None:
        if total is None:  # the state after the row
            of_state = (n // segments * H + h).to(tl.int64) * (DX * DZ)
            has_state = has_state & (n % segments == (0 if REVERSE else segments - 1))
        tl.store(final + of_state + in_state, S * scale if REVERSE else S, mask=has_state)
    if skipped is not None:
        tl.store(skipped + pid, tl.sum(along, 0))
    if zfinal is not None:
        tl.store(zfinal + of_Z, Z * scale, mask=in_g)
    if total is not None:
        if VECTOR:
            tl.store(total + nh.to(tl.int64) * DG + cg, gates, mask=in_g)
        else:
            tl.store(total + nh, gates.to(tl.float32) if SCALAR else 0.0)


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
        more = live & (i + 1 < segments)
        if VECTOR:
            decay = tl.load(total + at * DX + c // DZ, mask=more, other=0.0)
        else:
            decay = tl.load(total + at, mask=i + 1 < segments, other=0.0)
        S = S * tl.exp2(decay) + tl.load(parts + at * (DX * DZ) + c, mask=more, other=0.0)


@triton.jit
def _one_token(
    q, k, v, g, w, at_h, at_g, ck, cv, in_k, in_v, some,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """What a token brings, as it lies in memory: query, key, value, and gate and weight (where there are any)."""
    bq = tl.load(q + at_g * K + ck, mask=in_k & some, other=0.0)
    bk = tl.load(k + at_g * K + ck, mask=in_k & some, other=0.0)
    bv = tl.load(v + at_h * V + cv, mask=in_v & some, other=0.0)
    if DECAY == TOKEN_HEAD:
        bg = tl.load(g + at_h, mask=some, other=0.0)
    elif DECAY == TOKEN_CHANNEL:
        bg = tl.load(g + at_h * K + ck, mask=in_k & some, other=0.0)
    else:
        bg = bk
    bw = bk
    if w is not None:
        bw = tl.load(w + at_h, mask=some, other=0.0)
    return bq, bk, bv, bg, bw


@triton.jit(do_not_specialize=["scale", "T", "eps"])
def tokens(
    q, k, v, g, u, skip, w, maxima, cu, state, z, out, sums, final, last,
    scale, T, eps,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """A few tokens, one after the other: each element of the state is read once and written once.

    With ``sums`` also s = scale z . q of the sum of (weighted) keys z, which becomes ``last``, and o divided as
    :func:`_divisor` says; decays of heads or none.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    nh = pid // blocks
    h = nh % H
    start, length = _bounds(cu, nh // H, T, T, 1)
    at_h, at_g = start * H + h, start * G + h // (H // G)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    in_k = ck < K
    in_v = cv < V
    place = nh.to(tl.int64) * (K * V) + ck[:, None] * V + cv[None, :]
    mask = in_k[:, None] & in_v[None, :]
    if state is not None:
        S = tl.load(state + place, mask=mask, other=0.0)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    in_z = in_k & (pid % blocks == 0)  # one program of a head writes
    bz = tl.zeros([BK], tl.float32)
    if z is not None:
        bz = tl.load(z + nh.to(tl.int64) * K + ck, mask=in_k, other=0.0)
    ahead_q, ahead_k, ahead_v, ahead_g, ahead_w = _one_token(
        q, k, v, g, w, at_h, at_g, ck, cv, in_k, in_v, length > 0, K, V, DECAY
    )
    if u is not None:
        bonus = tl.load(u + h * K + ck, mask=in_k, other=0.0).to(tl.float32)
    if DECAY == HEAD:
        decay = tl.exp2(tl.load(g + h).to(tl.float32) * LOG2E)
    elif DECAY == CHANNEL:
        decay = tl.exp2(tl.load(g + h * K + ck, mask=in_k, other=0.0).to(tl.float32) * LOG2E)

    for t in range(0, length):
        bq, bk, bv = ahead_q.to(tl.float32), ahead_k.to(tl.float32), ahead_v.to(tl.float32)
        if DECAY == TOKEN_HEAD or DECAY == TOKEN_CHANNEL:
            decay = tl.exp2(ahead_g.to(tl.float32) * LOG2E)
        if w is not None:
            bk = bk * ahead_w
        at = at_h
        at_h += H
        at_g += G
        ahead_q, ahead_k, ahead_v, ahead_g, ahead_w = _one_token(  # under way while this token is worked on
            q, k, v, g, w, at_h, at_g, ck, cv, in_k, in_v, t + 1 < length, K, V, DECAY
        )
        if LATE:
            o = tl.sum(bq[:, None] * S, 0)
            if u is not None:
                o += tl.sum(bq * bk * bonus, 0) * bv
        if DECAY == HEAD or DECAY == TOKEN_HEAD:
            S = S * decay
        elif DECAY == CHANNEL or DECAY == TOKEN_CHANNEL:
            S = S * decay[:, None]
        S += bk[:, None] * bv[None, :]
        if not LATE:
            o = tl.sum(bq[:, None] * S, 0)
        o = o * scale
        if skip is not None:
            o += tl.load(skip + h).to(tl.float32) * bv
        if sums is not None:
            if DECAY == HEAD or DECAY == TOKEN_HEAD:
                bz = bz * decay
            bz += bk
            s = tl.sum(bq * bz, 0) * scale
            tl.store(sums + at, s, mask=pid % blocks == 0)
            top = tl.load(maxima + at) if maxima is not None else s
            divisor, _ = _divisor(s, top, eps, maxima is not None, tl.float64)
            o = o / divisor
        tl.store(out + at * V + cv, o.to(out.dtype.element_ty), mask=in_v)
    tl.store(final + place, S, mask=mask)
    if last is not None:
        tl.store(last + nh.to(tl.int64) * K + ck, bz, mask=in_z)


@triton.jit(do_not_specialize=["eps", "N", "T"])
def divisor_gradient(
    o, do, norms, maxima, sums, cu,
    ds, shares, rows, columns, dm,
    eps, N, T,
    H: tl.constexpr, V: tl.constexpr, VX: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of outputs o [B, T, H, V] divided by d, :func:`_divisor` of ``norms`` s: d ds, 1 / d, and with ``sums`` the rows
    and columns of :func:`sweep` [chunks, H, C], and dm."""
    SUM: tl.constexpr = tl.float64 if o.dtype.element_ty == tl.float32 else tl.float32
    _, start, length, slot, chunk, _ = _piece(cu, N, T, H, C, 1)
    h = tl.program_id(0) % H
    r, c = tl.arange(0, C), tl.arange(0, VX)
    first, live = start + chunk * C, chunk * C + r < length
    here, at = live[:, None] & (c < V)[None, :], (first * H + h) * V + (H * V) * r[:, None] + c[None, :]
    change = tl.load(o + at, mask=here, other=0.0).to(tl.float32) * tl.load(do + at, mask=here, other=0.0)
    of_token = (first * H + h) + H * r
    s = tl.load(norms + of_token, mask=live, other=0.0)
    top = s
    if maxima is not None:
        top = tl.load(maxima + of_token, mask=live, other=0.0)
    divisor, larger = _divisor(s, top, eps, maxima is not None, SUM)
    change = -tl.sum(change, 1)
    sign = tl.where(s > 0.0, 1.0, tl.where(s < 0.0, -1.0, 0.0))
    of_row = ((slot + chunk) * H + h) * C + r
    tl.store(ds + of_row, tl.where(larger & live, change * sign, 0.0))
    tl.store(shares + of_row, tl.where(live, 1.0 / divisor, 0.0))
    if sums is not None:
        share = tl.where(live, tl.log2(divisor.to(SUM)), 0.0)
        at = ((slot + chunk) * H + h) * (2 * C)
        tl.store(rows + of_row, tl.load(sums + at + r) - share)
        tl.store(columns + of_row, tl.load(sums + at + (2 * C - 1 - r)) + share)
    if maxima is not None:
        tl.store(dm + of_token, change / divisor * eps, mask=live)


@triton.jit
def _rounded(a, to):
    """float64 in the dtype that ``to`` points at; no conversion leads from it to bfloat16 everywhere."""
    if to.dtype.element_ty == tl.float64:
        return a
    else:
        return a.to(tl.float32).to(to.dtype.element_ty)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _piece(cu, N, T, X: tl.constexpr, C: tl.constexpr, BX: tl.constexpr):
    """Of N rows cut in pieces of C tokens, the one that a program does: its row, the row's first token and length, the
    place of the row's first piece among all, how many pieces of the row come before; the channels."""
    blocks: tl.constexpr = (X + BX - 1) // BX
    place = tl.program_id(0) // blocks
    if cu is not None:  # a row has as many places as lie between its slot and the next one's
        s = tl.arange(0, 128)
        n = place * 0 - 1
        for first in range(0, N, 128):
            slots = tl.load(cu + first + s, mask=first + s < N, other=0).to(tl.int64) // C + first + s
            n += tl.sum(tl.where((first + s < N) & (slots <= place), 1, 0), 0)
        n = tl.maximum(n, 0)
    else:
        n = place // tl.cdiv(tl.maximum(T, 1), C)
    start, length = _bounds(cu, n, T, T, 1)
    slot = _slot(cu, n, start, tl.maximum(T, 1), T, 1, C)
    return n, start, length, slot, (place - slot).to(tl.int32), (tl.program_id(0) % blocks) * BX + tl.arange(0, BX)


@triton.jit
def _log_decay(f, at, live, x, X: tl.constexpr, FIXED: tl.constexpr):
    """f of some tokens in float64; it is [X] where FIXED."""
    if FIXED:
        return tl.where(live, tl.load(f + x, mask=x < X, other=0.0)[None, :], 0.0).to(tl.float64)
    else:
        return tl.load(f + at, mask=live, other=0.0).to(tl.float64)


@triton.jit(do_not_specialize=["N", "T"])
def stabilize_parts(
    f, i, cu,
    total, most,
    N, T,
    X: tl.constexpr, FIXED: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, LEAST: tl.constexpr,
    STEEPEST: tl.constexpr,
):  # fmt: skip
    """Of every piece of a row, the sum of f and the m that it ends with where nothing was before: [pieces, X]."""
    _, start, length, slot, before, x = _piece(cu, N, T, X, C, BX)
    row = before * C + tl.arange(0, C)
    live = (row < length)[:, None] & (x < X)[None, :]
    at = (start + row)[:, None] * X + x[None, :]
    bi = tl.load(i + at, mask=live, other=float("-inf")).to(tl.float64)
    step = tl.maximum(_log_decay(f, at, live, x, X, FIXED), STEEPEST)
    end = tl.sum(step, 0)
    over = tl.where(bi == bi, bi - tl.cumsum(step, 0), float("-inf"))  # a NaN is no maximum
    to = (slot + before) * X + x
    tl.store(total + to, end, mask=x < X)
    tl.store(most + to, end + tl.max(over, 0), mask=x < X)


@triton.jit(do_not_specialize=["N", "T"])
def stabilize(
    f, i, m, cu, total, most,
    g, j, m_before, maxima, final, rescale,
    N, T,
    X: tl.constexpr, FIXED: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, LEAST: tl.constexpr,
    STEEPEST: tl.constexpr,
):  # fmt: skip
    """m_t = max(f_t + m_{t-1}, i_t), g_t = f_t + m_{t-1} - m_t and j_t = i_t - m_t, of a piece of a row.

    f: [X] where FIXED. With F the running sum of f over C tokens, f_t + m_{t-1} is F_t plus the running maximum of m
    before them and of i_s - F_s, s < t, all in float64; the m before a piece comes in the same way from what the pieces
    before it bring (``total`` and ``most``, :func:`stabilize_parts`). No sum grows with the row. LEAST: m of nothing.
    """
    n, start, length, slot, before, x = _piece(cu, N, T, X, C, BX)
    in_x = x < X
    now_before = tl.full([BX], LEAST, tl.float64)
    if m is not None:
        now_before = tl.maximum(tl.load(m + n * X + x, mask=in_x, other=0.0).to(tl.float64), LEAST)
    tl.store(m_before + start * X + x, now_before, mask=in_x & (before == 0) & (length > 0))
    if total is not None:
        p = tl.arange(0, 64)
        for first in range(0, before, 64):
            seen = (first + p < before)[:, None] & in_x[None, :]
            place = (slot + first + p)[:, None] * X + x[None, :]
            end = tl.load(total + place, mask=seen, other=0.0)
            reach = tl.load(most + place, mask=seen, other=float("-inf")) - tl.cumsum(end, 0)
            now_before = tl.sum(end, 0) + tl.maximum(tl.max(reach, 0), now_before)

    r = tl.arange(0, C)
    row = before * C + r
    live = (row < length)[:, None] & in_x[None, :]
    at = (start + row)[:, None] * X + x[None, :]
    nothing = tl.full([C, BX], float("-inf"), tl.float64)
    bi = tl.load(i + at, mask=live, other=0.0).to(tl.float64)
    earlier = tl.load(i + at - X, mask=live & (r > 0)[:, None], other=float("-inf")).to(tl.float64)
    bf = _log_decay(f, at, live, x, X, FIXED)
    step = tl.maximum(bf, STEEPEST)
    F = tl.cumsum(step, 0)
    over = tl.where(earlier == earlier, earlier - (F - step), nothing)  # a NaN is no maximum
    past = F + tl.maximum(tl.associative_scan(over, 0, _larger), now_before[None, :])  # f_t + m_{t-1}
    now = tl.maximum(past, tl.where(bi == bi, bi, nothing))
    bg = (bf - step) + (past - now)
    bg = tl.where(past <= LEAST / 2, 0.0, bg)
    bj = bi - now
    # rounding may leave a difference above 0 where it should be 0
    tl.store(g + at, _rounded(tl.where(bg > 0.0, 0.0, bg), g), mask=live)
    tl.store(j + at, _rounded(tl.where(bj > 0.0, 0.0, bj), j), mask=live)
    tl.store(maxima + at, now, mask=live)
    tl.store(m_before + at + X, now, mask=live & (row + 1 < length)[:, None])
    last = tl.sum(tl.where((row == length - 1)[:, None], now, 0.0), 0)
    last = tl.where(length > 0, last, now_before)
    ends = in_x & (before == tl.maximum(tl.cdiv(length, C) - 1, 0))
    rounded = _rounded(last, final)
    tl.store(final + n * X + x, rounded, mask=ends)
    tl.store(rescale + n * X + x, tl.exp(last - rounded.to(tl.float64)), mask=ends)


@triton.jit
def _then(p1, a1, p2, a2):
    """Of x -> p x + a: the first, then the second."""
    return p1 * p2, a2 + p2 * a1


@triton.jit
def _passed(i, maxima, at, live, row, X: tl.constexpr):
    """1 where the token after, which is a row before, passes something on: where its i is not its m."""
    live = live & (row > 0)[:, None]
    now = tl.load(maxima + at + X, mask=live, other=0.0)
    own = tl.load(i + at + X, mask=live, other=-1.0).to(tl.float64)
    return tl.where(own >= now, 0.0, 1.0).to(tl.float64)


@triton.jit
def _since(r, passed, a):
    """Sums of ``a`` over the rows since the last that nothing is passed to, and whether there is none."""
    last = tl.max(tl.where(passed == 0.0, r[:, None], -1), 0)
    return tl.sum(tl.where(r[:, None] >= last[None, :], a, 0.0), 0), last < 0


@triton.jit(do_not_specialize=["N", "T"])
def stabilize_gradient_parts(
    i, cu, maxima, dm,
    passes, sums,
    N, T,
    X: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Of every piece of a row, counted from its end: whether it passes on what comes from the tokens after (1, else 0),
    and what it adds: [pieces, X]."""
    _, start, length, slot, before, x = _piece(cu, N, T, X, C, BX)
    r = tl.arange(0, C)
    row = before * C + r
    live = (row < length)[:, None] & (x < X)[None, :]
    at = (start + (length - 1 - row))[:, None] * X + x[None, :]
    a = tl.zeros([C, BX], tl.float64)
    if dm is not None:
        a += tl.load(dm + at, mask=live, other=0.0)
    added, through = _since(r, _passed(i, maxima, at, live, row, X), a)
    to = (slot + before) * X + x
    tl.store(passes + to, tl.where(through, 1.0, 0.0), mask=x < X)
    tl.store(sums + to, added, mask=x < X)


@triton.jit(do_not_specialize=["N", "T"])
def stabilize_gradient(
    f, i, m, cu, passes, sums, maxima, rescale, dg, dj, dbefore, dm, dfinal, drescale,
    df, di, dstart,
    N, T,
    X: tl.constexpr, FIXED: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, LEAST: tl.constexpr,
    STEEPEST: tl.constexpr,
):  # fmt: skip
    """Gradients of f and i [B, T, X] and of the first m [N, X]; of the results, those that are None are 0.

    g and j pass theirs straight on. m_t passes its own to i_t where that is the larger, else to f_t and m_{t-1}: a scan
    from the end, of C tokens, after what the pieces after them bring (``passes``, ``sums``).
    """
    n, start, length, slot, before, x = _piece(cu, N, T, X, C, BX)
    in_x = x < X
    of_row = n * X + x
    least = tl.full([BX], LEAST, tl.float64)
    first = least
    if m is not None:
        first = tl.load(m + of_row, mask=in_x, other=0.0).to(tl.float64)
    after = tl.zeros([BX], tl.float64)
    if dfinal is not None:
        after += tl.load(dfinal + of_row, mask=in_x, other=0.0)
    if drescale is not None:  # e^{m_T - final}, m_T a constant; without tokens it is the m given, and both cancel
        change = tl.load(drescale + of_row, mask=in_x, other=0.0)
        change = change * tl.load(rescale + of_row, mask=in_x, other=0.0)
        after -= tl.where(length > 0, change, 0.0)
    to_start = tl.where(length > 0, 0.0, after)
    if passes is not None:
        p = tl.arange(0, 64)
        for earlier in range(0, before, 64):
            seen = (earlier + p < before)[:, None] & in_x[None, :]
            place = (slot + earlier + p)[:, None] * X + x[None, :]
            passed = tl.load(passes + place, mask=seen, other=1.0)
            added, untouched = _since(p, passed, tl.load(sums + place, mask=seen, other=0.0))
            after = added + tl.where(untouched, after, 0.0)

    row = before * C + tl.arange(0, C)
    live = (row < length)[:, None] & in_x[None, :]
    at = (start + (length - 1 - row))[:, None] * X + x[None, :]
    now = tl.load(maxima + at, mask=live, other=0.0)
    own = tl.load(i + at, mask=live, other=0.0).to(tl.float64)
    has_past = (row < length - 1)[:, None]
    past = tl.load(maxima + at - X, mask=live & has_past, other=0.0)
    past = tl.where(has_past, past, tl.maximum(first, least)[None, :])
    bf = _log_decay(f, at, live, x, X, FIXED)
    a = tl.zeros([C, BX], tl.float64)
    if dm is not None:
        a += tl.load(dm + at, mask=live, other=0.0)
    # the first row of all takes what comes from the end
    through, a = tl.associative_scan((_passed(i, maxima, at, live, row, X), a), 0, _then)
    a += through * after[None, :]
    stays = own >= now
    change = tl.where(stays, 0.0, a)
    direct = tl.zeros([C, BX], tl.float64)
    if dg is not None:
        direct += tl.where(past <= LEAST / 2, 0.0, tl.load(dg + at, mask=live, other=0.0))
    bdi = tl.where(stays, a, 0.0)
    if dj is not None:
        bdi += tl.load(dj + at, mask=live, other=0.0)
    tl.store(df + at, _rounded(direct + tl.where(bf >= STEEPEST, change, 0.0), df), mask=live)
    tl.store(di + at, _rounded(bdi, di), mask=live)
    if dstart is not None:
        to_first = direct + change
        if dbefore is not None:
            to_first += tl.load(dbefore + at, mask=live, other=0.0)
        to_start += tl.sum(tl.where((row == length - 1)[:, None], to_first, 0.0), 0)
        begins = in_x & (before == tl.maximum(tl.cdiv(length, C) - 1, 0))
        tl.store(dstart + of_row, _rounded(tl.where(first >= LEAST, to_start, 0.0), dstart), mask=begins)


@triton.jit(do_not_specialize=["N", "T"])
def sum_gates(
    g, weight, cu,
    sums, weights,
    N, T,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Running sums of the gates of heads in every chunk, log2 [chunks, H, 2, C]: of a token and those before it, and,
    with tokens numbered from the end, of those after it."""
    _, start, length, slot, chunk, h = _piece(cu, N, T, H, C, BH)
    r = tl.arange(0, C)
    live = (chunk * C + r < length)[:, None] & (h < H)[None, :]
    here = (h < H)[None, :] & (chunk * C < length)
    of_token = (start + chunk * C) * H + (h[None, :] + H * r[:, None])
    of_head = (slot + chunk) * H + h[None, :]
    if sums is not None:
        bg = tl.load(g + of_token, mask=live, other=0.0)
        bg = tl.maximum(bg.to(sums.dtype.element_ty), ZERO) * LOG2E
        G, GL = tl.cumsum(bg, 0), tl.sum(bg, 0)
        at = sums + of_head * (2 * C)
        tl.store(at + r[:, None], G, mask=here)
        tl.store(at + (2 * C - 1 - r)[:, None], GL[None, :] - G, mask=here)
    if weights is not None:
        bw = tl.load(weight + of_token, mask=live, other=0.0)
        tl.store(weights + of_head * C + r[:, None], bw, mask=here)


@triton.jit
def _head_gates(g, sums, chunk, m, h, r, H: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, SUM: tl.constexpr):
    """Running sum of a head's gates over the ``m`` tokens of a chunk, and its end."""
    if DECAY == TOKEN_HEAD:
        return _sums_of(sums, chunk, h, r, H, C, False)
    elif DECAY == HEAD:
        fixed = tl.maximum(tl.load(g + h).to(SUM), ZERO) * LOG2E
        return fixed * tl.minimum(r + 1, m), fixed * m
    else:
        return tl.zeros([C], SUM), (m * 0).to(SUM)


@triton.jit(do_not_specialize=["N", "T"])
def keys_alone(
    k, weight, g, sums, cu,
    alone, total,
    N, T,
    H: tl.constexpr, HX: tl.constexpr, K: tl.constexpr, KX: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Of every chunk of a head alone: the sum of its weighted keys at its end [chunks, H, K], and of its gates."""
    SUM: tl.constexpr = tl.float64 if k.dtype.element_ty == tl.float32 else tl.float32
    _, start, length, slot, chunk, _ = _piece(cu, N, T, H, C, 1)
    h = tl.program_id(0) % H
    row, c = chunk * C + tl.arange(0, C), tl.arange(0, KX)
    live = row < length
    at = (start + row) * H + h
    of_k = k + ((start + row) * HX + h // (H // HX))[:, None] * K + c[None, :]
    bk = tl.load(of_k, mask=live[:, None] & (c < K)[None, :], other=0.0).to(tl.float32)  # under way during what follows
    m = tl.minimum(length - chunk * C, C)
    G, GL = _head_gates(g, sums, slot + chunk, m, h, tl.arange(0, C), H, C, DECAY, SUM)
    kept = tl.where(live, tl.exp2((GL - G).to(tl.float32)), 0.0)
    if weight is not None:
        kept = kept * tl.load(weight + at, mask=live, other=0.0)
    to = (slot + chunk) * H + h
    tl.store(alone + to * K + c, tl.sum(bk * kept[:, None], 0), mask=c < K)
    tl.store(total + to, GL.to(tl.float32))


@triton.jit(do_not_specialize=["T"])
def keys_before(
    alone, total, z, cu,
    before, last,
    T,
    H: tl.constexpr, K: tl.constexpr, KX: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sum of keys before every chunk of a head, from what :func:`keys_alone` wrote, and behind all of them."""
    pid = tl.program_id(0)
    n, h = pid // H, pid % H
    start, length = _bounds(cu, n, T, T, 1)
    slot = _slot(cu, n, start, tl.maximum(T, 1), T, 1, C)
    chunks = tl.cdiv(length, C)
    p, c = tl.arange(0, 16), tl.arange(0, KX)
    in_k = c < K
    Z = tl.zeros([KX], tl.float32)
    if z is not None:
        Z = tl.load(z + pid.to(tl.int64) * K + c, mask=in_k, other=0.0)
    tl.store(before + (slot * H + h) * K + c, Z, mask=in_k & (chunks > 0))
    for first in range(0, chunks, 16):
        here = (first + p < chunks)[:, None] & in_k[None, :]
        of_chunk = (slot + first + p) * H + h
        at = of_chunk[:, None] * K + c[None, :]
        decay = tl.exp2(tl.load(total + of_chunk, mask=first + p < chunks, other=0.0))
        decay = tl.broadcast_to(decay[:, None], [16, KX])
        through, sums = tl.associative_scan((decay, tl.load(alone + at, mask=here, other=0.0)), 0, _then)
        sums += through * Z[None, :]
        tl.store(before + at + H * K, sums, mask=here & (first + p + 1 < chunks)[:, None])
        Z = tl.sum(tl.where((p == tl.minimum(chunks - first, 16) - 1)[:, None], sums, 0.0), 0)
    tl.store(last + pid.to(tl.int64) * K + c, Z, mask=in_k)


@triton.jit(do_not_specialize=["scale", "N", "T"])
def keys_read(
    q, g, sums, cu, before,
    qz,
    scale, N, T,
    H: tl.constexpr, HX: tl.constexpr, K: tl.constexpr, KX: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Of scale q . Z, Z the sum of weighted keys up to a token, what the keys of chunks before bring [chunks, H, C]."""
    SUM: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float32 else tl.float32
    _, start, length, slot, chunk, _ = _piece(cu, N, T, H, C, 1)
    h = tl.program_id(0) % H
    r, c = tl.arange(0, C), tl.arange(0, KX)
    row, m = chunk * C + r, tl.minimum(length - chunk * C, C)
    of_q = q + ((start + row) * HX + h // (H // HX))[:, None] * K + c[None, :]
    bq = tl.load(of_q, mask=(r < m)[:, None] & (c < K)[None, :], other=0.0)
    of_chunk = (slot + chunk) * H + h
    Z = tl.load(before + of_chunk * K + c, mask=(c < K) & (m > 0), other=0.0)
    G, _ = _head_gates(g, sums, slot + chunk, m, h, r, H, C, DECAY, SUM)
    tl.store(qz + of_chunk * C + r, tl.sum(bq.to(tl.float32) * Z[None, :], 1) * tl.exp2(G.to(tl.float32)) * scale)


@triton.jit
def _loaded_gates(g, at, live, h, DECAY: tl.constexpr):
    """A head's gates as they lie in memory: a row of them, the one of all tokens, or nothing."""
    if DECAY == TOKEN_HEAD:
        return tl.load(g + at, mask=live, other=0.0)
    elif DECAY == HEAD:
        return tl.load(g + h)
    else:
        return h


@triton.jit
def _sum_of_gates(bg, live, C: tl.constexpr, DECAY: tl.constexpr, SUM: tl.constexpr):
    """Their running sum over the rows of a chunk, and its end."""
    if DECAY == TOKEN_HEAD:
        bg = tl.maximum(bg.to(SUM), ZERO) * LOG2E
    elif DECAY == HEAD:
        bg = tl.where(live, tl.maximum(bg.to(SUM), ZERO) * LOG2E, 0.0)
    else:
        bg = tl.zeros([C], SUM)
    return tl.cumsum(bg, 0), tl.sum(bg, 0)


@triton.jit
def _of_head(
    g, weight, none, first, h, m, r,
    H: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """A head's gates in a chunk of ``m`` tokens, and its weights."""
    at, bw = (first * H + h) + H * r, none
    if weight is not None:
        bw = tl.load(weight + at, mask=r < m, other=0.0).to(tl.float32)
    return _loaded_gates(g, at, r < m, h, DECAY), bw


@triton.jit(do_not_specialize=["scale", "N", "T"])
def shared(
    x, y, z, mate, g, weight, states, cu,
    out, moved,
    scale, N, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries (keys: REVERSE) that H / G heads share, summed over them, in one chunk of C tokens.

    states [chunks, H, K, V]: S before each chunk, or their gradients behind it. With E the gates from or to the chunk's
    end, and x, y, z as in the sweep of the same gradient::

        out_i = sum_j (sum_h x_i . y_j W_ij) z_j + sum_h E S x_i

    moved [B, T, H]: what a head adds to out . mate, without the weight of a key.
    """
    HALF: tl.constexpr = z.dtype.element_ty == tl.bfloat16
    DOT: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    SUM: tl.constexpr = tl.float64 if z.dtype.element_ty == tl.float32 else tl.float32
    R: tl.constexpr = H // G
    _, start, length, slot, chunk, _ = _piece(cu, N, T, G, C, 1)
    group = tl.program_id(0) % G
    r, ck, cv = tl.arange(0, C), tl.arange(0, KX), tl.arange(0, VX)
    first, place, m = start + chunk * C, slot + chunk, tl.minimum(length - chunk * C, C)
    live = r < m
    # 64-bit offsets for the chunk, 32-bit ones within it
    in_v, in_state = (H * V) * r[:, None] + cv[None, :], ck[:, None] * V + cv[None, :]
    here, there = live[:, None] & (cv < V)[None, :], (ck < K)[:, None] & (cv < V)[None, :] & (m > 0)

    at_k = (first * G + group) * K + ((G * K) * r[:, None] + ck[None, :])
    in_k = live[:, None] & (ck < K)[None, :]
    low = r[:, None] <= r[None, :] if REVERSE else r[:, None] >= r[None, :]
    if moved is not None:
        bm = tl.load(mate + at_k, mask=in_k, other=0.0).to(DOT)
        bz = tl.load(z + at_k, mask=in_k, other=0.0).to(DOT)
        pairs = tl.dot(bm, tl.trans(bz), input_precision=PRECISION)

    P, acc = tl.zeros([C, C], tl.float32), tl.zeros([C, KX], tl.float32)
    ahead = _of_head(g, weight, scale, first, group * R, m, r, H, DECAY)  # so that no head waits for them
    for i in range(0, R):
        h = group * R + i
        of_v = (first * H + h) * V
        bx = tl.load(x + of_v + in_v, mask=here, other=0.0).to(DOT)
        by = tl.load(y + of_v + in_v, mask=here, other=0.0).to(DOT)
        S = tl.load(states + (place * H + h) * (K * V) + in_state, mask=there, other=0.0).to(DOT)
        bg, w = ahead
        ahead = _of_head(g, weight, scale, first, tl.minimum(h + 1, H - 1), m, r, H, DECAY)
        gates, GL = _sum_of_gates(bg, live, C, DECAY, SUM)
        E = tl.exp2((GL - gates if REVERSE else gates).to(tl.float32))
        if moved is not None:
            along = tl.sum(tl.dot(bm, S, input_precision=PRECISION) * bx, 1) * E
        if weight is not None and REVERSE:
            E = E * w
        acc = tl.dot((bx * E[:, None]).to(DOT), tl.trans(S), acc, input_precision=PRECISION)
        M = tl.dot(bx, tl.trans(by), input_precision=PRECISION)
        over = gates[None, :] - gates[:, None] if REVERSE else gates[:, None] - gates[None, :]
        M = tl.where(low, M * tl.exp2(tl.minimum(over, 0.0).to(tl.float32)), 0.0)
        if weight is not None and not REVERSE:
            M = M * w[None, :]
        if moved is not None:
            tl.store(moved + (first * H + h) + H * r, (along + tl.sum(M * pairs, 1)) * scale, mask=live)
        if weight is not None and REVERSE:
            M = M * w[:, None]
        P += M
    acc = tl.dot(P.to(DOT), tl.load(z + at_k, mask=in_k, other=0.0).to(DOT), acc, input_precision=PRECISION)
    tl.store(out + at_k, (acc * scale).to(out.dtype.element_ty), mask=in_k)
