"""The command line as its users meet it: what it prints, writes and returns, and what it says of bad input."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from linattn import registry
from linattn.cli import main
from linattn.cli.demo import compiled
from linattn.engine import Explanation
from linattn.models import presets
from linattn.training import read_metrics

SMALL = ["--d-model", "32", "--num-layers", "1", "--batch-size", "2", "--sequence-length", "16", "--device", "cpu"]
SMALL += ["--evaluation-tokens", "64"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("naïve words, again and again; " * 200, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "--steps", "3", "--data", str(text), "--out", str(folder), "--json", *SMALL]) == 0
    return folder


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default folders land in a place of the test's own; stdin is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_train_writes_checkpoint_metrics_and_picture(run: Path) -> None:
    assert (run / "step-00000003" / "model.safetensors").exists()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [line["step"] for line in read_metrics(run) if line["event"] == "step"] == [1, 2, 3]


def test_train_speaks_json_lines_only(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert main(["train", "--mechanism", "gla", "--tokens", "64", "--data", str(text), "--json", *SMALL]) == 0
    lines = json_lines(capsys)
    assert [line["event"] for line in lines] == ["begin", "step", "step", "evaluation", "saved", "finished"]
    assert lines[0]["model"]["pattern"] == "gated_linear_attention"
    assert Path(lines[-1]["folder"]).is_dir()


def test_train_speaks_to_people(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    for _ in range(2):  # the second time in a folder with another number
        arguments = ["train", "--pattern", "gla, softmax", "--steps", "1", "--data", str(text), *SMALL]
        assert main([*arguments, "--num-layers", "2"]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "loss", "bits per byte", "tokens/s", "left", "runs/gla-softmax-2/step-00000001"):
        assert word in out


def test_train_takes_a_published_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: Path
) -> None:
    sizes = {**presets.PRESETS["gla-340m"], "d_model": 32, "num_layers": 1, "mlp_hidden": 48}
    monkeypatch.setitem(presets.PRESETS, "gla-340m", sizes)
    assert main(["train", "--preset", "gla-340m", "--steps", "1", "--data", str(text), "--json", *SMALL[4:]]) == 0
    model = json_lines(capsys)[0]["model"]
    assert (model["mlp_hidden"], model["tie_embeddings"], model["vocab_size"]) == (48, False, 256)
    assert Path("runs/gla-340m/step-00000001").is_dir()


def test_resumed_equals_uninterrupted(tmp_path: Path, text: Path) -> None:
    options = ["--data", str(text), "--checkpoint-every", "2", "--json", *SMALL]
    assert main(["train", "--steps", "4", "--out", "whole", *options]) == 0
    assert main(["train", "--steps", "4", "--out", "parts", *options]) == 0
    for file in sorted((tmp_path / "parts" / "step-00000004").iterdir()):
        file.unlink()
    (tmp_path / "parts" / "step-00000004").rmdir()  # as if killed after step 2
    assert main(["train", "--resume", "parts", "--json"]) == 0
    last = "step-00000004/model.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "parts" / last).read_bytes()


def test_ctrl_c_saves_and_says_how_to_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["train", "--minutes", "5", "--out", "run", "--data", str(text), *SMALL]) == 130
    thread.join()
    assert "linattn train --resume run" in capsys.readouterr().out
    assert list((tmp_path / "run").glob("step-*/model.safetensors"))


@pytest.mark.parametrize("prompt", [["--prompt", "é"], ["--file", "prompt.txt"], ["--file", "-"], []])
def test_generate(
    prompt: list[str], capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("é", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode())))
    assert main(["generate", str(run), *prompt, "--max-tokens", "20", "--seed", "1"]) == 0
    first = capsys.readouterr()
    assert "20 tokens at" in first.err
    assert "the same after any number" in first.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode())))
    assert main(["generate", str(run), *prompt, "--max-tokens", "20", "--seed", "1", "--json"]) == 0
    *pieces, end = json_lines(capsys)
    assert "".join(piece["text"] for piece in pieces) + "\n" == first.out
    assert (end["tokens"], end["prompt_tokens"], end["state_grows"]) == (20, 2, False)


def test_generate_says_that_a_cache_grows(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    options = ["--steps", "1", "--mechanism", "softmax", "--data", str(text), "--out", "run", "--json", *SMALL]
    assert main(["train", *options]) == 0
    sizes = []
    capsys.readouterr()
    for tokens in (5, 9):
        assert main(["generate", "run", "--prompt", "ab", "--max-tokens", str(tokens), "--json"]) == 0
        end = json_lines(capsys)[-1]
        assert end["state_grows"]
        sizes.append(end["state_bytes"])
    assert sizes[1] - sizes[0] == 4 * 2 * 32 * 4  # four tokens, keys and values, width 32, float32


def test_compare(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    options = ["--tokens", "16", "32", "--heads", "1", "--head-size", "8", "--budget", "20", "--out", "out"]
    assert main(["compare", "softmax", "gdn", *options, "--train", "1", "--data", str(text)]) == 0
    out = capsys.readouterr().out
    for word in ("softmax_attention", "gated_delta_rule", "N = 32", "bits per byte", "losses.png"):
        assert word in out
    for name in ("compare.png", "losses.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out" / "compare.csv").read_text().splitlines()) == 5


def test_compare_speaks_one_json_object(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    options = ["--tokens", "16", "--heads", "1", "--head-size", "8", "--train", "1", "--data", str(text)]
    assert main(["compare", "gla", *options, "--json"]) == 0
    (result,) = json_lines(capsys)
    assert result["rows"][0]["tokens"] == 16
    assert result["training"][0]["mechanism"] == "gated_linear_attention"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--d-model", "64"]) == 0
    out = capsys.readouterr().out
    assert main(["list", "--d-model", "64", "--json"]) == 0
    (result,) = json_lines(capsys)
    assert result["d_model"] == 64
    assert [entry["name"] for entry in result["mechanisms"]] == registry.names(composite=True)
    for entry in result["mechanisms"]:
        growth = entry["state_bytes_per_token"]
        assert (growth > 0) == registry.get(entry["name"]).grows
        weight = f"{growth:,} bytes a token" if growth else f"{entry['state_bytes']:,} bytes, after any number"
        for part in (entry["name"], entry["equation"], weight, entry["paper"], *entry["aliases"], *entry["backends"]):
            assert part in out
    by_name = {entry["name"]: entry for entry in result["mechanisms"]}
    assert by_name["softmax_attention"]["state_bytes_per_token"] == 2 * 64 * 4
    assert by_name["gated_linear_attention"]["backends"]["reference"] == ["recurrent"]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gla", "--mode", "recurrent"]) == 0
    assert "gated_linear_attention: backend" in capsys.readouterr().out
    assert main(["explain", "gla", "--backend", "reference", "--json"]) == 0
    (result,) = json_lines(capsys)
    assert result["backend"] == "reference"
    assert "was asked for" in result["refusals"]["chunked"]


def test_demo(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    assert main(["demo", "--minutes", "0.002", "--max-tokens", "20", "--budget", "0.5", "--data", str(text)]) == 0
    out, err = capsys.readouterr()
    for word in ("1. Train", "2. Generate", "3. Compare", "softmax_attention", "runs/demo"):
        assert word in out
    assert "tokens/s" in err
    assert (tmp_path / "runs" / "demo" / "compare.png").exists()


def test_the_demo_trains_what_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose kernels do not know the delta rule, another mixer."""
    device = torch.device("cpu")
    assert compiled(device) == "gated_delta_rule"
    for served, chosen in ((("gated_linear_attention",), "gated_linear_attention"), ((), "gated_delta_rule")):

        def explain(name: str, device: torch.device, served: tuple[str, ...] = served) -> Explanation:
            return Explanation("triton" if name in served else "chunked", {})

        monkeypatch.setattr("linattn.cli.demo.explain", explain)
        assert compiled(device) == chosen


def test_threads(run: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert main(["list", "--threads", "1"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def broken(tmp_path: Path, run: Path) -> Path:
    """Files that are not what they should be."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1") * 50)
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name in ("cut", "other"):
        (tmp_path / name).mkdir()
        for file in (run / "step-00000003").iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["model"]["d_model"] = 64
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    return tmp_path


TRAIN = ["train", "--steps", "1", *SMALL]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*TRAIN, "--mechanism", "gated_delta_rul"], ["gated_delta_rul", "did you mean 'gated_delta_rule'"]),
        ([*TRAIN, "--pattern", "glaa"], ["glaa", "did you mean 'gla'"]),
        ([*TRAIN, "--mechanism", "gla", "--pattern", "gla"], ["mechanism, pattern", "both"]),
        ([*TRAIN, "--preset", "gla-340m"], ["preset: gla-340m", "--d-model, --num-layers"]),
        (["train", "--steps", "1", "--preset", "gla-34m"], ["gla-34m", "did you mean 'gla-340m'"]),
        ([*TRAIN, "--data", "empty.txt"], ["empty.txt", "empty"]),
        ([*TRAIN, "--data", "latin.txt"], ["latin.txt", "utf-8"]),
        ([*TRAIN, "--data", "short.txt"], ["short.txt", "17"]),
        ([*TRAIN, "--data", "folder"], ["folder", "no files"]),
        ([*TRAIN, "--data", "nowhere.txt"], ["nowhere.txt", "nothing there"]),
        ([*TRAIN, "--data", "short.txt", "--tokenizer", "short.txt"], ["short.txt", "tokenizer"]),
        ([*TRAIN, "--data", "{text}", "--out", "full"], ["full", "already exists"]),
        ([*TRAIN, "--data", "{text}", "--out", "empty.txt"], ["empty.txt", "already exists"]),
        ([*TRAIN, "--tokens", "5"], ["steps, tokens", "exactly one"]),
        (["train", "--mechanism", "gla"], ["none of them", "exactly one"]),
        ([*TRAIN, "--batch-size", "0"], ["batch_size", "0"]),
        ([*TRAIN, "--num-heads", "0"], ["heads"]),
        ([*TRAIN, "--device", "toaster"], ["device", "toaster"]),
        ([*TRAIN, "--threads", "0"], ["threads", "0"]),
        (["train", "--resume", "nowhere"], ["nowhere"]),
        (["train", "--resume", "{run}", "--steps", "5"], ["--steps"]),
        (["generate", "nowhere"], ["nowhere", "does not exist"]),
        (["generate", "folder"], ["folder", "config.json"]),
        (["generate", "cut"], ["cut", "model.safetensors"]),
        (["generate", "other"], ["other", "not the weights of this config"]),
        (["generate", "{run}", "--file", "nowhere.txt"], ["nowhere.txt"]),
        (["generate", "{run}", "--file", "latin.txt"], ["latin.txt", "utf-8"]),
        (["generate", "{run}", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "{run}", "--top-p", "2"], ["top_p", "2"]),
        (["generate", "{run}", "--max-tokens", "-2"], ["max_new_tokens", "-2"]),
        (["generate", "{run}", "--device", "toaster"], ["device", "toaster"]),
        (["compare", "glaa"], ["glaa", "did you mean 'gla'"]),
        (["compare", "gla", "--tokens", "0"], ["tokens", "0"]),
        (["compare", "gla", "--budget", "0"], ["budget", "0"]),
        (["compare", "gla", "--train", "-1"], ["train", "-1"]),
        (["list", "--d-model", "0"], ["d_model", "0"]),
        (["explain", "glaa"], ["glaa", "did you mean 'gla'"]),
        (["explain", "gla", "--mode", "sideways"], ["mode", "sideways"]),
        (["demo", "--minutes", "0"], ["minutes", "0"]),
        (["demo", "--mechanism", "glaa"], ["glaa", "did you mean 'gla'"]),
    ],
    ids=lambda value: " ".join(value[:1] + value[-2:]) if isinstance(value, list) else str(value),
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: list[str], broken: Path, capsys: pytest.CaptureFixture[str], run: Path, text: Path
) -> None:
    before = sorted(path for path in broken.rglob("*"))
    arguments = [argument.format(run=run, text=text) for argument in arguments]
    for extra in ([], ["--json"]):
        assert main([*arguments, *extra]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("linattn: ")
        for word in words:
            assert word in err
    assert sorted(path for path in broken.rglob("*")) == before, "bad input must leave nothing behind"


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train", "--stepss", "1"], ["compare", "gla", "--tokens", "x"]])
def test_bad_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "--minutes" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["tyro", "rich"])
def test_a_missing_extra_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    for loaded in [name for name in sys.modules if name.startswith("linattn.cli.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["list"]) == 2
    assert "pip install 'linattn[cli]'" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(run: Path) -> None:
    import subprocess

    command = [sys.executable, "-m", "linattn", "generate", str(run), "--max-tokens", "100000", "--prompt", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
