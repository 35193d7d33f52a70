"""Generation: a batch at once, or a stream of tokens with a state that stays as small as the mechanism's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from linattn import engine
from linattn._checks import fail, one_of
from linattn.backends.cpu.program import WEIGHTS
from linattn.generation.decode import compile_decode, compiled_already
from linattn.generation.sampling import Sampler
from linattn.models import LanguageModel
from linattn.models.decoder import ModelState, check_vocabulary

PREFILL = 2048  # tokens of a prompt read at a time, which bounds the memory of a long one
WORTH = 64  # tokens from which on compiling the step pays
DECODE = ("auto", "eager", "compiled")


def generate(
    model: LanguageModel,
    prompts: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Collection[int] = (),
    mode: str = "auto",
    backend: str = "auto",
    decode: str = "auto",
    weights: str = "float32",
) -> list[Tensor]:
    """Continue every prompt; return the new tokens of each, int64 [≤ max_new_tokens].

    Args:
        prompts: int64 [B, T], or 1-D tensors of any lengths ≥ 1.
        max_new_tokens: most tokens to generate a row.
        temperature, top_k, top_p: see :class:`Sampler`; temperature 0 takes the likeliest token.
        seed: of the random draws; None takes torch's global generator.
        stop: tokens that end a row; the row keeps the one that ended it.
        mode, backend: as in the mechanisms' functions.
        decode: what makes a token of the one before: "compiled" is :func:`compile_decode`, "eager" the model's forward.
            "auto" compiles on a CPU where that works and pays (from 64 tokens on, or once it is done).
        weights: "float32", or what the compiled step reads the matrices as, "bfloat16" or "int8"; the prompt is read
            with the model's own.

    Rows are padded on the left and masked, so each greedy row equals the row generated alone.
    Raises ValueError for an empty prompt, a token outside the vocabulary, or a setting that does not fit.
    """
    rows, how = _prompts(model, prompts), _How(mode, backend, decode, weights)
    if max_new_tokens < 0:
        raise fail("max_new_tokens", max_new_tokens, "a number ≥ 0")
    sampler, ends = Sampler(temperature, top_k, top_p), _stops(model, stop)
    if max_new_tokens == 0 or not rows:
        return [row[:0] for row in rows]
    generator = _generator(model, seed)
    longest = max(len(row) for row in rows)
    device = model.embedding.weight.device
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, row in enumerate(rows):
        ids[n, longest - len(row) :] = row
        mask[n, longest - len(row) :] = True
    new: list[Tensor] = []
    done = torch.zeros(len(rows), dtype=torch.bool)
    lengths = torch.full((len(rows),), max_new_tokens)
    with torch.inference_mode():
        logits, state = _prefill(model, ids.to(device), None if mask.all() else mask.to(device), how)
        steps, _ = how.steps(model, state, len(rows), max_new_tokens)
        for count in range(1, max_new_tokens + 1):
            token = sampler(logits, generator)
            new.append(token.cpu())
            if ends:
                ended = torch.isin(new[-1], torch.tensor(sorted(ends))) & ~done
                lengths[ended], done = count, done | ended
            if done.all() or count == max_new_tokens:
                break
            logits = steps.step(token)
    table = torch.stack(new, dim=1)
    return [row[:length].clone() for row, length in zip(table, lengths.tolist(), strict=True)]


class _Steps(Protocol):
    """What makes logits [B, V] of a token [B], and the state after all tokens."""

    @property
    def state(self) -> ModelState: ...

    def step(self, ids: Tensor) -> Tensor: ...


class _Eager:
    """The model's forward, token by token."""

    def __init__(self, model: LanguageModel, state: ModelState, mode: str, backend: str) -> None:
        self._model, self.state, self._mode, self._backend = model, state, mode, backend

    def step(self, ids: Tensor) -> Tensor:
        logits, self.state = self._model(ids[:, None], self.state, mode=self._mode, backend=self._backend)
        return logits[:, -1]


class _How:
    """How tokens are made. Raises ValueError for a setting that does not fit."""

    def __init__(self, mode: str, backend: str, decode: str, weights: str) -> None:
        one_of("decode", decode, DECODE)
        one_of("weights", weights, WEIGHTS)
        if decode == "eager" and weights != "float32":
            raise fail("weights", f"{weights!r} with decode='eager'", "decode='compiled' or 'auto'")
        self.mode, self.backend, self.decode, self.weights = mode, backend, decode, weights

    def steps(self, model: LanguageModel, state: ModelState, batch: int, tokens: int | None) -> tuple[_Steps, str]:
        """What makes up to ``tokens`` tokens after ``state``, and the choice in words.

        Raises ValueError where a compiled step was asked for, by name or by its weights, and can't be had.
        """
        asked = self.decode == "compiled" or self.weights != "float32"
        why = None if asked else self._rather_eager(model, batch, tokens)
        if why is None:
            try:
                decoder = compile_decode(model, batch=batch, weights=self.weights, huge_pages=False)
                return decoder.start(state), f"compiled, weights in {self.weights}"
            except ValueError as refusal:
                if asked:
                    raise
                why = str(refusal)
        return _Eager(model, state, self.mode, self.backend), f"eager: {why}"

    def _rather_eager(self, model: LanguageModel, batch: int, tokens: int | None) -> str | None:
        if self.decode == "eager":
            return "decode='eager' was asked for"
        if self.mode != "auto":
            return f"mode={self.mode!r} was asked for"
        backend = engine.PREFERRED if self.backend == "auto" else self.backend
        if backend not in ("auto", "cpu"):
            return f"the backend {backend!r} was asked for"
        if tokens is not None and tokens < WORTH and not compiled_already(model, batch, self.weights):
            return f"{tokens} tokens are fewer than the {WORTH} from which on compiling pays"
        return None


class Stream(Iterator[int]):
    """The tokens that continue a prompt, one at a time; see :func:`stream`.

    ``state`` is the model's state, None before the first token. It has read the prompt and every token that came but
    the last one. ``decode`` says how tokens are made, and why so; it is empty before the first.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Tensor,
        sampler: Sampler,
        max_new_tokens: int | None,
        seed: int | None,
        stop: Collection[int],
        how: _How,
    ) -> None:
        (self._prompt,) = _prompts(model, [prompt])
        if max_new_tokens is not None and max_new_tokens < 0:
            raise fail("max_new_tokens", max_new_tokens, "a number ≥ 0, or None for no end")
        self._model, self._sampler, self._left = model, sampler, max_new_tokens
        self._stop, self._generator, self._how = _stops(model, stop), _generator(model, seed), how
        self._token: Tensor | None = None
        self._steps: _Steps | None = None
        self.decode = ""

    @property
    def state(self) -> ModelState | None:
        return None if self._steps is None else self._steps.state

    def __next__(self) -> int:
        if self._left == 0:
            raise StopIteration
        with torch.inference_mode():
            if self._token is None or self._steps is None:
                prompt = self._prompt.to(self._model.embedding.weight.device)
                logits, state = _prefill(self._model, prompt[None], None, self._how)
                self._steps, self.decode = self._how.steps(self._model, state, 1, self._left)
            else:
                logits = self._steps.step(self._token)
            self._token = self._sampler(logits, self._generator)
        token = int(self._token)
        if self._left is not None:
            self._left -= 1
        if token in self._stop:
            self._left = 0
        return token


def stream(
    model: LanguageModel,
    prompt: Tensor,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Collection[int] = (),
    mode: str = "auto",
    backend: str = "auto",
    decode: str = "auto",
    weights: str = "float32",
) -> Stream:
    """An iterator over the tokens that continue ``prompt`` (int64 [T]); endless with ``max_new_tokens=None``.

    Only the state is kept, so memory does not grow unless the mechanism's state does. Arguments and errors as in
    :func:`generate`; the same seed gives the same tokens.
    """
    sampler = Sampler(temperature, top_k, top_p)
    return Stream(model, prompt, sampler, max_new_tokens, seed, stop, _How(mode, backend, decode, weights))


def _prefill(model: LanguageModel, ids: Tensor, mask: Tensor | None, how: _How) -> tuple[Tensor, ModelState]:
    """Read the prompts in pieces; return the logits [B, V] after the last token and the state."""
    state: ModelState | None = None
    for start in range(0, ids.shape[1], PREFILL):
        piece = slice(start, start + PREFILL)
        part = None if mask is None else mask[:, piece]
        hidden, state = model.features(ids[:, piece], state, mask=part, mode=how.mode, backend=how.backend)
    assert state is not None
    return model.head(hidden[:, -1]), state


def _prompts(model: LanguageModel, prompts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if not isinstance(prompts, Sequence) and not (isinstance(prompts, Tensor) and prompts.dim() == 2):
        raise fail("prompts", _came(prompts), "an int64 tensor [B, T] or a list of int64 tensors [T]")
    rows = list(prompts)
    for row in rows:
        if not isinstance(row, Tensor) or row.dim() != 1 or row.dtype != torch.int64:
            raise fail("prompt", _came(row), "an int64 tensor [T]")
        if not len(row):
            raise fail("prompt", "no token", "at least one to continue from")
        check_vocabulary(row, model.config.vocab_size)
    return [row.cpu() for row in rows]


def _came(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _stops(model: LanguageModel, stop: Collection[int]) -> frozenset[int]:
    for token in stop:
        if not 0 <= token < model.config.vocab_size:
            raise fail("stop", f"token {token}", f"0 … {model.config.vocab_size - 1}")
    return frozenset(stop)


def _generator(model: LanguageModel, seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator(model.embedding.weight.device).manual_seed(seed)
