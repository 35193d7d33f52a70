"""Models on disk: ``save``, ``load``, and the tokenizer that a checkpoint remembers."""

from linattn.checkpoints.formats import load, load_tokenizer, save
from linattn.checkpoints.tokenizer import ByteTokenizer, HuggingFaceTokenizer, RwkvTokenizer, Tokenizer, named_tokenizer

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "RwkvTokenizer",
    "Tokenizer",
    "load",
    "load_tokenizer",
    "named_tokenizer",
    "save",
]
