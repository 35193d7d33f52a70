"""Tokenizers: text comes back, and every byte of it is counted once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from linattn.checkpoints import ByteTokenizer, HuggingFaceTokenizer, RwkvTokenizer, Tokenizer, named_tokenizer
from linattn.checkpoints.tokenizer import _pieces

TEXT = "Straße über die Brücke — 橋を渡る道 🌉\n  indented,   spaced\n" * 20


def byte_level(folder: Path, vocab_size: int = 300) -> Path:
    """A byte-level BPE tokenizer, as most language models have: cuts characters in pieces."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def by_words(folder: Path) -> Path:
    """A tokenizer that drops white space and adds special tokens, truncates and pads if it is let."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "[CLS]", *sorted(set(TEXT.split()))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "words.json"))
    return folder / "words.json"


@pytest.fixture(params=["bytes", "byte level", "words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return HuggingFaceTokenizer(byte_level(tmp_path) if request.param == "byte level" else by_words(tmp_path))


def test_every_byte_of_a_corpus_is_counted_once(tokenizer: Tokenizer) -> None:
    documents = [TEXT.encode(), b"", "ß".encode() * 3, b"plain"]
    tokens, counts = tokenizer.corpus(documents)
    total = sum(map(len, documents))
    assert (len(tokens) if counts is None else int(counts.sum())) == total
    assert counts is None or (counts.shape == tokens.shape and int(counts.min()) >= 0)
    assert int(tokens.max()) < tokenizer.vocab_size
    assert tokens.tolist() == [token for document in documents for token in tokenizer.encode(document.decode())]


def test_an_empty_corpus_has_no_tokens(tokenizer: Tokenizer) -> None:
    tokens, counts = tokenizer.corpus([b""])
    assert len(tokens) == 0
    assert counts is None or len(counts) == 0


def test_text_comes_back_whole_and_token_by_token(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(byte_level(tmp_path))):
        ids = tokenizer.encode(TEXT)
        assert tokenizer.decode(ids) == TEXT
        push = tokenizer.decoder()
        assert "".join(map(push, ids)) == TEXT


def test_a_byte_that_is_not_utf8_becomes_a_replacement_character() -> None:
    push = ByteTokenizer().decoder()
    assert [push(byte) for byte in b"a\xc3b"] == ["a", "", "\ufffdb"]
    assert ByteTokenizer().decode(b"a\xff") == "a\ufffd"


def test_long_documents_are_cut_after_newlines_and_nowhere_lose_text() -> None:
    text = "one line\n" * 10 + "x" * 100 + "\nend"
    pieces = list(_pieces(text, size=25))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 25
    assert pieces[0] == "one line\none line\n"


def test_a_missing_or_foreign_tokenizer_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"tokenizer .*none\.json: cannot be read: No such file"):
        HuggingFaceTokenizer(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text('{"some": "thing"}')
    with pytest.raises(ValueError, match=r"tokenizer .*tokenizer\.json: not a Hugging Face tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match=r"tokenizer .*tokenizer\.json: cannot be read"):
        HuggingFaceTokenizer(tmp_path)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'linattn\[tokenizers\]'"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


def test_bytes_are_kept_as_bytes() -> None:
    tokens, counts = ByteTokenizer().corpus([b"ab", b"c"])
    assert counts is None
    assert torch.equal(tokens, torch.tensor([97, 98, 99], dtype=torch.uint8))


@pytest.fixture(scope="module")
def world() -> RwkvTokenizer:
    pytest.importorskip("pyrwkv_tokenizer")
    return RwkvTokenizer()


def test_the_world_vocabulary_comes_back_whole_and_token_by_token(world: RwkvTokenizer) -> None:
    ids = world.encode(TEXT)
    assert len(ids) < len(TEXT.encode()) / 2
    assert max(ids) < world.vocab_size
    assert world.decode(ids) == TEXT
    push = world.decoder()
    assert "".join(map(push, ids)) == TEXT
    assert world.encode("") == []


def test_the_world_vocabulary_spells_parts_of_characters(world: RwkvTokenizer) -> None:
    ids = [1 + byte for byte in "橋".encode()]  # the bytes come first
    push = world.decoder()
    assert [push(token) for token in ids] == ["", "", "橋"]
    assert world.decode([*ids[:2], 1 + ord("a")]) == "\ufffda"
    assert world.decode([0, 65535]) == "\ufffd"  # the end of a text is empty; the last numbers stand for nothing


def test_the_world_vocabulary_counts_every_byte(world: RwkvTokenizer) -> None:
    documents = [TEXT.encode(), b"", "ß".encode() * 3]
    tokens, counts = world.corpus(documents)
    assert int(counts.sum()) == sum(map(len, documents))
    assert world.decode(tokens.tolist()) == b"".join(documents).decode()


def test_both_packages_give_the_same_tokens(world: RwkvTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rwkv")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "linattn.checkpoints.tokenizer.find_spec", lambda name: None if name == "pyrwkv_tokenizer" else found(name)
    )
    other = RwkvTokenizer()
    assert other._package == "rwkv"
    assert other.encode(TEXT) == world.encode(TEXT)
    assert other.decode(world.encode(TEXT)) == TEXT


def test_without_either_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linattn.checkpoints.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'linattn\[rwkv\]'"):
        RwkvTokenizer()


def test_a_tokenizer_by_name(tmp_path: Path) -> None:
    assert isinstance(named_tokenizer("bytes"), ByteTokenizer)
    assert named_tokenizer(str(byte_level(tmp_path))).encode("a")
    assert named_tokenizer(str(tmp_path)).encode("a")
