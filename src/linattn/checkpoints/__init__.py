"""Models on disk: ``save``, ``load``, and the tokenizer that a checkpoint remembers."""

from linattn.checkpoints.native import load, load_tokenizer, save
from linattn.checkpoints.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "load", "load_tokenizer", "save"]
