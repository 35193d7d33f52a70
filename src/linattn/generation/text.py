"""From tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from linattn.checkpoints import Tokenizer


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of a stream of tokens in pieces that never end inside a character; U+FFFD for what is not UTF-8.

    What the last tokens leave incomplete is dropped.
    """
    decode = tokenizer.decoder()
    for token in tokens:
        if piece := decode(token):
            yield piece
