"""The training loop: interrupted and resumed is uninterrupted, and no failure costs a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linattn import checkpoints
from linattn.checkpoints import ByteTokenizer, HuggingFaceTokenizer
from linattn.checkpoints.native import steps
from linattn.models import LanguageModel, ModelConfig
from linattn.training import (
    Corpus,
    Evaluated,
    Event,
    Finished,
    Interrupted,
    Saved,
    Step,
    TrainConfig,
    Trainer,
    load_corpus,
    read_metrics,
)

CONFIG = TrainConfig(
    steps=8, batch_size=4, sequence_length=16, evaluate_every=3, evaluation_tokens=64, checkpoint_every=4, device="cpu"
)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text.txt").write_text("".join(f"line {n} and {n * n}\n" for n in range(400)))
    return load_corpus(tmp_path / "text.txt")


def model(vocab_size: int = 256, pattern: str = "gated_delta_rule") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocab_size=vocab_size, d_model=32, num_layers=1, pattern=pattern))


def interrupted(trainer: Trainer, step: int) -> list[Event]:
    """Run until a Ctrl-C after ``step`` steps; for 0, while the training is being set up."""
    if step == 0:
        train = trainer.model.train
        trainer.model.train = lambda: (signal.raise_signal(signal.SIGINT), train())
    events = []
    for event in trainer.run():
        events.append(event)
        if isinstance(event, Step) and event.step == step:
            signal.raise_signal(signal.SIGINT)
    return events


def memory(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that the future of a training depends on."""
    return trainer.model.state_dict() | trainer._memory() | {"step": torch.tensor(trainer.step)}


def same(a: Trainer, b: Trainer) -> bool:
    left, right = memory(a), memory(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def curve(run: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    clock = {"tokens_per_second", "elapsed", "seconds_left"}
    return [{key: value for key, value in line.items() if key not in clock} for line in read_metrics(run)]


BUDGETS = {
    "steps": CONFIG,
    "tokens": replace(CONFIG, steps=None, tokens=450),
    "accumulated": replace(CONFIG, gradient_accumulation=2),
    "bfloat16": replace(CONFIG, precision="bfloat16"),
}


@pytest.mark.parametrize(
    ("kind", "moment"), [*(("steps", moment) for moment in (0, 1, 3, 4, 7, 8)), *((kind, 5) for kind in BUDGETS)]
)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path, corpus: Corpus, kind: str, moment: int) -> None:
    config = BUDGETS[kind]
    whole = Trainer(model(), corpus, config, tmp_path / "whole")
    assert isinstance(list(whole.run())[-1], Finished)
    torch.manual_seed(0)
    part = Trainer(model(), corpus, config, tmp_path / "parts")
    events = interrupted(part, moment)
    torch.manual_seed(99)  # another process
    resumed = Trainer.resume(tmp_path / "parts")
    if moment < 8:
        assert events[-1] == Interrupted(moment, tmp_path / "parts" / f"step-{moment:08d}", tmp_path / "parts")
        assert same(part, resumed)
        assert resumed.elapsed <= part.elapsed
    assert isinstance(list(resumed.run())[-1], Finished)
    assert same(whole, resumed)
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")


def test_interrupted_twice_is_uninterrupted(tmp_path: Path, corpus: Corpus) -> None:
    whole = Trainer(model(), corpus, CONFIG, tmp_path / "whole")
    list(whole.run())
    interrupted(Trainer(model(), corpus, CONFIG, tmp_path / "parts"), 2)
    interrupted(Trainer.resume(tmp_path / "parts"), 5)
    resumed = Trainer.resume(tmp_path / "parts")
    list(resumed.run())
    assert same(whole, resumed)


def test_a_killed_training_goes_on_from_its_last_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    whole = Trainer(model(), corpus, CONFIG, tmp_path / "whole")
    list(whole.run())
    killed = Trainer(model(), corpus, CONFIG, tmp_path / "parts").run()
    while not (isinstance(event := next(killed), Step) and event.step == 7):
        pass
    killed.close()
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # it was writing
    shutil.copytree(tmp_path / "parts" / "step-00000004", tmp_path / "parts" / ".step-00000007.new")
    resumed = Trainer.resume(tmp_path / "parts")
    assert resumed.step == 4
    list(resumed.run())
    assert same(whole, resumed)
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    assert {file.name for file in (tmp_path / "whole").iterdir()} == {f.name for f in (tmp_path / "parts").iterdir()}


def test_the_same_seed_trains_the_same_model_and_another_another(tmp_path: Path, corpus: Corpus) -> None:
    trainers = [
        Trainer(model(), corpus, replace(CONFIG, seed=seed), tmp_path / f"{n}") for n, seed in enumerate((0, 0, 1))
    ]
    for trainer in trainers:
        list(trainer.run())
    assert same(trainers[0], trainers[1])
    assert not same(trainers[0], trainers[2])


def test_a_complete_training_resumes_to_its_end(tmp_path: Path, corpus: Corpus) -> None:
    *_, finished = Trainer(model(), corpus, CONFIG, tmp_path / "run").run()
    before = curve(tmp_path / "run")
    assert list(Trainer.resume(tmp_path / "run").run()) == [finished]
    assert curve(tmp_path / "run") == before


def test_events_come_in_order_and_are_remembered(tmp_path: Path, corpus: Corpus) -> None:
    events = list(Trainer(model(), corpus, CONFIG, tmp_path / "run").run())
    order = [(type(event).__name__, event.step) for event in events]
    assert order == [
        *(("Step", step) for step in (1, 2, 3)),
        ("Evaluated", 3),
        ("Step", 4),
        ("Saved", 4),
        *(("Step", step) for step in (5, 6)),
        ("Evaluated", 6),
        *(("Step", step) for step in (7, 8)),
        ("Evaluated", 8),
        ("Saved", 8),
        ("Finished", 8),
    ]
    last = next(event for event in reversed(events) if isinstance(event, Step))
    assert (last.progress, last.seconds_left, last.tokens) == (1.0, 0.0, 8 * 4 * 16)
    assert last.learning_rate == pytest.approx(CONFIG.learning_rate * CONFIG.final_learning_rate)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 9))
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [3, 6, 8]


def test_the_newest_checkpoints_are_kept_and_load(tmp_path: Path, corpus: Corpus) -> None:
    trainer = Trainer(model(), corpus, replace(CONFIG, checkpoint_every=1, keep_checkpoints=3), tmp_path / "run")
    list(trainer.run())
    assert sorted(steps(tmp_path / "run")) == [6, 7, 8]
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "metrics.jsonl", "step-00000006", "step-00000007", "step-00000008",
    ]  # fmt: skip
    names = {file.name for file in (tmp_path / "run" / "step-00000008").iterdir()}
    assert names == {"config.json", "model.safetensors", "training.json", "training.safetensors"}
    loaded = checkpoints.load(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True))
    assert isinstance(checkpoints.load_tokenizer(tmp_path / "run"), ByteTokenizer)


def test_training_learns(tmp_path: Path, corpus: Corpus) -> None:
    config = replace(CONFIG, steps=60, learning_rate=1e-2, evaluate_every=0, checkpoint_every=0)
    events = list(Trainer(model(), corpus, config, tmp_path / "run").run())
    assert isinstance(events[0], Step)
    assert isinstance(events[-1], Finished)
    assert events[-1].evaluation.bits_per_byte < 0.7 * events[0].bits_per_byte
    assert [type(event) for event in events[-3:]] == [Evaluated, Saved, Finished]


def test_minutes_follow_the_clock(tmp_path: Path, corpus: Corpus) -> None:
    config = replace(CONFIG, steps=None, minutes=0.01, checkpoint_every=0)
    events = list(Trainer(model(), corpus, config, tmp_path / "run").run())
    taken = [event for event in events if isinstance(event, Step)]
    assert isinstance(events[-1], Finished)
    assert [event.progress for event in taken] == sorted(event.progress for event in taken)
    assert all(event.seconds_left <= 0.6 for event in taken)
    assert Trainer.resume(tmp_path / "run").progress == 1.0


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path, corpus: Corpus) -> None:
    first = [
        next(Trainer(model(), corpus, replace(CONFIG, gradient_accumulation=n), tmp_path / f"{n}").run())
        for n in (1, 4)
    ]
    assert all(isinstance(event, Step) for event in first)
    whole, parts = first
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)


def test_blocks_are_compiled_when_asked(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled.append(call) or call)
    for compile in (False, True):
        trainer = Trainer(model(), corpus, replace(CONFIG, steps=1, compile=compile), tmp_path / str(compile))
        list(trainer.run())
        assert len(compiled) == compile
    assert checkpoints.load(tmp_path / "True").state_dict().keys() == model().state_dict().keys()


def test_weight_decay_spares_vectors_and_the_flagged(tmp_path: Path, corpus: Corpus) -> None:
    trained = model()
    flagged = next(parameter for parameter in trained.parameters() if parameter.dim() == 2)
    flagged._no_weight_decay = True
    spared = {
        id(parameter)
        for group in Trainer(trained, corpus, CONFIG, tmp_path / "run")._optimizer.param_groups
        for parameter in group["params"]
        if group["weight_decay"] == 0
    }
    expected = {id(p) for p in trained.parameters() if p.dim() < 2 or getattr(p, "_no_weight_decay", False)}
    assert spared == expected
    assert id(flagged) in spared
    assert len(spared) < len(list(trained.parameters()))


def test_bits_per_byte_of_a_tokenizer_count_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pairs = {a + b: number for number, (a, b) in enumerate((a, b) for a in "abcd" for b in "abcd")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(pairs, unk_token="aa"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("..?"), "isolated")
    tokenizer.save(str(tmp_path / "pairs.json"))
    (tmp_path / "text.txt").write_text("abcd" * 1000)
    corpus = load_corpus(tmp_path / "text.txt", tokenizer=HuggingFaceTokenizer(tmp_path / "pairs.json"))
    trainer = Trainer(model(vocab_size=16), corpus, CONFIG, tmp_path / "run")
    for event in trainer.run():
        if isinstance(event, Step):
            assert event.bits_per_byte == pytest.approx(event.loss / torch.tensor(2.0).log().item() / 2)
        if isinstance(event, Evaluated):
            assert event.evaluation.bytes == 2 * event.evaluation.tokens
    shutil.copy(tmp_path / "run" / "step-00000008" / "tokenizer.json", tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_text() == (tmp_path / "pairs.json").read_text()
    (tmp_path / "pairs.json").unlink()
    assert Trainer.resume(tmp_path / "run").corpus.fingerprint() == corpus.fingerprint()


def test_a_second_ctrl_c_interrupts_at_once_and_the_first_handler_comes_back(tmp_path: Path, corpus: Corpus) -> None:
    before = signal.getsignal(signal.SIGINT)
    run = Trainer(model(), corpus, CONFIG, tmp_path / "run").run()
    next(run)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    run.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_training_works_outside_the_main_thread(tmp_path: Path, corpus: Corpus) -> None:
    events: list[Event] = []
    trainer = Trainer(model(), corpus, CONFIG, tmp_path / "run")
    thread = threading.Thread(target=lambda: events.extend(trainer.run()))
    thread.start()
    thread.join()
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("evaluate_every", [0, 1])
@pytest.mark.parametrize("pattern", ["gated_delta_rule", "softmax_attention"])  # the first refuses such gates itself
def test_weights_that_diverge_stop_the_training_and_the_good_checkpoint_stays(
    tmp_path: Path, corpus: Corpus, pattern: str, evaluate_every: int
) -> None:
    config = replace(CONFIG, evaluate_every=evaluate_every)
    trainer = Trainer(model(pattern=pattern), corpus, config, tmp_path / "run")
    good = tmp_path / "run" / "step-00000004"
    run = trainer.run()
    while not (isinstance(event := next(run), Step) and event.step == 5):
        pass
    nn.init.constant_(next(trainer.model.parameters()), torch.nan)
    with pytest.raises(FloatingPointError, match=f"after step [56]: .* nan.*; the last good checkpoint is {good};"):
        list(run)
    assert all(bool(p.isfinite().all()) for p in checkpoints.load(tmp_path / "run").parameters())


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, corpus: Corpus) -> None:
    trainer = Trainer(model(), corpus, CONFIG, tmp_path / "run")
    nn.init.constant_(next(trainer.model.parameters()), torch.inf)
    with pytest.raises(FloatingPointError, match="weights are not finite; no checkpoint had been written yet"):
        trainer.save()
    assert not (tmp_path / "run").exists()


def test_a_run_folder_is_not_trained_in_twice(tmp_path: Path, corpus: Corpus) -> None:
    list(Trainer(model(), corpus, CONFIG, tmp_path / "run").run())
    with pytest.raises(ValueError, match="already holds a training; resume it or choose another folder"):
        Trainer(model(), corpus, CONFIG, tmp_path / "run")


def test_what_does_not_fit_is_refused_before_training(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="validation part has"):
        Trainer(model(), corpus, replace(CONFIG, sequence_length=5000), tmp_path / "run")
    with pytest.raises(ValueError, match="model: got a vocabulary of 100, wanted at least the tokenizer's 256"):
        Trainer(model(vocab_size=100), corpus, CONFIG, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resuming_refuses_another_text_and_damaged_folders(tmp_path: Path, corpus: Corpus) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="holds no checkpoint step-"):
        Trainer.resume(run)
    list(Trainer(model(), corpus, CONFIG, run).run())
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text.replace("line 7", "line 8"))
    with pytest.raises(ValueError, match=r"data .*text\.txt: not the text that the run .* was begun with"):
        Trainer.resume(run)
    assert Trainer.resume(run, corpus=corpus).step == 8
    (tmp_path / "text.txt").write_text(text)
    state = run / "step-00000008" / "training.json"
    content = json.loads(state.read_text())
    for wrong in ({"step": None}, {"config": {"stride": 1}}, {"config": {}}):
        state.write_text(json.dumps({key: value for key, value in (content | wrong).items() if value is not None}))
        with pytest.raises(ValueError, match=r"step-00000008|exactly one of them"):
            Trainer.resume(run)
    state.write_text(json.dumps(content))
    os.truncate(run / "step-00000008" / "training.safetensors", 5000)
    with pytest.raises(ValueError, match=r"training\.safetensors: cannot be read"):
        Trainer.resume(run)
