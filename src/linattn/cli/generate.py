"""`linattn generate`: continue a text, streaming."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

import torch
import tyro

from linattn import registry, state
from linattn.benchmark.report import size
from linattn.checkpoints import Tokenizer, load, load_tokenizer, named_tokenizer
from linattn.cli.command import INTERRUPTED, Command, present
from linattn.cli.output import Output
from linattn.generation import stream, text_pieces
from linattn.models import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """Continue a prompt with a trained model; the text goes to stdout as it comes.

    The prompt is --prompt, the contents of --file, or what is piped in; without any, a newline.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint folder, a run folder of linattn train (its newest checkpoint), a model folder of transformers,
    mamba_ssm or flash-linear-attention, or an RWKV .pth."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, bytes, or rwkv (its World vocabulary); by default the checkpoint's own."""
    prompt: str | None = None
    """Text to continue."""
    file: Path | None = None
    """A file with the text to continue; - is stdin."""
    max_tokens: int = 500
    """Tokens to generate; -1 goes on until Ctrl-C. Only the state is kept, however many they are."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 is all."""
    seed: int | None = None
    """Equal seeds give equal text."""
    device: str = "cpu"
    """Where to run: cpu, cuda, mps."""
    decode: Literal["auto", "eager", "compiled"] = "auto"
    """What makes a token of the one before: the step compiled for the CPU, or the model's forward."""
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    """What a compiled step reads the model's matrices as; fewer bytes are faster, and less exact."""

    def run(self, output: Output) -> int:
        prompt = self._prompt() or "\n"
        device = present(self.device)
        tokenizer = load_tokenizer(self.checkpoint) if self.tokenizer is None else named_tokenizer(self.tokenizer)
        return continue_text(
            load(self.checkpoint, device=device), tokenizer, prompt, output,
            max_tokens=None if self.max_tokens == -1 else self.max_tokens,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed,
            decode=self.decode, weights=self.weights,
        )  # fmt: skip

    def _prompt(self) -> str:
        if self.prompt is not None:
            if self.file is not None:
                raise ValueError("prompt, file: got both, wanted one of them")
            return self.prompt
        if self.file is None and sys.stdin.isatty():
            return ""
        piped = self.file is None or str(self.file) == "-"
        try:
            return (sys.stdin.buffer.read() if self.file is None or piped else self.file.read_bytes()).decode()
        except OSError as error:
            raise ValueError(f"file {self.file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"file {'stdin' if piped else self.file}: not UTF-8: {error}") from error


def continue_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    output: Output,
    *,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    decode: str = "auto",
    weights: str = "float32",
) -> int:
    """Stream text to stdout and its speed to stderr; the exit code."""
    ids = torch.tensor(tokenizer.encode(prompt), dtype=torch.int64)
    tokens = stream(
        model, ids, max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        decode=decode, weights=weights,
    )  # fmt: skip
    meter, code = _Meter(tokens), 0
    try:
        for piece in text_pieces(meter, tokenizer):
            output.emit({"event": "text", "text": piece})
            if not output.as_json:
                sys.stdout.write(_harmless(piece) if output.live else piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if not output.as_json:
        print()
    kept = state.nbytes(tokens.state)
    grows = any(registry.get(name).grows for name in model.config.layers)
    output.emit(
        {
            "event": "finished",
            "tokens": meter.count,
            "prompt_tokens": len(ids),
            "tokens_per_second": meter.rate,
            "state_bytes": kept,
            "state_grows": grows,
            "decode": tokens.decode,
        }
    )
    growth = "which grows with every token (softmax attention)" if grows else "the same after any number of tokens"
    output.aside(f"{meter.count:,} tokens at {meter.rate:,.0f} tokens/s after the first; state {size(kept)}, {growth}")
    output.aside(f"decode: {tokens.decode}")
    return code


class _Meter:
    """Counts tokens and their speed as they pass. The first, which has to read the prompt, only starts the clock."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self._tokens = tokens
        self.count = 0
        self._begin = self._end = perf_counter()

    def __iter__(self) -> Iterator[int]:
        for token in self._tokens:
            self.count += 1
            self._end = perf_counter()
            if self.count == 1:
                self._begin = self._end
            yield token

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before the second token."""
        seconds = self._end - self._begin
        return (self.count - 1) / seconds if seconds else 0.0


def _harmless(text: str) -> str:
    """A model can spell any byte; a terminal would obey some of them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
