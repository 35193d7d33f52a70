"""One file a mechanism: equation, source, recurrence, function, layer. Importing this package fills the registry."""

from linattn.mechanisms.delta_rule import DeltaNet, delta_rule
from linattn.mechanisms.gated_delta_product import GatedDeltaProduct, gated_delta_product
from linattn.mechanisms.gated_delta_rule import GatedDeltaNet, gated_delta_rule
from linattn.mechanisms.gated_linear_attention import GatedLinearAttention, gated_linear_attention
from linattn.mechanisms.hgrn import HGRN, hgrn
from linattn.mechanisms.hgrn2 import HGRN2, hgrn2
from linattn.mechanisms.kimi_delta_attention import KimiDeltaAttention, kimi_delta_attention
from linattn.mechanisms.lightning_attention import LightningAttention, lightning_attention
from linattn.mechanisms.linear_attention import LinearAttention, linear_attention
from linattn.mechanisms.log_linear_gated_delta_rule import (
    LogLinearGatedDeltaNet,
    LogLinearState,
    log_linear_gated_delta_rule,
)
from linattn.mechanisms.log_linear_mamba2 import LogLinearMamba2, log_linear_mamba2
from linattn.mechanisms.mamba import Mamba, mamba
from linattn.mechanisms.mamba2 import Mamba2, mamba2
from linattn.mechanisms.mamba3 import Mamba3, Mamba3State, mamba3
from linattn.mechanisms.mlstm import MLSTM, MLSTMState, mlstm
from linattn.mechanisms.parallel_heads import ParallelHeads
from linattn.mechanisms.retention import Retention, retention
from linattn.mechanisms.rg_lru import RGLRU, rg_lru
from linattn.mechanisms.rwkv4 import RWKV4, RWKV4State, rwkv4
from linattn.mechanisms.rwkv5 import RWKV5, rwkv5
from linattn.mechanisms.rwkv6 import RWKV6, rwkv6
from linattn.mechanisms.rwkv7 import RWKV7, rwkv7
from linattn.mechanisms.softmax_attention import KVCache, SoftmaxAttention, softmax_attention

__all__ = [
    "HGRN",
    "HGRN2",
    "MLSTM",
    "RGLRU",
    "RWKV4",
    "RWKV5",
    "RWKV6",
    "RWKV7",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "KVCache",
    "KimiDeltaAttention",
    "LightningAttention",
    "LinearAttention",
    "LogLinearGatedDeltaNet",
    "LogLinearMamba2",
    "LogLinearState",
    "MLSTMState",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "Mamba3State",
    "ParallelHeads",
    "RWKV4State",
    "Retention",
    "SoftmaxAttention",
    "delta_rule",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_linear_attention",
    "hgrn",
    "hgrn2",
    "kimi_delta_attention",
    "lightning_attention",
    "linear_attention",
    "log_linear_gated_delta_rule",
    "log_linear_mamba2",
    "mamba",
    "mamba2",
    "mamba3",
    "mlstm",
    "retention",
    "rg_lru",
    "rwkv4",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "softmax_attention",
]
