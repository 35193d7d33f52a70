"""`linattn explain`: which backend a call would run on, and why not the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch
import tyro

from linattn import engine, registry
from linattn.cli.command import Command
from linattn.cli.output import Output


@dataclass(frozen=True, kw_only=True)
class Explain(Command):
    """Say which backend serves a mechanism, and why the others don't."""

    mechanism: Annotated[str, tyro.conf.Positional]
    """Name or alias."""
    device: str = "cpu"
    """Where the tensors would be."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Their dtype."""
    mode: str = "auto"
    """chunkwise, recurrent, parallel, or auto."""
    backend: str = "auto"
    """The backend asked for."""

    def run(self, output: Output) -> int:
        try:
            device = torch.device(self.device)  # it need not be here
        except RuntimeError as error:
            raise ValueError(f"device: got {self.device!r}, wanted a kind of device such as cpu or cuda") from error
        dtype = getattr(torch, self.dtype)
        explanation = engine.explain(self.mechanism, device=device, dtype=dtype, mode=self.mode, backend=self.backend)
        name = registry.get(self.mechanism).name
        output.emit({"mechanism": name, **asdict(explanation)})
        output.say(f"{name}: {explanation}.")
        return 0
