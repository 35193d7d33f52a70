"""RWKV of every version from RWKV-LM's own tensor names: random weights, and the mathematics as a plain loop.

The loop is written from the papers (arXiv 2305.13048, 2404.05892, 2503.14456) and the notes in RWKV-LM; it shares no
code with the library. One sequence, token by token, in the dtype of the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VERSIONS = ("4", "5.0", "5.1", "5.2", "6", "7", "7a")
VOCABULARY, WIDTH, HEAD, LAYERS = 61, 128, 64, 2


def weights(version: str, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights of a small model, in the order of RWKV-LM's modules."""
    random = torch.Generator().manual_seed(seed)
    C, H, V = WIDTH, WIDTH // HEAD, VOCABULARY
    F = 4 * C if version[0] in "47" else 7 * C // 2
    tensors: dict[str, Tensor] = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        tensors[name] = mean + std * torch.randn(shape, generator=random)

    def linear(name: str, out: int, size: int) -> None:
        normal(name + ".weight", out, size, std=size**-0.5)

    def norm(name: str) -> None:
        normal(name + ".weight", C, std=0.1, mean=1.0)
        normal(name + ".bias", C, std=0.1)

    def mixes(prefix: str, letters: str) -> None:
        for letter in letters:
            tensors[prefix + letter] = torch.rand(1, 1, C, generator=random)

    normal("emb.weight", V, C, std=0.5)
    for layer in range(LAYERS):
        block = f"blocks.{layer}."
        att, ffn = block + "att.", block + "ffn."
        for name in ("ln1", "ln2", *["ln0"] * (layer == 0)):
            norm(block + name)
        if version == "4":
            normal(att + "time_decay", C, std=1.0)
            normal(att + "time_first", C, std=0.5)
            mixes(att + "time_mix_", "kvr")
        elif version[0] == "5":
            mixes(att + "time_mix_", "kvr" if version == "5.0" else "kvrg")
            shape = (H, HEAD) if version == "5.2" else (H,)
            normal(att + "time_decay", *shape, std=1.0)
            normal(att + ("time_faaaa" if version == "5.2" else "time_first"), *shape, std=0.5)
        elif version == "6":
            mixes(att + "time_maa_", "xwkvrg")
            normal(att + "time_maa_w1", C, 5 * 32, std=0.5 * C**-0.5)
            normal(att + "time_maa_w2", 5, 32, C, std=0.1)
            normal(att + "time_decay", 1, 1, C, std=1.0)
            normal(att + "time_decay_w1", C, 64, std=C**-0.5)
            normal(att + "time_decay_w2", 64, C, std=0.1)
            normal(att + "time_faaaa", H, HEAD, std=0.5)
        else:
            mixes(att + "x_", "rwkvag")
            for letter in "wav"[: 3 if layer else 2]:
                normal(f"{att}{letter}0", 1, 1, C, std=1.0)
                normal(f"{att}{letter}1", C, 32, std=0.1)
                normal(f"{att}{letter}2", 32, C, std=0.3)
            normal(att + "g1", C, 64, std=0.1)
            normal(att + "g2", 64, C, std=0.3)
            normal(att + "k_k", 1, 1, C, std=0.1, mean=0.7)
            normal(att + "k_a", 1, 1, C, std=0.1, mean=1.0)
            normal(att + "r_k", H, HEAD, std=0.3)
        for name in ("receptance", "key", "value", "output"):
            linear(att + name, C, C)
        if version in ("5.1", "5.2", "6"):
            linear(att + "gate", C, C)
        if version != "4":
            norm(att + "ln_x")
        if version[0] == "7":
            mixes(ffn + "x_", "k")
        else:
            mixes(ffn + ("time_maa_" if version == "6" else "time_mix_"), "kr")
            linear(ffn + "receptance", C, C)
        linear(ffn + "key", F, C)
        linear(ffn + "value", C, F)
        if version == "7a":
            normal(ffn + "s_emb.weight", V, 1024, std=0.3)
            normal(ffn + "s_emb_x.weight", 1024, C, std=0.02)
            normal(ffn + "s0", 1, 1, F, std=0.1, mean=1.0)
            normal(ffn + "s1", C, 32, std=0.1)
            normal(ffn + "s2", 32, F, std=0.1)
    norm("ln_out")
    linear("head", V, C)
    return tensors


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


class _Layer:
    """The tensors of one part of a layer, without axes of one."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __call__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def flat(self, name: str) -> Tensor:
        return self(name).flatten()

    def of(self, name: str, x: Tensor) -> Tensor:
        return self(name + ".weight") @ x


def _time_mix(
    version: str, w: _Layer, h: Tensor, p: Tensor, state: list[Tensor], first: Tensor | None, eps: float
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """One token: the normed input h, the one before it p, the state -> output, state, the first layer's value."""
    C = len(h)
    if version == "4":
        x = {j: h * w.flat("time_mix_" + j) + p * (1 - w.flat("time_mix_" + j)) for j in "rkv"}
        r, k, v = w.of("receptance", x["r"]).sigmoid(), w.of("key", x["k"]), w.of("value", x["v"])
        a, b = state or (torch.zeros_like(h),) * 2
        own = (w("time_first") + k).exp()
        y = r * (a + own * v) / (b + own)
        decay = (-w("time_decay").exp()).exp()
        return w.of("output", y), [decay * a + k.exp() * v, decay * b + k.exp()], None
    if version[0] == "7":
        x = {j: h + (p - h) * w.flat("x_" + j) for j in "rwkvag"}
        r, k, v = w.of("receptance", x["r"]), w.of("key", x["k"]), w.of("value", x["v"])
        low = {j: w.flat(j + "0") + x[j] @ w(j + "1") @ w(j + "2") for j in "av" if w.prefix + j + "0" in w.tensors}
        decay_input = w.flat("w0") + torch.tanh(x["w"] @ w("w1")) @ w("w2")
        decay = (-math.exp(-0.5) * decay_input.sigmoid()).exp()
        a, gate = low["a"].sigmoid(), (x["g"] @ w("g1")).sigmoid() @ w("g2")
        erased = (k * w.flat("k_k")).view(-1, HEAD)
        erased = (erased / erased.norm(dim=-1, keepdim=True)).flatten()
        k = k * (1 + (a - 1) * w.flat("k_a"))
        if first is None:
            first = v
        else:
            v = v + (first - v) * low["v"].sigmoid()
        r, decay, k, v, a, erased = (t.view(-1, HEAD) for t in (r, decay, k, v, a, erased))
        S = state[0] if state else h.new_zeros(C // HEAD, HEAD, HEAD)  # values by keys
        forgotten = torch.einsum("hvk,hk->hv", S, erased)
        S = S * decay[:, None] - forgotten[:, :, None] * (erased * a)[:, None] + v[:, :, None] * k[:, None]
        y = torch.einsum("hvk,hk->hv", S, r)
        y = _layer_norm(y, torch.ones(()), torch.zeros(()), eps).flatten() * w("ln_x.weight") + w("ln_x.bias")
        y = y + ((r * k * w("r_k")).sum(-1, keepdim=True) * v).flatten()
        return w.of("output", y * gate), [S], first
    if version == "6":
        d = p - h
        low = torch.tanh((h + d * w.flat("time_maa_x")) @ w("time_maa_w1")).view(5, 1, -1) @ w("time_maa_w2")
        x = {j: h + d * (w.flat("time_maa_" + j) + low[n, 0]) for n, j in enumerate("wkvrg")}
        log_log = w.flat("time_decay") + torch.tanh(x["w"] @ w("time_decay_w1")) @ w("time_decay_w2")
    else:
        letters = "rkv" if version == "5.0" else "rkvg"
        x = {j: h * w.flat("time_mix_" + j) + p * (1 - w.flat("time_mix_" + j)) for j in letters}
        log_log = w("time_decay")
    decay = (-log_log.exp()).exp().view(C // HEAD, -1, 1)
    bonus = (w("time_first").exp() if version in ("5.0", "5.1") else w("time_faaaa")).view(C // HEAD, -1, 1)
    r, k, v = (w.of(name, x[name[0]]).view(-1, HEAD) for name in ("receptance", "key", "value"))
    S = state[0] if state else h.new_zeros(C // HEAD, HEAD, HEAD)  # keys by values
    write = k[:, :, None] * v[:, None]
    y = torch.einsum("hk,hkv->hv", r, S + bonus * write)
    y = _layer_norm(y, torch.ones(()), torch.zeros(()), eps).flatten() * w("ln_x.weight") + w("ln_x.bias")
    if version != "5.0":
        gate = w.of("gate", x["g"])
        y = y * gate * gate.sigmoid()
    return w.of("output", y), [decay * S + write], None


def _channel_mix(version: str, w: _Layer, h: Tensor, p: Tensor, token: int, embedding: Tensor) -> Tensor:
    if version[0] == "7":
        hidden = w.of("key", h + (p - h) * w.flat("x_k")).relu() ** 2
        if version == "7a":
            E = (w("s_emb.weight")[token] + w("s_emb_x.weight") @ embedding).view(32, 32)
            hidden = hidden * (((h @ w("s1")) @ E) @ w("s2") + w.flat("s0"))
        return w.of("value", hidden)
    if version == "6":
        x = {j: h + (p - h) * w.flat("time_maa_" + j) for j in "kr"}
    else:
        x = {j: h * w.flat("time_mix_" + j) + p * (1 - w.flat("time_mix_" + j)) for j in "kr"}
    return w.of("receptance", x["r"]).sigmoid() * w.of("value", w.of("key", x["k"]).relu() ** 2)


def logits(version: str, tensors: dict[str, Tensor], ids: list[int], eps: float = 64e-5) -> Tensor:
    """[T, V]: what the model of ``tensors`` says after each token. ``eps``: of the norm on each head's output."""
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    zero = torch.zeros_like(tensors["ln_out.weight"])
    before = [[zero, zero] for _ in range(layers)]
    states: list[list[Tensor]] = [[] for _ in range(layers)]
    out = []
    for token in ids:
        x = embedding = _layer_norm(
            tensors["emb.weight"][token], tensors["blocks.0.ln0.weight"], tensors["blocks.0.ln0.bias"]
        )
        first: Tensor | None = None
        for n in range(layers):
            block = _Layer(tensors, f"blocks.{n}.")
            h = _layer_norm(x, block("ln1.weight"), block("ln1.bias"))
            y, states[n], first = _time_mix(
                version, _Layer(tensors, f"blocks.{n}.att."), h, before[n][0], states[n], first, eps
            )
            before[n][0], x = h, x + y
            h = _layer_norm(x, block("ln2.weight"), block("ln2.bias"))
            x = x + _channel_mix(version, _Layer(tensors, f"blocks.{n}.ffn."), h, before[n][1], token, embedding)
            before[n][1] = h
        out.append(tensors["head.weight"] @ _layer_norm(x, tensors["ln_out.weight"], tensors["ln_out.bias"]))
    return torch.stack(out)
