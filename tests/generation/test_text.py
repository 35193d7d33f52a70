"""Text from a stream of tokens: whole characters only."""

from __future__ import annotations

from linattn.checkpoints import ByteTokenizer
from linattn.generation import text_pieces


def test_pieces_never_split_a_character() -> None:
    text = "naïve — 日本語 🙂 e\u0301"
    pieces = list(text_pieces(text.encode(), ByteTokenizer()))
    assert "".join(pieces) == text
    assert all(len(piece) == 1 for piece in pieces)


def test_what_is_not_utf8_is_replaced() -> None:
    assert "".join(text_pieces([0x61, 0xFF, 0x62, 0xE2, 0x82, 0x63], ByteTokenizer())) == "a\ufffdb\ufffdc"


def test_pieces_come_as_they_are_complete() -> None:
    pieces = text_pieces(iter("é!".encode()), ByteTokenizer())
    assert next(pieces) == "é"
    assert next(pieces) == "!"
