"""Ours beside peers: what is timed, what is left out and why, and what is written."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from linattn.benchmark import __main__ as runner
from linattn.benchmark import compare, kernels, report
from linattn.benchmark.contest import Contest, Entrant, Line, hold
from linattn.benchmark.measure import Conditions, machine, multiplying, reading


class Clock:
    """Time that passes by itself only: an entrant's call names the seconds that it takes."""

    def __init__(self) -> None:
        self.time = 0.0
        self.calls: list[object] = []

    def __call__(self, call: Callable[[], object]) -> float:
        self.calls.append(call)
        seconds = call()
        assert isinstance(seconds, float)
        self.time += seconds
        return seconds

    def held(self, *contests: Contest, budget: float = 1000.0, rounds: int = 5) -> list[list[Line]]:
        return list(hold(contests, budget=budget, rounds=rounds, clock=self, now=lambda: self.time))


def taking(*seconds: float, units: float = 1.0, error: float | None = None) -> Callable[[], Entrant]:
    """Opens an entrant whose calls take these seconds, the last one for ever."""
    times = itertools.chain(seconds, itertools.repeat(seconds[-1]))
    return lambda: Entrant(lambda: next(times), units, None if error is None else lambda: error)


def test_a_line_is_the_medians_and_the_errors_of_both() -> None:
    ours = taking(9.0, 0.01, 0.03, 0.02, error=1e-7)  # the first call is a trial
    ((line,),) = Clock().held(
        Contest("t", "w", ours, {"p": taking(0.08, units=2, error=1e-6)}, {"p": 3}, seconds=10), rounds=3
    )
    assert (line.ours, line.theirs, line.ratio) == pytest.approx((20, 40, 2))
    assert (line.target, line.error, line.peer_error, line.runs, line.peer_runs) == (3, 1e-7, 1e-6, 3, 3)
    assert (line.title, line.work, line.peer, line.rate, line.note) == ("t", "w", "p", "ms", "")


def test_rates_are_units_a_second() -> None:
    contest = Contest("t", "w", taking(2.0, units=64), {"p": taking(8.0, units=64)}, rate="tokens/s", seconds=100)
    ((line,),) = Clock().held(contest)
    assert (line.ours, line.theirs, line.ratio) == (32, 8, 4)


def test_entrants_take_turns_and_the_slow_sit_out() -> None:
    clock, times = Clock(), {"a": 0.1, "b": 0.5, "c": 7.0}
    order: list[str] = []

    def entrant(name: str) -> Callable[[], Entrant]:
        return lambda: Entrant(lambda: order.append(name) or times[name])

    ((b, c),) = clock.held(Contest("t", "w", entrant("a"), {"b": entrant("b"), "c": entrant("c")}, seconds=1), rounds=4)
    assert "".join(order) == "abc" + "ab" + "ab" + "a" + "a"  # c's trial took its second and is its measurement
    assert (b.runs, b.peer_runs, c.peer_runs) == (4, 2, 1)
    assert c.theirs == 7000


def missing() -> Entrant:
    raise ModuleNotFoundError("No module named 'peer'", name="peer")


def failing() -> Entrant:
    raise RuntimeError("first line\nsecond line")


def fails_later() -> Entrant:
    answers = iter([0.1, 0.1])
    return Entrant(lambda: next(answers))


@pytest.mark.parametrize(
    ("peer", "note"),
    [
        (missing, "not installed: peer"),
        (failing, "failed: RuntimeError: first line"),
        (lambda: Entrant(lambda: 1 / 0), "failed: ZeroDivisionError: division by zero"),
        (lambda: Entrant(lambda: 0.1, error=lambda: 1 / 0), "failed: ZeroDivisionError: division by zero"),
        (fails_later, "failed: StopIteration: "),
    ],
)
def test_a_peer_that_cannot_is_left_out_and_the_others_are_measured(peer: Callable[[], Entrant], note: str) -> None:
    ((bad, good),) = Clock().held(Contest("t", "w", taking(0.1), {"bad": peer, "good": taking(0.2)}))
    assert bad.note == note
    assert bad.ours == pytest.approx(100)
    assert (good.ratio, good.note) == (pytest.approx(2), "")


def test_ours_that_fails_is_said_on_every_line() -> None:
    (lines,) = Clock().held(Contest("t", "w", failing, {"a": taking(0.1), "b": missing}))
    assert [line.note for line in lines] == [
        "ours failed: RuntimeError: first line", "ours failed: RuntimeError: first line; not installed: peer",
    ]  # fmt: skip
    assert [line.ratio for line in lines] == [None, None]
    assert lines[0].theirs == pytest.approx(100)


def test_what_the_budget_does_not_reach_is_named() -> None:
    clock, opened = Clock(), []

    def late() -> Entrant:
        opened.append("late")
        raise AssertionError

    first = Contest("t", "first", taking(3.0), {"p": taking(4.0), "late": late}, seconds=1)
    (one, two), (three,) = clock.held(first, Contest("t", "second", late, {"p": late}), budget=5)
    assert (one.ratio, one.note) == (pytest.approx(4 / 3), "")
    assert (two.theirs, two.note) == (None, "not measured: the budget of seconds is used up")
    assert three.note == "not measured: the budget of seconds is used up"
    assert not opened


def test_what_was_opened_in_time_is_measured_once() -> None:
    contest = Contest("t", "w", taking(0.5), {"p": taking(0.6)}, seconds=1)
    ((line,),) = Clock().held(contest, budget=1)
    assert (line.runs, line.peer_runs, line.note) == (1, 1, "")


@pytest.mark.parametrize("change", [{"budget": 0.0}, {"budget": -1.0}, {"rounds": 0}])
def test_bad_arguments(change: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))}: got .*positive"):
        hold([], **{"budget": 1.0, **change})


def test_lines_as_text() -> None:
    values = {"title": "t", "work": "w", "peer": "p", "rate": "ms", "ours": 1.234567, "theirs": 2.0, "ratio": 1.62}
    rest = {"target": 2.0, "error": 1e-7, "peer_error": None, "runs": 7, "peer_runs": 1, "note": ""}
    text = report.line(Line(**values, **rest))
    assert text.split() == "w p 1.235 2 1.62× ≥ 2× 1e-07 –".split()
    assert len(text) == len(report.LINES) < 110
    left_out = Line(**{**values, **rest, "theirs": None, "ratio": None, "note": "not installed: x"})
    assert report.line(left_out).split("1.235")[1] == " – not installed: x"


@pytest.mark.parametrize("training", [False, True])
def test_every_kind_of_recurrence_is_right_and_so_are_its_peers(training: bool) -> None:
    contests = list(kernels.recurrences(16, tokens=48, heads=2, training=training))
    assert [contest.work for contest in contests] == list(kernels.TRAINED if training else kernels.KINDS)
    for lines in hold(contests, budget=60, rounds=1):
        for line in lines:
            if line.peer == "fast-transformers" and "not installed" in line.note:
                continue
            assert line.note == ""
            assert line.ratio > 0
            assert line.error < 1e-5
            assert line.peer_error is None or line.peer_error < 1e-5
    peers = {peer for contest in contests for peer in contest.peers}
    assert ("matrix product" in peers) is not training


def test_targets_are_of_peers_that_are_there() -> None:
    for size in (64, 128):
        for contest in kernels.recurrences(size):
            assert contest.targets.keys() <= contest.peers.keys()


def test_mamba_beside_transformers() -> None:
    pytest.importorskip("transformers")
    contests = [kernels.selective(tokens=20, channels=8, states=4), kernels.layer(tokens=20, d_model=16)]
    for (line,) in hold(contests, budget=60, rounds=1):
        assert line.note == ""
        assert line.error < 1e-5
        assert line.peer_error < 1e-5


def test_the_conditions_are_measured() -> None:
    (product, operations), (sums, size) = multiplying(8), reading()
    assert product().shape == (8, 8)
    assert operations == 2 * 8**3
    assert sums().numel() ** 2 * 4 == size
    here = Conditions.of(machine(), "peer 1.2")
    assert here.gemm_gflops > 0 < here.read_gb_s
    assert "GFLOP/s" in str(here)
    assert "GB/s reading memory; peer 1.2" in str(here)
    assert here.slug == machine().slug


def few(tokens: int) -> Iterator[Contest]:
    yield Contest("first title", f"T={tokens}", lambda: Entrant(lambda: None), {"p": lambda: Entrant(lambda: None)})
    yield Contest("second title", "other", lambda: Entrant(lambda: None), {"q": missing})


@pytest.fixture
def few_contests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "contests", few)
    monkeypatch.setattr(runner, "compare", lambda names, *rest, **sizes: compare(["gla"], *rest, **sizes))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("few_contests")
def test_the_runner_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", "32", "--rounds", "2", "--threads", "1", "--budget", "60", "--out", str(tmp_path)]
    assert runner.main(arguments) == 0
    shown = capsys.readouterr().out
    for words in ("GFLOP/s", "GB/s", "first title, ms", "T=32", "not installed: peer", "-peers.csv"):
        assert words in shown
    (file,) = tmp_path.glob("*-1-threads-peers.csv")
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["work"], row["peer"], row["note"]) for row in rows] == [
        ("T=32", "p", ""), ("other", "q", "not installed: peer"),
    ]  # fmt: skip
    assert float(rows[0]["ratio"]) > 0
    assert rows[1]["ratio"] == ""
    assert float(rows[0]["gemm_gflops"]) > 0
    assert rows[0]["torch"] == torch.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [file.name, file.name.replace("peers", "mechanisms")]
    )


@pytest.mark.usefixtures("few_contests")
def test_the_runner_with_a_choice_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--only", "second", "--threads", "1", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "second title" in shown
    assert "first title" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tokens", "rounds", "threads", "budget"])
def test_the_runner_refuses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        runner.main([f"--{name}", "0"])
    assert f"--{name}: got 0, wanted a positive number" in capsys.readouterr().err


def test_all_contests_are_there() -> None:
    titles = dict.fromkeys(contest.title for contest in runner.contests(4096))
    assert len(titles) == 7
    assert all(len(contest.work) < 35 for contest in runner.contests(4096))
