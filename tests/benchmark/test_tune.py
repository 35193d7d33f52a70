"""What the tuner makes of its measurements."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from linattn.backends.triton import LARGEST, table
from linattn.backends.triton.table import Settings
from linattn.benchmark import tune
from linattn.benchmark.launches import draw, recorded
from linattn.recurrence import Decay


def test_the_fastest_is_so_on_average() -> None:
    large, small, never = Settings(64, 64, 4, 1, 1), Settings(64, 64, 4, 2, 2), Settings(64, 64, 8, 1, 1)
    times = {large: [100.0, 50.0, 3.0], small: [110.0, 40.0, 1.0], never: [200.0, 50.0, 4.0]}
    assert tune.fastest({s: [(False, ms) for ms in found] for s, found in times.items()})[:4] == small[:4]
    times[small][1] = 80.0
    timed = {s: list(zip((False, False, True), found, strict=True)) for s, found in times.items()}
    assert tune.fastest(timed) == Settings(64, 64, 4, stages=1, deep=2)


def test_every_row_of_the_table_is_timed() -> None:
    from linattn.backends.triton import launch

    rows = set()
    for decay, _ in tune.GATES.values():
        for dtype in LARGEST:
            for size in (64, 128, 256):
                if size <= LARGEST[dtype]:
                    x, do, dS = draw(decay, dtype, {"B": 1, "T": 70, "H": 1, "K": size, "V": size}, device="meta")
                    with recorded(run=False) as found:
                        launch.forward(x)
                        launch.backward(x, do, dS, decay is not Decay.NONE)
                    rows |= {tune.row(each, dtype) for each in found if each.kernel.__name__ == "sweep"}
    assert rows == {(dtype, *key) for dtype, keys in table.TABLE.items() for key in keys}


def test_candidates_fit_their_heads() -> None:
    every = list(tune.points([torch.bfloat16, torch.float32], [64, 256]))
    assert {point.settings.block for point in every if point.size == 64} == {64}
    assert not [point for point in every if point.dtype == torch.float32 and point.size == 256]
