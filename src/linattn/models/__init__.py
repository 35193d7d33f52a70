"""One decoder, configured by a pattern of mechanisms."""

from __future__ import annotations

from linattn.models.config import ModelConfig, parse_pattern
from linattn.models.decoder import BlockState, LanguageModel, count_parameters, state_bytes
from linattn.models.presets import preset
from linattn.models.size import state_size

__all__ = [
    "BlockState",
    "LanguageModel",
    "ModelConfig",
    "count_parameters",
    "parse_pattern",
    "preset",
    "state_bytes",
    "state_size",
]
