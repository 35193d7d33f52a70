"""One decoder, configured by a pattern of mechanisms."""

from __future__ import annotations

from linattn.models.config import ModelConfig, parse_pattern
from linattn.models.decoder import LanguageModel, count_parameters, state_bytes

__all__ = ["LanguageModel", "ModelConfig", "count_parameters", "parse_pattern", "state_bytes"]
