"""Other libraries' GPU kernels for the benchmark's cases. None is needed: what isn't installed is left out.

A peer takes the tensors of a case by the names that they have there, and returns its output in its own layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Call = Callable[..., Any]
"""A peer's own function: the case's tensors by name -> its output, alone or first of a tuple."""


@dataclass(frozen=True)
class Peer:
    """``load`` imports the library and returns a function of a case's tensors.

    ``distribution``: where its version is found. ``heads_first``: it wants [B, H, T, ...]. ``same``: it computes the
    case's function, so that its error can be told; softmax attention does not. ``trains``: it has a backward.
    """

    name: str
    distribution: str
    load: Callable[[], Call]
    heads_first: bool = False
    same: bool = True
    trains: bool = True

    @property
    def package(self) -> str:
        """The package that it is imported from."""
        return {"fla-core": "fla"}.get(self.distribution, self.distribution)

    @property
    def installed(self) -> bool:
        """Whether the package is there; it need not work."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """Of the distribution."""
        return f"{self.distribution} {metadata.version(self.distribution)}"

    def layout(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A case's tensors as the peer wants them, without history."""
        return {name: self.turned(x.detach()).contiguous() for name, x in tensors.items()}

    def turned(self, x: Tensor) -> Tensor:
        """From the case's layout to the peer's, or back."""
        return x.transpose(1, 2) if self.heads_first and x.dim() > 2 else x


def first(result: Any) -> Tensor:
    """The output, of a function that may return states, too."""
    return result[0] if isinstance(result, tuple) else result


def shorten_autotuning(repeat: float) -> None:
    """Let Triton's search for launch settings time each one for so many milliseconds, not a tenth of a second."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def bench(call: Callable[[], object], quantiles: Any) -> Any:
        return do_bench(call, warmup=repeat / 4, rep=repeat, quantiles=quantiles)

    Autotuner.do_bench = property(lambda tuner: tuner._do_bench or bench)


def _fla(module: str, function: str, **options: Any) -> Callable[[], Call]:
    def load() -> Call:
        found = getattr(importlib.import_module(f"fla.ops.{module}"), function)
        return lambda **tensors: found(**tensors, **options)

    return load


def _renamed(load: Callable[[], Call], **names: str) -> Callable[[], Call]:
    """``load``, for tensors that are called otherwise: ours="theirs"."""

    def renamed() -> Call:
        call = load()
        return lambda **tensors: call(**{names.get(name, name): x for name, x in tensors.items()})

    return renamed


def _hgrn2() -> Call:
    from fla.ops.gla import chunk_gla

    return lambda q, v, g: chunk_gla(q, (1 - g.float().exp()).to(q.dtype), v, g)


def _ssd() -> Call:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return lambda **tensors: mamba_chunk_scan_combined(**tensors, chunk_size=256)


def _mlstm() -> Call:
    from mlstm_kernels.torch import get_mlstm_kernel

    kernel = get_mlstm_kernel("chunkwise--triton_xl_chunk")
    return lambda **tensors: kernel(**tensors, return_last_states=False, chunk_size=128)


def _softmax() -> Call:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


_STATE = {"output_final_state": True}
_LINEAR = Peer("fla chunk_linear_attn", "fla-core", _fla("linear_attn", "chunk_linear_attn", normalize=False))
_NORMALIZED = Peer("fla chunk_linear_attn", "fla-core", _fla("linear_attn", "chunk_linear_attn", normalize=True))
_SOFTMAX = Peer("torch softmax attention", "torch", _softmax, heads_first=True, same=False)
_FIXED = Peer("fla chunk_simple_gla", "fla-core", _renamed(_fla("simple_gla", "chunk_simple_gla"), g="g_gamma"))
_SCALAR = Peer("fla chunk_simple_gla", "fla-core", _fla("simple_gla", "chunk_simple_gla"))
_VECTOR = Peer("fla chunk_gla", "fla-core", _fla("gla", "chunk_gla"))
_HGRN2 = Peer("fla chunk_gla", "fla-core", _hgrn2)
_RWKV6 = Peer("fla chunk_rwkv6", "fla-core", _renamed(_fla("rwkv6", "chunk_rwkv6"), q="r", g="w"))
_SSD = Peer("mamba_ssm SSD", "mamba_ssm", _ssd)
_MLSTM = Peer("mlstm_kernels xl_chunk", "mlstm_kernels", _mlstm, heads_first=True)
_STEP = Peer(
    "fla fused_recurrent_simple_gla", "fla-core",
    _renamed(_fla("simple_gla", "fused_recurrent_simple_gla", **_STATE), state="initial_state"), trains=False,
)  # fmt: skip

PEERS: dict[str, tuple[Peer, ...]] = {
    "no decay": (_LINEAR, _SOFTMAX),
    "linear attention, normalised": (_NORMALIZED,),
    "fixed decay (RetNet)": (_FIXED,),
    "scalar decay": (_SCALAR,),
    "Mamba-2": (_SSD,),
    "vector decay (GLA)": (_VECTOR,),
    "GLA, 4 heads of 128 and 256": (_VECTOR,),
    "HGRN2": (_HGRN2,),
    "RWKV-6": (_RWKV6,),
    "mLSTM": (_MLSTM,),
    "mLSTM, 4 heads of 256 and 512": (_MLSTM,),
    "long, scalar decay": (_SCALAR,),
    "small, scalar decay": (_SCALAR,),
    "small, vector decay": (_VECTOR,),
    "prompt of 16": (_STEP,),
    "block of 16, batch 64": (_STEP,),
    "step, batch 1": (_STEP,),
    "step, batch 128": (_STEP,),
}
"""Of each case, by its name in :mod:`linattn.benchmark.gpu`."""
