"""What the benchmark reports is what it measured, and it ends when it said it would."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
import torch

from linattn import registry
from linattn.benchmark import compare, draw, machine, peak_memory, picture, timed, write_csv, write_json
from linattn.benchmark.report import notes, size
from linattn.testing import Sizes

TINY = {"heads": 2, "key_size": 8, "budget": 30.0}


@pytest.mark.parametrize("name", registry.names())
def test_every_mechanism_can_be_compared(name: str) -> None:
    rows = list(compare([name], [32, 16], **TINY))
    assert [row.tokens for row in rows] == [16, 32]
    for row in rows:
        assert row.mechanism == name
        assert row.note == ""
        assert row.error < 1e-4
        for value in (row.forward_ms, row.training_ms, row.forward_bytes, row.training_bytes, row.token_us, row.runs):
            assert value is not None
            assert value > 0
        assert row.training_bytes > row.forward_bytes
    sizes = [row.state_bytes for row in rows]
    if registry.get(name).recurrence is None:
        assert sizes == [2 * 16 * 2 * 8 * 4, 2 * 32 * 2 * 8 * 4]
    else:
        assert sizes[0] == sizes[1]


def test_aliases_and_repeats_are_one_mechanism() -> None:
    assert len(list(compare(["gla", "gated_linear_attention"], [16, 16], **TINY))) == 1


def test_what_does_not_fit_the_budget_is_left_out_and_said() -> None:
    begin = time.perf_counter()
    rows = list(compare(["softmax", "delta"], [64, 1 << 17], heads=2, key_size=8, budget=1.0))
    assert time.perf_counter() - begin < 10
    left_out = rows[-1]  # softmax attention; a fast backend may manage the other
    assert left_out.forward_ms is None
    assert "forward" in left_out.note
    assert left_out.state_bytes == 2 * (1 << 17) * 2 * 8 * 4  # a cache is known without the forward pass
    assert any("N = 131,072" in note for note in notes(rows))


def test_drawn_inputs_follow_the_argument_table() -> None:
    sizes = Sizes(B=1, T=5, G=2, H=4, K=3, V=6).axes()
    for name in registry.names():
        mechanism = registry.get(name)
        drawn = draw(mechanism, sizes, dtype=torch.bfloat16, seed=1)
        again = draw(mechanism, sizes, dtype=torch.bfloat16, seed=1)
        assert list(drawn) == [argument.name for argument in mechanism.arguments if not argument.optional]
        for argument in mechanism.arguments:
            if not argument.optional:
                assert list(drawn[argument.name].shape) == [sizes[axis] for axis in argument.dims.split()]
                assert drawn[argument.name].equal(again[argument.name])
        mechanism.function(**drawn)


def test_peak_memory_is_what_torch_allocates() -> None:
    def call() -> None:
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        torch.empty(500)
        del second

    assert peak_memory(call, torch.device("cpu")) in range(12_000, 12_400)  # blocks are rounded up to 64 bytes


def test_timed_is_a_median_of_at_least_one_run() -> None:
    delays = iter([0.05, 0.0, 0.0, 0.0])
    timing = timed(lambda: time.sleep(next(delays)), seconds=10, max_runs=3)
    assert timing.runs == 3
    assert timing.seconds < 0.05  # the slow first call warmed up
    assert timed(lambda: None, seconds=0).runs == 1


def test_files(tmp_path: Path) -> None:
    rows, here = list(compare(["gla"], [16], **TINY)), machine()
    for write, name in ((write_csv, "a/x.csv"), (write_json, "a/x.json"), (picture, "a/x.png")):
        write(tmp_path / name, rows, here)
    with (tmp_path / "a" / "x.csv").open() as stream:
        (line,) = csv.DictReader(stream)
    assert (line["mechanism"], line["tokens"], line["torch"]) == ("gated_linear_attention", "16", torch.__version__)
    assert json.loads((tmp_path / "a" / "x.json").read_text())["rows"][0]["tokens"] == 16
    assert (tmp_path / "a" / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="cannot write"):
        write_csv(tmp_path / "a" / "x.csv" / "y.csv", rows, here)
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["x.csv", "x.json", "x.png"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mechanisms": []}, "mechanisms"),
        ({"mechanisms": ["glaa"]}, "did you mean 'gla'"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [0]}, "tokens"),
        ({"heads": 0}, "heads"),
        ({"budget": -1}, "budget"),
    ],
)
def test_bad_arguments(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(compare(**{"mechanisms": ["gla"], "tokens": [16], **change}))


def test_sizes_for_people() -> None:
    assert [size(n) for n in (None, 0, 999, 1000, 65536, 999_999, 2e9)] == [
        "–", "0 B", "999 B", "1 kB", "65.5 kB", "1 MB", "2 GB",
    ]  # fmt: skip
