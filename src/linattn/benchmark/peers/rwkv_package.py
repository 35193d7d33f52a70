"""The package ``rwkv`` by RWKV's author: RWKV-7 on a CPU."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from linattn._checks import fail
from linattn.benchmark.peers import Reader, Stepper
from linattn.checkpoints import save
from linattn.models import LanguageModel

PRECISIONS: Mapping[str, Any] = {"fp32": "cpu fp32", "bf16": "cpu bf16"}


def reader(model: LanguageModel, folder: Path, precision: str) -> Reader:
    """Its model with our weights; one sequence at a time."""
    # Read when it is imported.
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_CUDA_ON": "0"}
    with contextlib.redirect_stdout(io.StringIO()):
        from rwkv.model import RWKV

        file = folder / "rwkv.pth"
        if not file.exists():
            save(file, model, layout="rwkv")
        theirs: Any = RWKV(model=str(file.with_suffix("")), strategy=PRECISIONS[precision])
    zero = theirs.generate_zero_state()  # in the dtype of the model that was made last

    def read(ids: Tensor) -> tuple[Tensor, Stepper]:
        if len(ids) != 1:
            raise fail("ids", f"a batch of {len(ids)}", "1: the package reads one sequence at a time")
        state = [part.clone() for part in zero]
        logits, state = theirs.forward(ids[0].tolist(), state)

        def step(ids: Tensor) -> Tensor:
            nonlocal state
            logits, state = theirs.forward(int(ids), state)
            return logits[None]

        return logits[None], step

    return read
