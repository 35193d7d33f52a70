"""The contests of single operations: recurrences, forward and backward, a Mamba scan and a Mamba layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linattn import engine
from linattn.benchmark.contest import Contest, Entrant, Opening
from linattn.benchmark.measure import multiplying, relative_error
from linattn.benchmark.peers import fast_transformers_product, transformers_mamba
from linattn.mechanisms.mamba import Mamba
from linattn.recurrence import Decay, Recurrence, Write

KINDS = {
    "no decay": Recurrence(),
    "scalar decay": Recurrence(decay=Decay.TOKEN_HEAD),
    "vector decay": Recurrence(decay=Decay.TOKEN_CHANNEL),
    "delta rule": Recurrence(write=Write.DELTA),
    "gated delta rule": Recurrence(decay=Decay.TOKEN_HEAD, write=Write.DELTA),
    "KDA": Recurrence(decay=Decay.TOKEN_CHANNEL, write=Write.DELTA),
    "RWKV-7": Recurrence(decay=Decay.TOKEN_CHANNEL, write=Write.LOW_RANK),
}
TRAINED = ("no decay", "scalar decay", "vector decay", "gated delta rule")
TARGETS: Mapping[int, Mapping[str, tuple[float, float]]] = {
    64: {"no decay": (4, 20), "scalar decay": (4, 20), "vector decay": (5, 20)},
    128: {"no decay": (3, 12), "scalar decay": (2.5, 12), "vector decay": (4.5, 12)},
}
"""How many times faster the forward is meant to be than chunked torch and than softmax attention, by head size."""
LOW_RANK_TARGET, TRAINING_TARGET = 4.0, 3.0
"""Than chunked torch: the forward of other kinds, forward + backward of any."""
ERROR_TOKENS = 256  # the float64 reference goes token by token

Inputs = dict[str, Tensor]


def recurrences(size: int, *, tokens: int = 4096, heads: int = 8, training: bool = False) -> Iterator[Contest]:
    """Every kind of recurrence at one head size K = V, batch 1, float32: the engine's own choice of a backend."""
    title = f"{'forward + backward' if training else 'forward'}, T={tokens}, {heads} heads of {size}×{size}"
    inputs = cache(lambda length: _inputs(length, heads, size))

    def entrant(run: Callable[..., Tensor], truth: Callable[..., Tensor]) -> Entrant:
        return _entrant(run, truth, inputs(tokens), inputs(min(tokens, ERROR_TOKENS)), training)

    def by(backend: str, recurrence: Recurrence) -> Entrant:
        return entrant(_run(recurrence, backend), _run(recurrence, "reference"))

    def product() -> Entrant:
        return entrant(fast_transformers_product.causal_product(), _run(Recurrence(), "reference"))

    for name in TRAINED if training else KINDS:
        recurrence = KINDS[name]
        peers: dict[str, Opening] = {
            "chunked torch": partial(by, "chunked", recurrence),
            "softmax attention": partial(entrant, _sdpa, _sdpa),
        }
        targets = {"chunked torch": TRAINING_TARGET if training else LOW_RANK_TARGET}
        if not training:
            if name in TARGETS.get(size, {}):
                targets = dict(zip(peers, TARGETS[size][name], strict=True))
            if name == "no decay":
                peers["fast-transformers"], targets["fast-transformers"] = product, 2
            peers["matrix product"] = partial(_as_many, operations(recurrence, tokens, heads, size))
        yield Contest(title, name, partial(by, "auto", recurrence), peers, targets)


def selective(*, tokens: int = 2048, channels: int = 1536, states: int = 16) -> Contest:
    """Mamba's scan beside transformers' loop over the tokens."""
    inputs = cache(lambda length: _selective_inputs(length, channels, states))

    def entrant(run: Callable[..., Tensor]) -> Entrant:
        return _entrant(run, _scan("reference"), inputs(tokens), inputs(min(tokens, ERROR_TOKENS)), False)

    return Contest(
        "Mamba", f"scan, D={channels} N={states} T={tokens}", lambda: entrant(_scan("auto")),
        {"transformers": lambda: entrant(transformers_mamba.selective_scan())}, {"transformers": 50},
    )  # fmt: skip


def layer(*, tokens: int = 512, d_model: int = 768) -> Contest:
    """A training step of one Mamba layer, gradients of its input and weights, beside transformers' with its weights."""

    @cache
    def ours() -> Mamba:
        torch.manual_seed(0)
        return Mamba(d_model)

    def entrant(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> Entrant:
        x = torch.randn(1, tokens, d_model, generator=torch.Generator().manual_seed(1))

        def error() -> float:
            exact = Mamba(d_model).double()
            exact.load_state_dict(ours().state_dict())
            short = x[:, : ERROR_TOKENS // 4]  # transformers' backward grows with their square
            return _worst(
                _gradients(lambda u: run(module, u), {"u": short}, dict(module.named_parameters())),
                _gradients(
                    lambda u: exact(u, backend="reference")[0], {"u": short.double()}, dict(exact.named_parameters())
                ),
            )

        weights = dict(module.named_parameters())
        return Entrant(lambda: _gradients(lambda u: run(module, u), {"u": x}, weights), error=error)

    return Contest(
        "Mamba", f"layer of {d_model}, training step, T={tokens}",
        lambda: entrant(ours(), lambda module, u: module(u)[0]),
        {"transformers": lambda: entrant(transformers_mamba.mixer(ours(), d_model), lambda module, u: module(u))},
        {"transformers": 50},
    )  # fmt: skip


def operations(recurrence: Recurrence, tokens: int, heads: int, size: int) -> float:
    """Multiplications and additions of the plain recurrence: write and read 2KV each, decay KV, a low-rank write 2KV
    for its read, and 2KV where it writes along another key than the values."""
    a_token = 4 + (recurrence.decay is not Decay.NONE) + {Write.DELTA: 2, Write.LOW_RANK: 4}.get(recurrence.write, 0)
    return float(a_token * size * size * heads * tokens)


def _inputs(tokens: int, heads: int, size: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v, gates, erased = (torch.randn(1, tokens, heads, size, generator=generator) for _ in range(5))
    rate = gates[..., :1].sigmoid()
    return {
        "q": q, "k": F.normalize(k, dim=-1), "v": v, "g": F.logsigmoid(gates) / 16, "beta": rate[..., 0],
        "a": -F.normalize(erased, dim=-1), "b": F.normalize(erased, dim=-1) * rate,
    }  # fmt: skip


def _run(recurrence: Recurrence, backend: str) -> Callable[..., Tensor]:
    def run(**x: Tensor) -> Tensor:
        gate = {Decay.NONE: None, Decay.TOKEN_HEAD: x["g"][..., 0], Decay.TOKEN_CHANNEL: x["g"]}[recurrence.decay]
        beta = x["beta"] if recurrence.write is Write.DELTA else None
        a, b = (x["a"], x["b"]) if recurrence.write is Write.LOW_RANK else (None, None)
        return engine.matrix(recurrence, x["q"], x["k"], x["v"], g=gate, beta=beta, a=a, b=b, backend=backend)[0]

    return run


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _selective_inputs(tokens: int, channels: int, states: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x, dt = (torch.randn(1, tokens, channels, generator=generator) for _ in range(2))
    B, C = (torch.randn(1, tokens, 1, states, generator=generator) for _ in range(2))
    A = -torch.arange(1.0, states + 1).repeat(channels, 1)
    return {"x": x, "dt": F.softplus(dt - 4), "A": A, "B": B, "C": C}


def _scan(backend: str) -> Callable[..., Tensor]:
    return lambda **inputs: engine.selective_scan(**inputs, backend=backend)[0]


def _entrant(
    run: Callable[..., Tensor], truth: Callable[..., Tensor], inputs: Inputs, short: Inputs, training: bool
) -> Entrant:
    """``run`` on the inputs, its error on short ones against ``truth`` in float64."""
    exact = {name: value.double() for name, value in short.items()}
    if training:
        return Entrant(
            lambda: _gradients(run, inputs), error=lambda: _worst(_gradients(run, short), _gradients(truth, exact))
        )
    forward = torch.no_grad()(run)
    return Entrant(
        lambda: forward(**inputs), error=lambda: relative_error(forward(**short), torch.no_grad()(truth)(**exact))
    )


def _gradients(run: Callable[..., Tensor], inputs: Inputs, weights: Mapping[str, Tensor] | None = None) -> Inputs:
    """The output, and by name the gradients of the inputs that it depends on and of ``weights``."""
    wanted = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    output = run(**wanted)
    wanted |= dict(weights or {})
    found = torch.autograd.grad(output, list(wanted.values()), torch.ones_like(output), allow_unused=True)
    gradients = {name: value for name, value in zip(wanted, found, strict=True) if value is not None}
    return {"output": output.detach()} | gradients


def _as_many(operations: float) -> Entrant:
    """A matrix product's time for this many operations."""
    call, made = multiplying()
    return Entrant(call, made / operations)


def _worst(values: Inputs, truths: Inputs) -> float:
    return max(relative_error(values[name], truth) for name, truth in truths.items())
