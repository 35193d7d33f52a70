"""RWKV-4 to 7a against pip ``rwkv``, transformers, trained weights with known logits, and the mathematics as a loop.

``rwkv`` reads its environment variables when it is imported, so each kind of it runs in a process of its own.
"""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from proof.judge import judge
from proof.rwkv_official import VERSIONS, VOCABULARY, logits, weights
from torch import Tensor

from linattn.checkpoints.rwkv import convert, version
from linattn.models import LanguageModel

IDS = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(1))
DATA = Path(os.environ.get("LINATTN_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "rwkv-tiny"

# What runs in the process: argv are the folder and the versions.
ORACLE = """
import sys, torch
from pathlib import Path
folder, versions = Path(sys.argv[1]), sys.argv[2:]
from rwkv.model import RWKV
ids = torch.load(folder / "ids.pt").flatten().tolist()
for version in versions:
    model = RWKV(model=str(folder / version), strategy="cpu fp32")
    whole, _ = model.forward(ids, None, full_output=True)
    steps, state = [], None
    for token in ids:
        one, state = model.forward([token], state)
        steps.append(one.float())
    torch.save({"whole": whole.float(), "steps": torch.stack(steps)}, folder / (version + ".logits"))
"""


def model_of(tensors: dict[str, Tensor], **options: Any) -> LanguageModel:
    config, ours = convert(tensors, **options)
    model = LanguageModel(config).to(next(iter(ours.values())).dtype)
    model.load_state_dict(ours)
    return model.eval()


def token_by_token(model: LanguageModel, ids: Tensor) -> Tensor:
    outputs, state = [], None
    for t in range(ids.shape[1]):
        y, state = model(ids[:, t : t + 1], state)
        outputs.append(y)
    return torch.cat(outputs, 1)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of all versions and the package's logits."""
    if find_spec("rwkv") is None:
        pytest.skip("the package rwkv is not installed")
    folder = tmp_path_factory.mktemp("rwkv")
    torch.save(IDS, folder / "ids.pt")
    for name in VERSIONS:
        torch.save(weights(name), folder / f"{name}.pth")
    plain = os.environ | {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    runs = [
        (VERSIONS[:5], plain | {"RWKV_V7_ON": "0"}),
        (("7",), plain | {"RWKV_V7_ON": "1"}),
        (("7a",), plain | {"RWKV_V7_ON": "1", "RWKV_DE_VERSION": "1"}),
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ORACLE, str(folder), *versions],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for versions, environment in runs
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in started]
    assert not any(process.returncode for process in started), "".join(errors)[-2000:]
    return folder


@pytest.mark.parametrize("name", VERSIONS)
def test_the_rwkv_package(name: str, package: Path) -> None:
    tensors = torch.load(package / f"{name}.pth")
    assert version(tensors) == name
    model, wanted = model_of(tensors), torch.load(package / f"{name}.logits")
    mechanism = f"rwkv{name[0]}"
    with torch.no_grad():
        judge(mechanism, f"rwkv {name}", "logits", model(IDS)[0][0], wanted["whole"])
        judge(mechanism, f"rwkv {name}", "token by token", token_by_token(model, IDS)[0], wanted["steps"])


def with_gradients(
    run: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradients of a checkpoint's tensors, for a random gradient on the logits."""
    leaves = {key: tensor.to(dtype, copy=True).requires_grad_() for key, tensor in tensors.items()}
    out = run(leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((out * weight.to(dtype)).sum(), list(leaves.values()))
    return out.detach(), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("name", VERSIONS)
def test_the_mathematics_as_a_loop(name: str) -> None:
    """Logits and the gradients of every tensor of the checkpoint, through the conversion.

    In float64 to 1e-12. In float32 the gradients may miss 1e-5, as the loop's own do (up to 1e-4 over five seeds): a
    head whose output nearly cancels is divided by its small deviation, and that amplifies every rounding before it.
    """
    tensors, ids = weights(name), IDS[:, :8]

    def ours(theirs: dict[str, Tensor]) -> Tensor:
        config, converted = convert(theirs)
        model = LanguageModel(config).to(converted["head.weight"].dtype)
        out: Tensor = torch.func.functional_call(model, converted, (ids,), strict=True)[0][0]
        return out

    def loop(theirs: dict[str, Tensor]) -> Tensor:
        return logits(name, theirs, ids[0].tolist())

    mechanism, oracle = f"rwkv{name[0]}", f"loop of RWKV-{name}"
    truth, gradients = with_gradients(loop, tensors, torch.float64)
    out, grads = with_gradients(ours, tensors, torch.float64)
    judge(mechanism, f"{oracle}, float64", "logits", out, truth, 1e-12)
    judge(mechanism, f"{oracle}, float64", "gradients", grads, gradients, 1e-12)
    out, grads = with_gradients(ours, tensors, torch.float32)
    judge(mechanism, f"{oracle}, float32", "logits", out, truth)
    judge(mechanism, f"{oracle}, float32", "gradients", grads, gradients, 1e-4)


@pytest.mark.parametrize(
    ("name", "eps"), [("4v0-660K", None), ("5v1-730K", 1e-5), ("5v2-730K", 1e-5), ("7v0-834K", 64e-5)]
)
def test_trained_weights(name: str, eps: float | None) -> None:
    """The tiny models of rwkv.cpp's tests (MIT) and the logits it expects after the bytes "in; see LINATTN_DATA.

    Those of RWKV-5 were trained with a GroupNorm epsilon of 1e-5, which nothing in their file says.
    """
    file, expected = DATA / f"tiny-rwkv-{name}-FP32.bin", DATA / f"expected-logits-{name}.bin"
    if not (file.exists() and expected.exists()):
        pytest.skip(f"{file.name} is not in {DATA}")
    wanted = torch.frombuffer(bytearray(expected.read_bytes()), dtype=torch.float32)
    tensors = read_ggml(file.read_bytes(), name[:3])
    options = {} if eps is None else {"group_norm_eps": eps}
    ids = torch.tensor([list(b'"in')])
    mechanism = f"rwkv{name[0]}"
    with torch.no_grad():
        model = model_of(tensors, **options)
        judge(mechanism, f"trained {name[:3]}", "logits", model(ids)[0][0, -1], wanted)
        judge(mechanism, f"trained {name[:3]}", "token by token", token_by_token(model, ids)[0, -1], wanted)


def read_ggml(data: bytes, name: str) -> dict[str, Tensor]:
    """The tensors of an FP32 file of rwkv.cpp by RWKV-LM's names, its precomputed exponentials undone."""
    tensors, at = {}, struct.calcsize("=6i")
    while at < len(data):
        axes, letters, _ = struct.unpack_from("=3i", data, at)
        at += 12
        shape = struct.unpack_from(f"={axes}i", data, at)[::-1]
        at += 4 * axes
        key = data[at : at + letters].decode()
        at += letters
        count = math.prod(shape)
        tensors[key] = torch.frombuffer(bytearray(data[at : at + 4 * count]), dtype=torch.float32).view(shape)
        at += 4 * count
    official: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        last, wide = key.rsplit(".", 1)[-1], tensor.double()
        if last == "x_rwkvag":
            official |= {f"{key[:-8]}x_{j}": row for j, row in zip("rwkvag", tensor.view(6, -1), strict=True)}
        elif last in ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"):
            official[key] = tensor.view(tensor.shape[-2:]).T.contiguous()
        elif last == "time_decay":
            wide = (-wide).log() if name == "4v0" else (-wide.log()).log().view(len(wide), -1)
            official[key] = wide.float()
        elif last == "time_first" and name != "4v0":
            official[key] = wide.log().flatten().float()
        elif last in ("time_faaaa", "r_k"):
            official[key] = tensor.view(-1, 64) if last == "r_k" else tensor.view(len(tensor), -1)
        else:
            official[key] = tensor
    return official


NAMES = {
    "pre_ln": "ln0", "attention": "att", "feed_forward": "ffn", "time_mix_key": "time_mix_k",
    "time_mix_value": "time_mix_v", "time_mix_receptance": "time_mix_r",
}  # fmt: skip


def test_transformers() -> None:
    """RWKV-4 in transformers: logits, token by token, and the gradients of every parameter."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, rescale_every=0, tie_word_embeddings=False
    )
    theirs = transformers.RwkvForCausalLM(config).eval()
    for parameter in theirs.parameters():
        if parameter.dim() != 2:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=24**-0.5)
    names = {key: official(key) for key, _ in theirs.named_parameters()}
    ids = IDS.view(2, -1)
    wanted = theirs(ids, use_cache=False).logits
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * weight).sum().backward()

    leaves = {names[key]: p.detach().clone().requires_grad_() for key, p in theirs.named_parameters()}
    ours, converted = convert(leaves)
    model = LanguageModel(ours)
    got = torch.func.functional_call(model, converted, (ids,), strict=True)[0]
    (got * weight).sum().backward()
    judge("rwkv4", "transformers", "logits", got, wanted)
    gradients = {names[key]: p.grad for key, p in theirs.named_parameters()}
    judge("rwkv4", "transformers", "gradients", {key: p.grad for key, p in leaves.items()}, gradients)
    model.load_state_dict(converted)
    with torch.no_grad():
        judge("rwkv4", "transformers", "token by token", token_by_token(model, ids), wanted)


def official(name: str) -> str:
    """transformers' name of a parameter -> RWKV-LM's."""
    name = name.removeprefix("rwkv.").replace("embeddings.", "emb.")
    return ".".join(NAMES.get(part, part) for part in name.split("."))
