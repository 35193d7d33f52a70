"""Text to train on: the source of Python's own standard library, or the user's files."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linattn.checkpoints.tokenizer import ByteTokenizer, Tokenizer

VALIDATION = 0.05
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Text:
    """A text as tokens.

    Attributes:
        tokens: [N] uint8 or int32.
        byte_counts: [N] int32, the bytes of text that each token stands for; None: one each.
    """

    tokens: Tensor
    byte_counts: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Length of the text in bytes of UTF-8."""
        return len(self.tokens) if self.byte_counts is None else int(self.byte_counts.sum())


@dataclass(frozen=True)
class Corpus:
    """A training and a validation text, the tokenizer that made them, and where they came from (None: built in)."""

    training: Text
    validation: Text
    tokenizer: Tokenizer
    source: str | None = None

    def require(self, sequence_length: int) -> None:
        """Raises ValueError if a part is shorter than one sequence and its next token."""
        for name, part in (("training", self.training), ("validation", self.validation)):
            if len(part.tokens) <= sequence_length:
                raise ValueError(
                    f"data {self.source or 'built in'}: its {name} part has {len(part.tokens)} tokens, wanted at least "
                    f"{sequence_length + 1} (one sequence of {sequence_length} and its next token)"
                )

    def fingerprint(self) -> str:
        """A hash of both texts: equal fingerprints give equal training."""
        digest = hashlib.sha256()
        for part in (self.training, self.validation):
            digest.update(f"{part.tokens.dtype} {len(part.tokens)} ".encode())
            digest.update(part.tokens.numpy().data)
        return digest.hexdigest()


def load_corpus(data: str | Path | None = None, *, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read a corpus and split off about a twentieth for validation.

    Whole files are held back, chosen by a hash of their names; where files are too few or too large for that, the
    last twentieth of each is. The same files give the same corpus.

    Args:
        data: A file, a folder (every file below it; names that begin with a dot are skipped) or a glob pattern
            (``**`` crosses folders). None: the source code of the running Python's standard library, without tests.
        tokenizer: Bytes by default.

    Raises:
        ValueError: naming the path that is missing, empty, unreadable or not UTF-8.
    """
    if data is None:
        files = dict(_read(_standard_library(), strict=False))
        if not files:
            raise ValueError(f"data: no Python source in {sysconfig.get_path('stdlib')}; name a file or a folder")
    else:
        files = dict(_read(_find(str(data)), strict=True))
        if not any(files.values()):
            raise ValueError(f"data {data}: empty, wanted text")
    tokenizer = tokenizer or ByteTokenizer()
    training, validation = _split(files)
    return Corpus(
        Text(*tokenizer.corpus(training)),
        Text(*tokenizer.corpus(validation)),
        tokenizer,
        None if data is None else os.path.abspath(data),
    )


class Sampler:
    """Draws batches of random pieces of a text; ``state`` is all that it remembers.

    Args:
        tokens: [N], on the CPU.
        batch_size, sequence_length: B and T of the batches.
        seed: Equal seeds draw equal batches.
    """

    def __init__(self, tokens: Tensor, *, batch_size: int, sequence_length: int, seed: int) -> None:
        self._tokens, self._batch_size = tokens, batch_size
        self._span = torch.arange(sequence_length + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        """[B, T+1] int64: each row is a piece of the text, any piece as likely as any other."""
        choices = len(self._tokens) - len(self._span) + 1
        begins = torch.randint(choices, (self._batch_size, 1), generator=self._generator)
        return self._tokens[begins + self._span].long()

    @property
    def state(self) -> Tensor:
        """The state of the random generator, uint8."""
        return self._generator.get_state()

    @state.setter
    def state(self, value: Tensor) -> None:
        self._generator.set_state(value)


def _standard_library() -> Iterator[tuple[str, Path]]:
    return _walk(Path(sysconfig.get_path("stdlib")), lambda name: name not in _LEFT_OUT, ".py")


def _find(data: str) -> Iterable[tuple[str, Path]]:
    path = Path(data)
    if path.is_dir():
        found = list(_walk(path, lambda name: not name.startswith(".") and name != "__pycache__"))
        if not found:
            raise ValueError(f"data {data}: the folder holds no files, wanted text")
    elif path.exists():
        found = [(path.name, path)]
    else:
        matches = sorted(map(Path, glob.glob(data, recursive=True))) if glob.has_magic(data) else []
        found = [(match.as_posix(), match) for match in matches if match.is_file()]
        if not found:
            wanted = "a pattern that matches files" if glob.has_magic(data) else "a file, a folder or a glob pattern"
            raise ValueError(f"data {data}: nothing there, wanted {wanted}")
    return found


def _walk(root: Path, keep: Callable[[str], bool], suffix: str = "") -> Iterator[tuple[str, Path]]:
    """The files below a folder whose own names and folders' names are kept, by their names relative to it, in order."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = filter(keep, folders)
        found += [Path(folder, name) for name in files if keep(name) and name.endswith(suffix)]
    yield from sorted((file.relative_to(root).as_posix(), file) for file in found if file.is_file())


def _read(files: Iterable[tuple[str, Path]], *, strict: bool) -> Iterator[tuple[str, bytes]]:
    """The contents of UTF-8 files; others are an error or left out."""
    for name, file in files:
        try:
            content = file.read_bytes()
            content.decode()
        except (OSError, UnicodeDecodeError) as error:
            if strict:
                hint = "" if isinstance(error, OSError) else " (is it text? a glob pattern can choose files)"
                raise ValueError(f"data {file}: {getattr(error, 'strerror', None) or error}{hint}") from error
            continue
        yield name, content


def _split(files: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    """Training and validation documents."""
    wanted = VALIDATION * sum(map(len, files.values()))
    held, size = set(), 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if size + len(files[name]) <= wanted:
            held.add(name)
            size += len(files[name])
    if size >= wanted / 2:
        return (
            [content for name, content in files.items() if name not in held],
            [content for name, content in files.items() if name in held],
        )
    cuts = {name: _character(content, round(len(content) * (1 - VALIDATION))) for name, content in files.items()}
    return [files[name][:cut] for name, cut in cuts.items()], [files[name][cut:] for name, cut in cuts.items()]


def _character(text: bytes, position: int) -> int:
    """The first position from ``position`` on that cuts no UTF-8 character."""
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return position
