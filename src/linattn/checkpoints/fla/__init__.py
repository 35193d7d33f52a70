"""The models of flash-linear-attention as it stores them, by their ``model_type``."""

from __future__ import annotations

from linattn.checkpoints.fla.delta_net import DELTA_NET
from linattn.checkpoints.fla.gated_deltanet import GATED_DELTANET
from linattn.checkpoints.fla.gla import GLA
from linattn.checkpoints.fla.hgrn2 import HGRN2
from linattn.checkpoints.fla.linear_attn import LINEAR_ATTN
from linattn.checkpoints.fla.retnet import RETNET
from linattn.checkpoints.fla.rwkv6 import RWKV6
from linattn.checkpoints.fla.rwkv7 import RWKV7
from linattn.checkpoints.layout import Layout

LAYOUTS: dict[str, Layout] = {
    "delta_net": DELTA_NET,
    "gated_deltanet": GATED_DELTANET,
    "gla": GLA,
    "hgrn2": HGRN2,
    "linear_attn": LINEAR_ATTN,
    "retnet": RETNET,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
}
