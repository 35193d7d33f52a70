"""The corpus: the same files give the same split, every byte goes to one side, and bad files are named."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest
import torch

from linattn.training import Corpus, Text, load_corpus
from linattn.training.corpus import Sampler


def parts(corpus: Corpus) -> tuple[bytes, bytes]:
    return bytes(corpus.training.tokens.tolist()), bytes(corpus.validation.tokens.tolist())


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_the_built_in_corpus_is_the_standard_library() -> None:
    corpus = load_corpus()
    training, validation = parts(corpus)
    both = training + validation
    assert Path(json.__file__).read_bytes() in both
    assert len(both) > 5_000_000
    assert 0.025 <= len(validation) / len(both) <= 0.05
    assert corpus.source is None
    assert load_corpus().fingerprint() == corpus.fingerprint()


def test_the_built_in_corpus_leaves_out_what_differs_from_machine_to_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {f"module{number}.py": f"kept {number}\n" for number in range(60)}
    others = ["site-packages/a.py", "test/a.py", "json/tests/a.py", "__pycache__/a.py", "data.txt"]
    write(tmp_path, library | dict.fromkeys(others, "left out") | {"latin.py": b"\xe4"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    training, validation = parts(load_corpus())
    assert sorted((training + validation).splitlines()) == sorted(text.strip().encode() for text in library.values())
    assert validation


def test_a_machine_without_the_source_of_its_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="no Python source in"):
        load_corpus()


def test_many_files_are_split_by_file(tmp_path: Path) -> None:
    files = {f"deep/{number % 7}/{number}.txt": f"<{number}>" * 50 for number in range(100)}
    write(tmp_path, files | {".hidden": "no", ".git/config": "no", "empty.txt": ""})
    training, validation = parts(load_corpus(tmp_path))
    for content in files.values():
        assert (content.encode() in training) != (content.encode() in validation)
    assert len(training) + len(validation) == sum(map(len, files.values()))
    assert 0.025 <= len(validation) / (len(training) + len(validation)) <= 0.05


@pytest.mark.parametrize("count", [1, 3])
def test_few_files_are_split_by_position(tmp_path: Path, count: int) -> None:
    names = "abc"[:count]
    write(tmp_path, {name: f"{name}é" * 500 for name in names})
    corpus = load_corpus(tmp_path if count > 1 else tmp_path / "a")
    training, validation = (part.decode() for part in parts(corpus))  # no character is cut in two
    whole = "".join(name * 500 for name in names)
    assert (training + validation).count("é") == 500 * count
    assert sorted((training + validation).replace("é", "")) == sorted(whole)
    assert len(validation) == pytest.approx(len(whole) * 2 * 0.05, rel=0.05)
    assert validation.replace("é", "") == "".join(name * 25 for name in names)


def test_a_pattern_chooses_files(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "aaaa\n" * 40, "x/b.txt": "bbbb\n" * 40, "c.bin": b"\xff"})
    training, validation = parts(load_corpus(f"{tmp_path}/**/*.txt"))
    assert set(training + validation) == set(b"ab\n")


def test_the_source_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": "aaaa\n" * 40})
    monkeypatch.chdir(tmp_path)
    assert load_corpus("a.txt").source == str(tmp_path / "a.txt")
    assert load_corpus("*.txt").source == str(tmp_path / "*.txt")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("none.txt", "data .*none.txt: nothing there, wanted a file, a folder or a glob pattern"),
        ("*.md", r"data .*\*\.md: nothing there, wanted a pattern that matches files"),
        ("empty.txt", "data .*empty.txt: empty"),
        ("hollow", "data .*hollow: the folder holds no files"),
        ("binary.dat", r"data .*binary\.dat: 'utf-8' codec can't decode byte 0xff in position 3.*is it text"),
        ("mixed", r"data .*mixed/b\.dat: 'utf-8' codec"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, data: str, message: str) -> None:
    write(tmp_path, {"empty.txt": "", "hollow/.keep": "", "binary.dat": b"abc\xff", "mixed/a.txt": "a"})
    write(tmp_path, {"mixed/b.dat": b"\xfe"})
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / data)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "aaaa"})
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(ValueError, match=r"data .*a\.txt: Permission denied"):
        load_corpus(tmp_path / "a.txt")


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "x" * 1000})
    corpus = load_corpus(tmp_path / "a.txt")
    corpus.require(49)
    with pytest.raises(ValueError, match=r"data .*a\.txt: its validation part has 50 tokens, wanted at least 51"):
        corpus.require(50)
    with pytest.raises(ValueError, match="its training part has 950 tokens, wanted at least 1001"):
        Corpus(corpus.training, Text(torch.zeros(5000)), corpus.tokenizer).require(1000)


def test_the_fingerprint_tells_texts_and_splits_apart(tmp_path: Path) -> None:
    prints = set()
    for number, text in enumerate(["aaab" * 100, "aaba" * 100, "aaab" * 101]):
        write(tmp_path, {f"{number}.txt": text})
        prints.add(load_corpus(tmp_path / f"{number}.txt").fingerprint())
    assert len(prints) == 3


def test_batches_are_pieces_of_the_text_and_every_piece_is_drawn() -> None:
    tokens = torch.arange(10, dtype=torch.uint8)
    sampler = Sampler(tokens, batch_size=64, sequence_length=7, seed=0)
    batch = sampler.draw()
    assert batch.dtype == torch.int64
    assert batch.shape == (64, 8)
    assert set(map(tuple, batch.tolist())) == {tuple(range(begin, begin + 8)) for begin in range(3)}


def test_the_state_of_a_sampler_is_all_it_remembers() -> None:
    def sampler(seed: int) -> Sampler:
        return Sampler(torch.arange(1000), batch_size=4, sequence_length=8, seed=seed)

    first, second = sampler(1), sampler(2)
    first.draw()
    assert not torch.equal(first.draw(), second.draw())
    second.state = first.state
    assert all(torch.equal(first.draw(), second.draw()) for _ in range(3))
    assert torch.equal(sampler(5).draw(), sampler(5).draw())
