"""Feature maps φ of linear attention: what stands for softmax's e^{q·k} as a product φ(q)·φ(k).

A map is a function of the last axis, which may change its size, or a :class:`FeatureMap` where queries and keys are
mapped apart, positions count or weights are learnt. :func:`create` makes one by name. All but "identity" and "product"
give weights φ(q)·φ(k) ≥ 0 (cosFormer while |i − j| < M): a normalised output is then a mean of values.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn._checks import fail, has_values, one_of
from linattn.layers.linear import einsum
from linattn.layers.norms import promote

_PEAK = 40.0  # where FAVOR+ puts the largest exponent of a query: far above the smallest denominator, far from overflow
_TOP = 40.0  # the largest exponent of a key: reached where (ω·k/‖k‖)² > 80


class FeatureMap(nn.Module, ABC):
    """A map of queries and keys together: q, k [B, T, G, K] -> φ(q), φ(k) [B, T, G, F], in their dtype or float32.

    ``position``, int64 [1 or B, T], numbers each sequence's tokens; only maps that are ``positional`` look at it.
    ``normalized``: outputs will be divided by their sum of weights, so that a factor of a query's own cancels.
    ``heads`` and ``size`` are the G and K that it is made for, None where any will do.
    """

    positional = False
    heads: int | None = None
    size: int | None = None

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, position: Tensor | None = None, *, normalized: bool = True
    ) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k)."""


AnyMap = FeatureMap | Callable[[Tensor], Tensor]


class Favor(FeatureMap):
    """FAVOR+ (Performer): φ(x) = e^{ω_jᵀx' − ‖x'‖²/2} / √m, j = 1 … m, x' = x/K^{1/4}; φ(q)·φ(k) estimates e^{q·k/√K}.

    The estimate is unbiased, its variance falls as 1/m. The ω are normal vectors made orthogonal in blocks of K, of the
    lengths of independent ones, and lie in the buffer ``omega`` [m, K]; :meth:`redraw` takes new ones. Computed in
    float32. A query's exponents are shifted by a constant of its own, which the normaliser cancels (without one there
    is no shift); keys are shifted by nothing that depends on other tokens, so causality and continuation are exact.
    Their exponents cannot pass ‖ω‖²/2 and are held below 40. Weights that are all below e^-50 of a query's largest
    feature count as nothing.

    torch.compile(fullgraph=True) wants it made outside: a module, not the name, for the function.

    Args:
        heads: not used, the ω serve every head.
        size: K.
        features: m; None is 2K.
        seed: of the ω.

    Source: Choromanski et al., "Rethinking Attention with Performers", arXiv 2009.14794.
    """

    omega: Tensor

    def __init__(self, heads: int, size: int, *, features: int | None = None, seed: int = 0) -> None:
        super().__init__()
        features = 2 * size if features is None else features
        if features < 1:
            raise fail("features", features, "at least 1")
        self.size = size
        omega = orthogonal_normal(features, size, seed)
        self.register_buffer("omega", omega.to(torch.get_default_device(), torch.get_default_dtype(), copy=True))

    def redraw(self, seed: int) -> None:
        """Take the ω that ``seed`` draws, as the paper does now and then in training. Earlier states then don't fit."""
        self.omega.copy_(orthogonal_normal(*self.omega.shape, seed))

    def forward(
        self, q: Tensor, k: Tensor, position: Tensor | None = None, *, normalized: bool = True
    ) -> tuple[Tensor, Tensor]:
        a, b = self._exponents(q), self._exponents(k)
        a = a - a.detach().amax(-1, keepdim=True) + _PEAK if normalized else a.clamp(max=_TOP)
        return tuple(x.exp() * len(self.omega) ** -0.5 for x in (a, b.clamp(max=_TOP)))

    def _exponents(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = promote(x) * x.shape[-1] ** -0.25
            return x @ self.omega.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


@functools.lru_cache(maxsize=64)
def orthogonal_normal(rows: int, size: int, seed: int) -> Tensor:
    """float64 [rows, size]: each row normal with unit variance, the rows of each block of ``size`` orthogonal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    blocks = []
    for _ in range(math.ceil(rows / size)):
        q, r = torch.linalg.qr(normal(size, size))
        blocks.append((q * r.diagonal().sign()).T)  # the signs make the rotation uniform
    return torch.cat(blocks)[:rows] * normal(rows, size).norm(dim=1, keepdim=True)


class CosFormer(FeatureMap):
    """cosFormer: φ(x_i) = [relu(x) cos(πi/2M), relu(x) sin(πi/2M)]; weights relu(q_i)·relu(k_j) cos(π(i−j)/2M).

    Raises ValueError for a position ≥ M = ``max_length``; where that can't be looked at (on a GPU, in a compiled graph)
    the features of such a token are NaN. Source: Qin et al., "cosFormer", arXiv 2202.08791.
    """

    positional = True

    def __init__(self, heads: int, size: int, *, max_length: int = 65536) -> None:
        super().__init__()
        if max_length < 1:
            raise fail("max_length", max_length, "at least 1")
        self.max_length = max_length

    def forward(
        self, q: Tensor, k: Tensor, position: Tensor | None = None, *, normalized: bool = True
    ) -> tuple[Tensor, Tensor]:
        if position is None:
            raise fail("position", "none", "the number of each token, [B, T]")
        if position.device.type == "cpu" and not torch.compiler.is_compiling() and has_values(position):
            last = int(position.max())
            if last >= self.max_length:
                raise fail("position", last, f"below max_length={self.max_length}")
        wide = torch.promote_types(q.dtype, torch.float32)
        angle = position.to(wide) * (math.pi / (2 * self.max_length))
        angle = angle.masked_fill(position >= self.max_length, math.nan)[..., None, None]
        turns = angle.cos(), angle.sin()
        return tuple(  # type: ignore[return-value]
            torch.cat([F.relu(x) * turn for turn in turns], -1) for x in (q, k)
        )


def pairs(x: Tensor) -> Tensor:
    """[..., d] -> [..., d(d+1)/2]: x_i² and √2 x_i x_j, i < j, so that pairs(q)·pairs(k) = (q·k)².

    Near q·k = 0 the sum cancels, so that it is off by the rounding of ‖q‖²‖k‖², as a product q·k is by that of ‖q‖‖k‖.
    """
    size = x.shape[-1]
    i, j = torch.triu_indices(size, size, device=x.device)
    weight = x.new_ones(i.shape).masked_fill(i != j, math.sqrt(2))
    return x[..., i] * x[..., j] * weight


def taylor(x: Tensor) -> Tensor:
    """φ(q)·φ(k) = 1 + y + y²/2 with y = q·k/√d, never below ½; 1 + d + d(d+1)/2 features.

    The exponential's Taylor polynomial of degree 2. Source: Arora et al., "Based", arXiv 2402.18668.
    """
    x = promote(x) * x.shape[-1] ** -0.25
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs(x) * math.sqrt(0.5)], -1)


def dpfp(x: Tensor, *, nu: int = 3) -> Tensor:
    """φ_{ij}(x) = r_i r_{i+j}, r = [relu(x), relu(−x)] in a circle, j = 1 … nu; 2d·nu features.

    Deterministic, parameter-free and sparse: few keys share a feature. Source: Schlag et al., "Linear Transformers Are
    Secretly Fast Weight Programmers", arXiv 2102.11174.
    """
    if nu < 1:
        raise fail("nu", nu, "at least 1")
    r = torch.cat([F.relu(x), F.relu(-x)], -1)
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


class _Learnt(FeatureMap):
    """One map for queries and one for keys, each with weights of its own for every head (on the first two axes)."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size

    def forward(
        self, q: Tensor, k: Tensor, position: Tensor | None = None, *, normalized: bool = True
    ) -> tuple[Tensor, Tensor]:
        return self._map(q, 0), self._map(k, 1)

    @abstractmethod
    def _map(self, x: Tensor, side: int) -> Tensor:
        """φ of queries (side 0) or keys (1)."""


class Rebased(_Learnt):
    """ReBased: φ(q)·φ(k) = (q'·k')²/d, x' = γ ⊙ LayerNorm(x) + β; d(d+1)/2 features, starts from γ = 1, β = 0.

    Based's polynomial with a learnt place of its zero. Source: Aksenov et al., "Linear Transformers with Learnable
    Kernel Functions are Better In-Context Models", arXiv 2402.10644.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__(heads, size)
        self.gamma = nn.Parameter(torch.ones(2, heads, size))
        self.beta = nn.Parameter(torch.zeros(2, heads, size))

    def _map(self, x: Tensor, side: int) -> Tensor:
        y = F.layer_norm(promote(x), x.shape[-1:])
        return pairs(y * self.gamma[side] + self.beta[side]) * x.shape[-1] ** -0.5


class T2R(_Learnt):
    """T2R: φ(x) = relu(W x + b), ``features`` of them (None is d), initialised as ``nn.Linear``.

    Source: Kasai et al., "Finetuning Pretrained Transformers into RNNs", arXiv 2103.13076.
    """

    def __init__(self, heads: int, size: int, *, features: int | None = None) -> None:
        super().__init__(heads, size)
        features = size if features is None else features
        if features < 1:
            raise fail("features", features, "at least 1")
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(2, heads, size, features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, heads, features).uniform_(-bound, bound))

    def _map(self, x: Tensor, side: int) -> Tensor:
        return F.relu(einsum("btgk,gkf->btgf", x, self.weight[side]) + self.bias[side])


class Product(_Learnt):
    """φ(x) = (W x + b) ⊙ (U x + c), d features, initialised as ``nn.Linear``, as in flash-linear-attention's models.

    Weights of either sign, so for outputs that are not divided by their sum.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__(heads, size)
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(2, heads, size, 2 * size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, heads, 2 * size).uniform_(-bound, bound))

    def _map(self, x: Tensor, side: int) -> Tensor:
        a, b = (einsum("btgk,gkf->btgf", x, self.weight[side]) + self.bias[side]).chunk(2, dim=-1)
        return a * b


class Hedgehog(_Learnt):
    """Hedgehog: φ(x) = [softmax(W x), softmax(−W x)], 2d features, starts from W = 1.

    Source: Zhang et al., "The Hedgehog & the Porcupine", arXiv 2402.04347.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__(heads, size)
        self.weight = nn.Parameter(torch.eye(size).repeat(2, heads, 1, 1))

    def _map(self, x: Tensor, side: int) -> Tensor:
        # promoted, as small weights' gradients pass float16's range
        y = promote(einsum("btgk,gkf->btgf", x, self.weight[side]))
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "identity": lambda x: x,
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "taylor": taylor,
    "dpfp": dpfp,
}
MODULES: dict[str, type[FeatureMap]] = {
    "favor": Favor,
    "cosformer": CosFormer,
    "rebased": Rebased,
    "t2r": T2R,
    "product": Product,
    "hedgehog": Hedgehog,
}
NAMES = (*FUNCTIONS, *MODULES)


def create(name: str, heads: int, size: int, **options: Any) -> AnyMap:
    """The map of that name (one of ``NAMES``) for heads of K = ``size`` channels, with weights of its own if it learns.

    Options: favor features, seed; cosformer max_length; t2r features; dpfp nu. Raises ValueError naming what does not
    fit.
    """
    one_of("feature_map", name, NAMES)
    maker: Callable[..., Any] = MODULES[name] if name in MODULES else FUNCTIONS[name]
    if options:
        known = [p.name for p in inspect.signature(maker).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for option in options:
            if option not in known:
                wanted = f"an option of {name!r}: {', '.join(known) or 'it has none'}"
                raise fail("feature_map_options", repr(option), wanted)
    if name in MODULES:
        return MODULES[name](heads, size, **options)
    return functools.partial(FUNCTIONS[name], **options) if options else FUNCTIONS[name]


def apply(
    phi: AnyMap, q: Tensor, k: Tensor, position: Tensor | None = None, *, normalized: bool = True
) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) by either kind of map."""
    if isinstance(phi, FeatureMap):
        for what, made, given in (("heads", phi.heads, q.shape[2]), ("channels", phi.size, q.shape[3])):
            if made not in (None, given):
                raise fail("feature_map", f"one made for {made} {what}", f"one for the {given} of q and k")
        return phi(q, k, position, normalized=normalized)
    return phi(q), phi(k)
