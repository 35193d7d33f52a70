"""Generation: a batch at once, or a stream of tokens with a state that stays as small as the mechanism's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from linattn._checks import fail
from linattn.generation.sampling import Sampler
from linattn.models import LanguageModel
from linattn.models.decoder import ModelState, check_vocabulary

PREFILL = 2048  # tokens of a prompt read at a time, which bounds the memory of a long one


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
) -> list[Tensor]:
    """Continue every prompt; return the new tokens of each, int64 [≤ max_new_tokens].

    Args:
        prompts: int64 [B, T], or 1-D tensors of any lengths ≥ 1.
        max_new_tokens: most tokens to generate a row.
        temperature, top_k, top_p: see :class:`Sampler`; temperature 0 takes the likeliest token.
        seed: of the random draws; None takes torch's global generator.
        stop: tokens that end a row; the row keeps the one that ended it.
        mode, backend: as in the mechanisms' functions.

    Rows are padded on the left and masked, so each greedy row equals the row generated alone.
    Raises ValueError for an empty prompt, a token outside the vocabulary, or a setting that does not fit.
    """
    rows = _prompts(model, prompts)
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
        logits, state = _prefill(model, ids.to(device), None if mask.all() else mask.to(device), mode, backend)
        for count in range(1, max_new_tokens + 1):
            token = sampler(logits, generator)
            new.append(token.cpu())
            if ends:
                ended = torch.isin(new[-1], torch.tensor(sorted(ends))) & ~done
                lengths[ended], done = count, done | ended
            if done.all() or count == max_new_tokens:
                break
            logits, state = _step(model, token, state, mode, backend)
    table = torch.stack(new, dim=1)
    return [row[:length].clone() for row, length in zip(table, lengths.tolist(), strict=True)]


class Stream(Iterator[int]):
    """The tokens that continue a prompt, one at a time; see :func:`stream`.

    ``state`` is the model's state, None before the first token. It has read the prompt and every token that came but
    the last one.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Tensor,
        sampler: Sampler,
        max_new_tokens: int | None,
        seed: int | None,
        stop: Collection[int],
        mode: str,
        backend: str,
    ) -> None:
        (self._prompt,) = _prompts(model, [prompt])
        if max_new_tokens is not None and max_new_tokens < 0:
            raise fail("max_new_tokens", max_new_tokens, "a number ≥ 0, or None for no end")
        self._model, self._sampler, self._left = model, sampler, max_new_tokens
        self._stop, self._generator, self._how = _stops(model, stop), _generator(model, seed), (mode, backend)
        self._token: Tensor | None = None
        self.state: ModelState | None = None

    def __next__(self) -> int:
        if self._left == 0:
            raise StopIteration
        with torch.inference_mode():
            if self._token is None or self.state is None:
                prompt = self._prompt.to(self._model.embedding.weight.device)
                logits, self.state = _prefill(self._model, prompt[None], None, *self._how)
            else:
                logits, self.state = _step(self._model, self._token, self.state, *self._how)
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
) -> Stream:
    """An iterator over the tokens that continue ``prompt`` (int64 [T]); endless with ``max_new_tokens=None``.

    Only the state is kept, so memory does not grow unless the mechanism's state does. Arguments and errors as in
    :func:`generate`; the same seed gives the same tokens.
    """
    sampler = Sampler(temperature, top_k, top_p)
    return Stream(model, prompt, sampler, max_new_tokens, seed, stop, mode, backend)


def _prefill(
    model: LanguageModel, ids: Tensor, mask: Tensor | None, mode: str, backend: str
) -> tuple[Tensor, ModelState]:
    """Read the prompts in pieces; return the logits [B, V] after the last token and the state."""
    state: ModelState | None = None
    for start in range(0, ids.shape[1], PREFILL):
        piece = slice(start, start + PREFILL)
        part = None if mask is None else mask[:, piece]
        hidden, state = model.features(ids[:, piece], state, mask=part, mode=mode, backend=backend)
    assert state is not None
    return model.head(hidden[:, -1]), state


def _step(model: LanguageModel, token: Tensor, state: ModelState, mode: str, backend: str) -> tuple[Tensor, ModelState]:
    logits, state = model(token[:, None], state, mode=mode, backend=backend)
    return logits[:, -1], state


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
