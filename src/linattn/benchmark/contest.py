"""Ours beside peers: each takes its turn in every round, and is measured for its error, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from linattn._checks import fail
from linattn.benchmark.measure import timed


@dataclass(frozen=True)
class Entrant:
    """What does the work: ``call`` does ``units`` of it; ``error`` is its largest relative error against float64."""

    call: Callable[[], object]
    units: float = 1.0
    error: Callable[[], float] | None = None


Opening = Callable[[], Entrant]
"""Makes an entrant ready; ModuleNotFoundError: it is not installed."""

Clock = Callable[[Callable[[], object]], float]
"""Calls, and returns the seconds that it took."""


@dataclass(frozen=True)
class Contest:
    """One piece of work, done by ours and by peers in the same rounds.

    ``rate``: "ms", time of a unit of work, or "tokens/s", units a second. ``targets``: how many times faster than a
    peer ours is meant to be. ``seconds``: what an entrant may use before it sits the later rounds out.
    """

    title: str
    work: str
    ours: Opening
    peers: Mapping[str, Opening]
    targets: Mapping[str, float] = field(default_factory=dict)
    rate: str = "ms"
    seconds: float = 1.0


@dataclass(frozen=True)
class Line:
    """Ours beside one peer; None where ``note`` says why.

    ``ours`` and ``theirs``: medians of ``runs`` and ``peer_runs`` runs, in ``rate``. ``ratio``: how many times faster
    ours is, ``target``: is meant to be. ``error`` and ``peer_error``: largest relative errors against float64.
    """

    title: str
    work: str
    peer: str
    rate: str
    ours: float | None
    theirs: float | None
    ratio: float | None
    target: float | None
    error: float | None
    peer_error: float | None
    runs: int
    peer_runs: int
    note: str


def once(call: Callable[[], object]) -> float:
    """Call; the seconds that it took."""
    return timed(call, seconds=0, warm=True).seconds


def hold(
    contests: Iterable[Contest],
    *,
    budget: float,
    rounds: int = 7,
    clock: Clock = once,
    now: Callable[[], float] = time.perf_counter,
) -> Iterator[list[Line]]:
    """Hold the contests one after the other; the lines of each as soon as it is over.

    An entrant that is not installed, or fails, is left out and noted. Its first call is a trial, unless it takes the
    contest's ``seconds``, which makes it the measurement.

    Args:
        budget: seconds for all together. When they are over, what isn't begun is left out and noted.
        rounds: most timed calls of an entrant.
        clock: times a call. now: the time, of which the budget is.

    Raises ValueError for a budget or rounds that are not positive.
    """
    for name, value in (("budget", budget), ("rounds", rounds)):
        if not value > 0:
            raise fail(name, value, "a positive number")
    end = now() + budget
    return (_hold(contest, rounds, clock, lambda: now() < end) for contest in contests)


@dataclass
class _Score:
    entrant: Entrant | None = None
    error: float | None = None
    times: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Of a unit."""
        return statistics.median(self.times) / self.entrant.units if self.entrant and self.times else None


LATE = "not measured: the budget of seconds is used up"


def _hold(contest: Contest, rounds: int, clock: Clock, in_time: Callable[[], bool]) -> list[Line]:
    scores = {
        name: _begin(opening, contest.seconds, clock) if in_time() else _Score(note=LATE)
        for name, opening in {"": contest.ours, **contest.peers}.items()
    }
    for _ in range(rounds):
        for score in scores.values():
            more = in_time() and sum(score.times) < contest.seconds
            if score.entrant and not score.note and (more or not score.times):
                try:
                    score.times.append(clock(score.entrant.call))
                except Exception as error:
                    score.note = _why(error)
    ours = scores.pop("")
    return [_line(contest, name, ours, score) for name, score in scores.items()]


def _begin(opening: Opening, seconds: float, clock: Clock) -> _Score:
    score = _Score()
    try:
        entrant = opening()
        score.error = entrant.error() if entrant.error else None
        first = clock(entrant.call)
    except Exception as error:  # whatever a peer raises, the others are still to be measured
        score.note = _why(error)
    else:
        score.entrant = entrant
        score.times += [first] if first >= seconds else []
    return score


def _why(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name or error}"
    return f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _line(contest: Contest, peer: str, ours: _Score, theirs: _Score) -> Line:
    mine, other = ours.seconds, theirs.seconds
    notes = (LATE,) if ours.note == LATE else (ours.note and f"ours {ours.note}", theirs.note)
    return Line(
        contest.title, contest.work, peer, contest.rate, _rate(contest.rate, mine), _rate(contest.rate, other),
        None if mine is None or other is None else other / mine, contest.targets.get(peer), ours.error, theirs.error,
        len(ours.times), len(theirs.times), "; ".join(filter(None, notes)),
    )  # fmt: skip


def _rate(rate: str, seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds if rate == "ms" else 1 / seconds
