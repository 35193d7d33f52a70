"""From a model to text: sampling, batched and streaming generation."""

from __future__ import annotations

from linattn.generation.generate import Stream, generate, stream
from linattn.generation.sampling import Sampler
from linattn.generation.text import text_pieces

__all__ = ["Sampler", "Stream", "generate", "stream", "text_pieces"]
