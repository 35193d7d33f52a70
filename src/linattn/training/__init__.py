"""Training: a corpus, a config, a loop that yields events, and the picture of its loss."""

from linattn.training.config import TrainConfig
from linattn.training.corpus import Corpus, Text, load_corpus
from linattn.training.events import Evaluated, Event, Finished, Interrupted, Saved, Step, read_metrics
from linattn.training.loop import Trainer
from linattn.training.plot import plot_loss

__all__ = [
    "Corpus",
    "Evaluated",
    "Event",
    "Finished",
    "Interrupted",
    "Saved",
    "Step",
    "Text",
    "TrainConfig",
    "Trainer",
    "load_corpus",
    "plot_loss",
    "read_metrics",
]
