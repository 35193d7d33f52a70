"""How good a model is."""

from linattn.evaluation.bits_per_byte import Evaluation, evaluate, next_token_loss

__all__ = ["Evaluation", "evaluate", "next_token_loss"]
