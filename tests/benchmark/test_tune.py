"""What the tuner makes of its measurements."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from linattn import engine
from linattn.backends.triton import LARGEST, launch, table
from linattn.backends.triton.table import Settings
from linattn.benchmark import tune
from linattn.benchmark.launches import recorded
from linattn.engine import NormalizedState
from linattn.recurrence import Decay, Normalizer, Recurrence


def test_the_fastest_is_so_on_average() -> None:
    large, small, never = Settings(64, 64, 4, 1, 1), Settings(64, 64, 4, 2, 2), Settings(64, 64, 8, 1, 1)
    times = {large: [100.0, 50.0, 3.0], small: [110.0, 40.0, 1.0], never: [200.0, 50.0, 4.0]}
    assert tune.fastest({s: [(False, ms) for ms in found] for s, found in times.items()})[:4] == small[:4]
    times[small][1] = 80.0
    timed = {s: list(zip((False, False, True), found, strict=True)) for s, found in times.items()}
    assert tune.fastest(timed) == Settings(64, 64, 4, stages=1, deep=2)


def test_every_row_of_the_table_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    monkeypatch.setattr(launch, "SHORTEST", 20)  # so that rows are cut, as long ones are
    rows = set()
    for gates, (decay, strength) in tune.GATES.items():
        for dtype in LARGEST:
            for size in (64, 128, 256):
                if size <= LARGEST[dtype]:
                    sizes = {"B": 1, "T": 70, "H": 1, "K": size, "V": size}
                    with recorded(run=False) as found:
                        tune.step(*tune.inputs_of(decay, dtype, sizes, "meta", gates == "summed", strength))
                    point = tune.Point(dtype, gates, size, Settings(64, 64, 4, 1, 1))
                    rows |= {tune.row(each, point) for each in found if each.kernel.__name__ == "sweep"}
    assert rows == {(dtype, *key) for dtype, keys in table.TABLE.items() for key in keys}


@pytest.mark.parametrize("summed", [False, True])
def test_the_truth_is_what_is_asked_for(summed: bool) -> None:
    """By the engine's own choice, in float32."""
    sizes = {"B": 1, "T": 70, "H": 2, "K": 16, "V": 16}
    x, by, do, dS = tune.inputs_of(Decay.TOKEN_HEAD, torch.float32, sizes, "cpu", summed, 1 / 16)
    given = {"g": x.g, "state": x.state}
    recurrence = Recurrence(decay=Decay.TOKEN_HEAD)
    if by is not None:
        recurrence = Recurrence(decay=Decay.TOKEN_HEAD, normalizer=Normalizer.SUM)
        given |= {"state": NormalizedState(x.state, by.z), "weight": by.weight, "m": by.m}
    o, _ = engine.matrix(recurrence, x.q, x.k, x.v, **given)
    assert (o - tune.truth(x, by, do, dS)["o"]).norm() <= 1e-5 * o.norm()


def test_candidates_fit_their_heads() -> None:
    every = list(tune.points([torch.bfloat16, torch.float32], [64, 256]))
    assert {point.settings.block for point in every if point.size == 64} == {64}
    assert not [point for point in every if point.dtype == torch.float32 and point.size == 256]
