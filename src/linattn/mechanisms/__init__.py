"""One file a mechanism: equation, source, recurrence, function, layer. Importing this package fills the registry."""

from linattn.mechanisms.delta_rule import DeltaNet, delta_rule
from linattn.mechanisms.gated_delta_rule import GatedDeltaNet, gated_delta_rule
from linattn.mechanisms.gated_linear_attention import GatedLinearAttention, gated_linear_attention
from linattn.mechanisms.linear_attention import LinearAttention, linear_attention
from linattn.mechanisms.mamba2 import Mamba2, mamba2
from linattn.mechanisms.retention import Retention, retention
from linattn.mechanisms.softmax_attention import KVCache, SoftmaxAttention, softmax_attention

__all__ = [
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KVCache",
    "LinearAttention",
    "Mamba2",
    "Retention",
    "SoftmaxAttention",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "linear_attention",
    "mamba2",
    "retention",
    "softmax_attention",
]
