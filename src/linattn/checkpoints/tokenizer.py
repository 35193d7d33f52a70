"""Text to token numbers and back: bytes, any Hugging Face ``tokenizer.json``, or the World vocabulary of RWKV."""

from __future__ import annotations

import ast
import codecs
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Tokenizer(Protocol):
    """What a model's text is made of."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens: every token number is below it."""

    def encode(self, text: str) -> list[int]:
        """The token numbers of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token numbers; what is not UTF-8 becomes U+FFFD."""

    def decoder(self) -> Callable[[int], str]:
        """A function that takes one token at a time and returns the text that it completes (perhaps none yet)."""

    def corpus(self, documents: Sequence[bytes]) -> tuple[Tensor, Tensor | None]:
        """Tokens [N] of UTF-8 documents one after another, uint8 or int32, and how many bytes each stands for.

        The counts [N] are int32; None says one byte a token. A character cut into several tokens counts in its first.
        """


class ByteTokenizer:
    """The 256 bytes of UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def decoder(self) -> Callable[[int], str]:
        return _decoder(lambda token: bytes((token,)))

    def corpus(self, documents: Sequence[bytes]) -> tuple[Tensor, None]:
        data = bytearray(b"".join(documents))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), None


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` as Hugging Face writes it, by the optional package ``tokenizers``.

    Args:
        path: The file, or a folder that holds a ``tokenizer.json``.

    Raises:
        ValueError: the file is missing or is no tokenizer.
        ModuleNotFoundError: the package ``tokenizers`` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"tokenizer {path}: reading it needs the package 'tokenizers' (pip install 'linattn[tokenizers]')"
            ) from error
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"tokenizer {file}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"tokenizer {file}: not a Hugging Face tokenizer.json: {error}") from error
        self.json = text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def decoder(self) -> Callable[[int], str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return lambda token: stream.step(self._tokenizer, token) or ""

    def corpus(self, documents: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        ids: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
        counts: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
        for text in (piece for document in documents for piece in _pieces(document.decode())):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            # Offsets are in characters; bytes are counted up to the end of each token, so that spaces which a
            # tokenizer drops and characters which it cuts in pieces are all counted, and once.
            ends = _byte_ends(text)[torch.tensor([end for _, end in encoding.offsets], dtype=torch.int64)]
            if len(ends):
                ends = ends.cummax(0).values
                ends[-1] = len(text.encode())
            ids.append(torch.tensor(encoding.ids, dtype=torch.int32))
            counts.append(ends.diff(prepend=ends.new_zeros(1)).int())
        return torch.cat(ids), torch.cat(counts)


class RwkvTokenizer:
    """The World vocabulary of RWKV: the longest of 65,529 byte strings each; token 0 ends a text and is empty.

    The vocabulary comes with the optional package ``pyrwkv-tokenizer``, or else with ``rwkv``.

    Raises ModuleNotFoundError if neither is installed.
    """

    vocab_size = 65536
    FILE = "rwkv_vocab_v20230424.txt"

    def __init__(self) -> None:
        # Where they lie, without importing them: the vocabulary serves to decode without loading the encoder.
        found = [(name, find_spec(name)) for name in ("pyrwkv_tokenizer", "rwkv")]
        places = [(name, spec.submodule_search_locations) for name, spec in found if spec is not None]
        if not places:
            raise ModuleNotFoundError(
                "tokenizer rwkv: needs the package 'pyrwkv-tokenizer' (pip install 'linattn[rwkv]') or 'rwkv'"
            )
        self._package, folders = places[0]
        self._file = Path(next(iter(folders or ()))) / self.FILE
        self._lines: dict[int, str] = {}
        for line in self._file.read_text(encoding="utf-8").split("\n"):
            number, _, rest = line.partition(" ")
            if rest:
                self._lines[int(number)] = rest.rpartition(" ")[0]

    @cached_property
    def _encoder(self) -> Callable[[str], list[int]]:
        if self._package == "pyrwkv_tokenizer":
            from pyrwkv_tokenizer import RWKVTokenizer

            return RWKVTokenizer().encode
        from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

        return TRIE_TOKENIZER(str(self._file)).encode

    def _bytes(self, token: int) -> bytes:
        """What a token stands for; U+FFFD for those that fill the vocabulary up to its size."""
        if token == 0:
            return b""
        text = ast.literal_eval(self._lines[token]) if token in self._lines else "\ufffd"
        return text.encode() if isinstance(text, str) else bytes(text)

    def encode(self, text: str) -> list[int]:
        return list(self._encoder(text))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes, ids)).decode(errors="replace")

    def decoder(self) -> Callable[[int], str]:
        return _decoder(self._bytes)

    def corpus(self, documents: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        ids = [token for document in documents for token in self.encode(document.decode())]
        sizes = {token: len(self._bytes(token)) for token in set(ids)}
        return torch.tensor(ids, dtype=torch.int32), torch.tensor([sizes[token] for token in ids], dtype=torch.int32)


NAMED_TOKENIZERS: dict[str, type[ByteTokenizer] | type[RwkvTokenizer]] = {
    "bytes": ByteTokenizer,
    "rwkv": RwkvTokenizer,
}


def named_tokenizer(name: str) -> Tokenizer:
    """ "bytes", "rwkv" (its World vocabulary), or the path of a ``tokenizer.json`` or of a folder with one.

    Raises as the tokenizers do.
    """
    return NAMED_TOKENIZERS[name]() if name in NAMED_TOKENIZERS else HuggingFaceTokenizer(name)


def _decoder(spell: Callable[[int], bytes]) -> Callable[[int], str]:
    """A function from one token at a time to the characters that its bytes complete."""
    incremental = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda token: incremental.decode(spell(token))


def _pieces(text: str, size: int = 1 << 20) -> Iterator[str]:
    """Cut a long text after newlines: an encoding takes a hundred times the memory of its text."""
    begin = 0
    while begin < len(text):
        end = begin + size
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end


def _byte_ends(text: str) -> Tensor:
    """[characters + 1] int64: how many bytes of UTF-8 the first n characters take."""
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    sizes = 1 + (points >= 0x80).long() + (points >= 0x800) + (points >= 0x10000)
    return torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
