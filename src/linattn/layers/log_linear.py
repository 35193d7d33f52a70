"""Log-linear attention: a host recurrence whose past lies in O(log T) states instead of one.

Token t sees the tokens before it in buckets, a Fenwick tree over absolute positions: token s is of level 0 if s = t and
else of the level of the highest bit in which t and s differ, ℓ = bit_length(t xor s), so bucket ℓ ≥ 1 holds 2^{ℓ-1}
tokens where it holds any. Each bucket's state is the host's recurrence with writes from its own tokens alone, on which
the decay and the erasure of every later token act, and it is read with a weight of its own:

    o_t = scale * Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)T} q_t

The last of L levels takes all that is older than the tree: ℓ = min(bit_length(t xor s), L-1). With all λ = 1 it is
the host, for the buckets sum to its state.

It runs on the host's engine, for the recurrence is linear in the values:

- Inside chunks of 2^c tokens, the engine with the values of the identity gives how much each token reads of each; λ
  weighs it. This serves the levels up to c.
- Of two neighbouring blocks of 2^ℓ tokens, ℓ ≥ c, the second starts from what the first wrote, writes nothing (v = 0,
  yet it decays and erases) and is read. This is level ℓ+1; with what the second writes by itself, what is left is what
  a block of 2^{ℓ+1} tokens wrote.
- The buckets of an initial state are as many heads more, whose tokens write nothing.

Source: Guo et al., "Log-Linear Attention", arXiv 2506.04761.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.backends._protocol import state_dtype
from linattn.layers.linear import Linear
from linattn.layers.mixer import mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.sequences import left_justify, positions, sequence_of_token
from linattn.recurrence import Argument, Domain, Recurrence

CHUNK = 64  # tokens whose mutual weights are written out
WIDTH = 8192  # tokens times buckets of an initial state that one call reads

LEVEL_WEIGHTS = Argument(
    "lam", "B T H L", Domain.NONNEGATIVE, "weight λ of each level of the past, the token itself first"
)


class LogLinearState(NamedTuple):
    """``buckets`` [N, H, L-1, K, V] and the tokens read by each sequence, ``position`` [N] int64.

    Bucket b is zero unless bit b of the position is set; the last one holds all that is older than the others. A token
    adds 1 to a binary counter: the buckets that its carry runs through become one.
    """

    buckets: Tensor
    position: Tensor


class _Inputs(NamedTuple):
    """What the host reads, and the weights λ: a batch, or all its tokens in one row, without a batch axis."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    weights: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> _Inputs:
        """The same function of each tensor."""
        return _Inputs(*(None if x is None else function(x) for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Places:
    """Where the tokens of N sequences are in a row of n.

    position, sequence [n]: of each token. before, after, start, end [N]: the positions of a sequence's first token
    and of the one to come; the place in ``order`` of its first token, and the end of its part of the row. order [n]:
    places of tokens such that the real ones of a sequence follow each other. longest: a bound of the lengths. packed:
    whether they share it. fresh: whether all begin at position 0.
    """

    position: Tensor
    sequence: Tensor
    before: Tensor
    after: Tensor
    start: Tensor
    end: Tensor
    order: Tensor
    longest: int
    packed: bool
    fresh: bool

    @staticmethod
    def of(x: Tensor, offset: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None) -> _Places:
        """The tokens of x [B, T, ...], after ``offset`` [N] others."""
        B, T = x.shape[:2]
        position, after = positions(x, offset, mask, cu_seqlens)
        before = torch.zeros_like(after) if offset is None else offset
        order = torch.arange(B * T, device=x.device)
        if cu_seqlens is not None:
            sequence, start, end = sequence_of_token(cu_seqlens, T), cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        else:
            sequence, end = order // T, (torch.arange(B, device=x.device) + 1) * T
            start = end - (after - before)
            if mask is not None:
                order = (left_justify(mask)[0] + (end - T)[:, None]).flatten()
        return _Places(
            position.expand(B, T).flatten(), sequence, before, after, start, end, order,
            T, cu_seqlens is not None, offset is None,
        )  # fmt: skip

    def find(self, sequence: Tensor, position: Tensor) -> Tensor:
        """The place of the token at a position of a sequence; beyond its last, the end of its part of the row."""
        place = self.start[sequence] + position - self.before[sequence]
        there = self.order[place.clamp(0, len(self.order) - 1)]
        return torch.where(position < self.after[sequence], there, self.end[sequence])


class _Blocks(NamedTuple):
    """The aligned blocks of 2^level tokens that sequences touch, one after the other in M slots.

    sequence, number [M]: whose a block is, and its number in the sequence; slots to spare are blocks without tokens.
    first, last [N]: the slots of a sequence; each has one at least.
    """

    level: int
    sequence: Tensor
    number: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(x: _Places, level: int) -> _Blocks:
        """Their number is bounded without a look at the data."""
        N, size = len(x.before), 1 << level
        begin = x.before >> level
        count = (torch.maximum(x.after - 1, x.before) >> level) - begin + 1
        if x.packed:
            slots = x.longest // size + (1 if x.fresh else 2) * N
        else:
            slots = N * (-(-x.longest // size) if x.fresh else (x.longest + size - 2) // size + 1)
        ends = count.cumsum(0)
        slot = torch.arange(slots, device=begin.device)
        sequence = torch.searchsorted(ends, slot, right=True).clamp(max=N - 1)
        return _Blocks(level, sequence, begin[sequence] + slot - (ends - count)[sequence], ends - count, ends - 1)

    def of_tokens(self, x: _Places) -> Tensor:
        """[n]: the slot of each token's block."""
        return self.first[x.sequence] + (x.position >> self.level) - (x.before[x.sequence] >> self.level)

    def boundaries(self, x: _Places) -> Tensor:
        """[M+1]: the blocks as packed sequences of the row."""
        position = torch.maximum(self.number << self.level, x.before[self.sequence])
        places = F.pad(x.find(self.sequence, position), (0, 1), value=len(x.order))
        return torch.where(torch.arange(len(places), device=places.device) > 0, places, 0)


class _Product(torch.autograd.Function):
    """a @ b in their own dtype, whatever autocast says, also of the gradients; the same batch axes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast(a.device.type, enabled=False):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        with torch.autocast(a.device.type, enabled=False):
            return grads[0] @ b.mT, a.mT @ grads[0]


def _product(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = _Product.apply(a, b)
    return product


def _bit_length(x: Tensor, levels: int) -> Tensor:
    """At most levels - 1."""
    return (x.unsqueeze(-1) >> torch.arange(levels - 1, device=x.device)).gt(0).sum(-1)


def _where(condition: Tensor, x: Tensor, other: Tensor | float = 0.0) -> Tensor:
    """torch.where with a condition on the first axes."""
    return torch.where(condition.view(*condition.shape, *[1] * (x.dim() - condition.dim())), x, other)


def _at(weights: Tensor, level: Tensor) -> Tensor:
    """λ [.., H, L] at levels [.., W]: [.., H, W]."""
    return weights.gather(-1, level.unsqueeze(-2).expand(*weights.shape[:-1], -1))


Run = Callable[..., tuple[Tensor, Any]]


def _gather(row: _Inputs, x: _Places, sequence: Tensor, position: Tensor) -> tuple[_Inputs, Tensor]:
    """The tokens at ``position`` [M, s] of sequences [M], zero where there is none; and where there is one."""
    real = (position >= x.before[sequence, None]) & (position < x.after[sequence, None])
    place = x.find(sequence[:, None].expand_as(position), position).clamp(max=len(x.order) - 1)
    shape = position.shape
    return row.map(lambda t: _where(real, t.index_select(0, place.flatten()).view(*shape, *t.shape[1:]))), real


def _in_chunks(run: Run, row: _Inputs, x: _Places, level: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels up to ``level``, inside chunks of 2^level tokens.

    Returns o [n, H, V], what each chunk wrote [M, H, K, V] and, of the last of each sequence, what is in which bucket
    [N, H, L-1, K, V].
    """
    blocks, size = _Blocks.of(x, level), 1 << level
    local = torch.arange(size, device=row.v.device)
    position = (blocks.number << level)[:, None] + local
    (q, k, v, g, beta, weights), real = _gather(row, x, blocks.sequence, position)
    unit = torch.eye(size, dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], size)
    reads, writes = run(q, k, unit, g=g, beta=beta)  # [M, size, H, size], [M, H, K, size]
    distance = _bit_length(local[:, None] ^ local, levels)
    values = v.transpose(1, 2)
    o = _product((reads * _at(weights, distance.expand(len(v), -1, -1))).transpose(1, 2), values).transpose(1, 2)
    o = o.flatten(0, 1).index_select(0, (blocks.of_tokens(x) << level) + (x.position & (size - 1)))
    last = blocks.last
    seen = _bit_length(x.after[:, None] ^ position[last], levels)
    held = (seen[..., None] == torch.arange(1, levels, device=v.device)) & real[last, :, None]  # [N, size, L-1]
    parts = _where(held[:, None], values.index_select(0, last).unsqueeze(3)).flatten(3)
    buckets = _product(writes.index_select(0, last), parts).unflatten(3, (levels - 1, -1)).transpose(2, 3)
    return o, _product(writes, values), buckets


def _fresh(run: Run, row: _Inputs, x: _Places, levels: int) -> tuple[Tensor, Tensor]:
    """What tokens read of each other, o [n, H, V], and the buckets that they leave."""
    top = (x.longest - 1).bit_length()
    mean = len(x.order) // len(x.before)
    low = min((max(mean, 1) - 1).bit_length(), CHUNK.bit_length() - 1)
    o, wrote, buckets = _in_chunks(run, row, x, low, levels)
    # Above the top, where a sequence touches two blocks at most, one call serves all levels.
    for level in range(low, top if x.fresh or x.longest == 1 else top + 1):
        blocks = _Blocks.of(x, level)
        later = blocks.number > (x.before >> level)[blocks.sequence]
        reads = later & (blocks.number << level < x.after[blocks.sequence])
        if level < top:
            reads = reads & (blocks.number & 1 == 1)
        enters = _where(reads, torch.cat([wrote[:1], wrote[:-1]]))
        read, left = (_read_packed if x.packed else _read_batch)(run, row, x, blocks, reads, enters)
        there = x.position - (1 << level)  # in the block before
        o = o + _at(row.weights, _bit_length(x.position ^ there, levels)[:, None]) * read
        seen = _bit_length(x.after ^ ((blocks.number[blocks.last] - 1) << level), levels)
        held = (seen[:, None] == torch.arange(1, levels, device=o.device)) & reads[blocks.last, None]
        buckets = buckets + _where(held[:, None], left.index_select(0, blocks.last).unsqueeze(2))
        wrote = _pairs(x, blocks, wrote, left)
    return o, buckets


def _read_packed(
    run: Run, row: _Inputs, x: _Places, blocks: _Blocks, reads: Tensor, enters: Tensor
) -> tuple[Tensor, Tensor]:
    """What tokens read of the states that enter their blocks, [n, H, V], and what the blocks leave of them.

    The blocks that do not read start from zero: of packed sequences nothing is known that would leave them out.
    """
    q, k, v, g, beta, _ = row.map(lambda t: t[None])
    silent = v.new_zeros(()).expand(v.shape)
    o, left = run(q, k, silent, g=g, beta=beta, state=enters, cu_seqlens=blocks.boundaries(x))
    return o[0], left


def _read_batch(
    run: Run, row: _Inputs, x: _Places, blocks: _Blocks, reads: Tensor, enters: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of the rows of a batch, for the blocks alone that read: every other one."""
    N, size = len(x.before), 1 << blocks.level
    width, later = min(size, x.longest), -(-x.longest // size) - 1 if x.fresh else (x.longest + size - 2) // size
    some = torch.argsort(reads.byte(), descending=True, stable=True)[: N * -(-later // 2)]
    position = (blocks.number[some] << blocks.level)[:, None] + torch.arange(width, device=some.device)
    (q, k, v, g, beta, _), _ = _gather(row, x, blocks.sequence[some], position)
    silent = v.new_zeros(()).expand(v.shape)
    o, left = run(q, k, silent, g=g, beta=beta, state=enters.index_select(0, some))
    rank = (reads.cumsum(0) - 1).clamp(min=0)
    slot = blocks.of_tokens(x)
    place = rank[slot] * width + (x.position & (size - 1)).clamp(max=width - 1)
    o = _where(reads[slot], o.flatten(0, 1).index_select(0, place))
    return o, _where(reads, left.index_select(0, rank.clamp(max=len(some) - 1)))


def _pairs(x: _Places, blocks: _Blocks, wrote: Tensor, left: Tensor) -> Tensor:
    """What blocks of twice the size wrote: what is left of the first half's writes, and the second half's own."""
    pairs = _Blocks.of(x, blocks.level + 1)
    first = blocks.first[pairs.sequence]
    even = first + 2 * pairs.number - (x.before >> blocks.level)[pairs.sequence]
    whole = even < blocks.last[pairs.sequence]
    even, odd = (slot.clamp(0, len(wrote) - 1) for slot in (even, even + 1))
    both = left.index_select(0, odd) + wrote.index_select(0, odd)
    return _where(whole, both, wrote.index_select(0, even))


def _older(
    run: Run, inputs: _Inputs, x: _Places, buckets: Tensor, cu_seqlens: Tensor | None, levels: int
) -> tuple[Tensor, Tensor]:
    """What tokens read of an initial state, o [n, H, V], and what is left of its buckets, merged."""
    H, V = inputs.v.shape[2:]
    since = _bit_length(x.position ^ x.before[x.sequence], levels)
    weights = inputs.weights.flatten(0, 1)
    bucket = torch.arange(levels - 1, device=buckets.device)
    outputs, parts = [], []
    for group, state in zip(
        *(t.split(max(1, WIDTH // x.longest), d) for t, d in ((bucket, 0), (buckets, 2))), strict=True
    ):
        silent = inputs.v.new_zeros(()).expand(*inputs.v.shape[:2], H * len(group), V)
        g, beta = (t if t is None else t.repeat_interleave(len(group), 2) for t in (inputs.g, inputs.beta))
        read, left = run(inputs.q, inputs.k, silent, g=g, beta=beta, state=state.flatten(1, 2), cu_seqlens=cu_seqlens)
        weight = _at(weights, torch.maximum(since[:, None], group + 1))
        outputs.append((weight.unsqueeze(-1) * read.reshape(*weight.shape, V)).sum(-2))
        parts.append(left.unflatten(1, (H, len(group))))
    o, left = sum(outputs[1:], outputs[0]), torch.cat(parts, 2)
    carry = _bit_length(x.after ^ x.before, levels)[:, None] - 1  # the bucket that the lower ones end in
    merged = _where((bucket == carry)[:, None], left.cumsum(2))
    return o, _where((bucket > carry)[:, None], left, merged)


def log_linear(
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    state: LogLinearState | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, LogLinearState]:
    """Run a host ``recurrence`` log-linearly, in O(T log T).

    q, k: [B, T, G, K]; v: [B, T, H, V], G divides H; one dtype. lam: [B, T, H, L], L ≥ 2. g: [B, T, H], and beta:
    [B, T, H] with a delta write. mask: bool [B, T], True at real tokens; positions count these alone. The rest as in
    :func:`linattn.engine.matrix`.

    Returns o [B, T, H, V] in v's dtype and the state, of as many levels. Raises ValueError naming the argument that
    does not fit.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T H V", sizes)
    _checks.tensor("q", q, "B T G K", sizes, v.dtype)
    _checks.tensor("k", k, "B T G K", sizes, v.dtype)
    _checks.grouped("k", sizes["G"], sizes["H"])
    _checks.tensor("lam", lam, "B T H L", sizes)
    _checks.tensor("g", g, "B T H", sizes)
    if beta is not None:
        _checks.tensor("beta", beta, "B T H", sizes)
    B, T, H, K, V, L = (sizes[axis] for axis in "BTHKVL")
    if L < 2:
        raise _checks.fail("lam", f"{L} levels", "at least 2: the token itself, and what came before it")
    if mask is not None:
        if cu_seqlens is not None:
            raise _checks.fail("mask", "a tensor", "none with cu_seqlens: packed rows have no padding")
        if mask.dtype != torch.bool or mask.shape != v.shape[:2]:
            raise _checks.fail("mask", f"{mask.dtype} {list(mask.shape)}", f"torch.bool {list(v.shape[:2])}")
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, B)
        if not torch.compiler.is_compiling():
            _checks.boundaries(cu_seqlens, T)
    N, dtype = B if cu_seqlens is None else cu_seqlens.shape[0] - 1, state_dtype(v.dtype)
    if state is None:
        buckets = position = None
    else:
        buckets, position = _checked(state, {"N": N, "H": H, "L-1": L - 1, "K": K, "V": V}, dtype)
    tensors = {"v": v, "q": q, "k": k, "lam": lam, "g": g, "beta": beta, "state": buckets, "cu_seqlens": cu_seqlens}
    _checks.same_device(tensors)
    if B * T == 0:
        if buckets is None or position is None:
            buckets = torch.zeros(N, H, L - 1, K, V, dtype=dtype, device=v.device)
            position = torch.zeros(N, dtype=torch.int64, device=v.device)
        return v.clone(), LogLinearState(buckets, position)
    run = functools.partial(
        engine.matrix, recurrence, scale=K**-0.5 if scale is None else scale, mode=mode, backend=backend
    )
    with torch.autocast(v.device.type, enabled=False):
        gates = (mask_gate(g, mask), None if beta is None else mask_gate(beta, mask))
        inputs = _Inputs(q.to(dtype), k.to(dtype), v.to(dtype), *gates, lam.to(dtype))
        places = _Places.of(v, position, mask, cu_seqlens)
        o, parts = _fresh(run, inputs.map(lambda t: t.flatten(0, 1)), places, L)
        if buckets is not None:
            older, left = _older(run, inputs, places, buckets, cu_seqlens, L)
            o, parts = o + older, parts + left
        return o.view(v.shape).to(v.dtype), LogLinearState(parts, places.after)


def _checked(state: object, sizes: dict[str, int], dtype: torch.dtype) -> LogLinearState:
    if not isinstance(state, LogLinearState):
        raise _checks.fail("state", type(state).__name__, "a LogLinearState")
    _checks.tensor("state.buckets", state.buckets, "N H L-1 K V", sizes, dtype)
    if state.position.dtype != torch.int64 or state.position.shape != state.buckets.shape[:1]:
        came = f"{state.position.dtype} {list(state.position.shape)}"
        raise _checks.fail("state.position", came, f"torch.int64 [{sizes['N']}]")
    return state


class LevelWeights(nn.Module):
    """λ = softplus(L · W_l x), the weight of each level of the past for each token and head; L starts at one.

    Raises ValueError for fewer than 2 levels.
    """

    def __init__(self, d_model: int, num_heads: int, levels: int) -> None:
        super().__init__()
        if levels < 2:
            raise _checks.fail("max_levels", levels, "at least 2: the token itself, and what came before it")
        self.l_proj = Linear(d_model, num_heads * levels, bias=False)
        self.L = no_weight_decay(torch.ones(num_heads, levels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, T, H, levels] in float32 (float64 for float64)."""
        return F.softplus(promote(self.L) * promote(self.l_proj(x)).unflatten(-1, self.L.shape))
