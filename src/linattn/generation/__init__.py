"""From a model to text: sampling, batched and streaming generation."""

from __future__ import annotations

from linattn.generation.decode import Decoder, Decoding, compile_decode
from linattn.generation.generate import Stream, generate, stream
from linattn.generation.sampling import Sampler
from linattn.generation.text import text_pieces

__all__ = ["Decoder", "Decoding", "Sampler", "Stream", "compile_decode", "generate", "stream", "text_pieces"]
