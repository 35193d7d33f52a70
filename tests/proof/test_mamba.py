"""Mamba, FalconMamba and Mamba-2 as whole models, against those of transformers with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from proof.judge import judge
from torch import Tensor, nn

from linattn.models import LanguageModel, ModelConfig

transformers = pytest.importorskip("transformers")

IDS = torch.randint(50, (2, 70), generator=torch.Generator().manual_seed(0))
STATE = {"d_state": 8, "expand": 2, "norm_eps": 1e-5}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mamba": ("mamba", "Mamba", {"state_size": 8}, {"d_state": 8}),
    "mamba with every bias": (
        "mamba",
        "Mamba",
        {"state_size": 5, "time_step_rank": 3, "conv_kernel": 3, "use_bias": True, "expand": 3},
        {"d_state": 5, "dt_rank": 3, "conv_size": 3, "bias": True, "expand": 3},
    ),
    "falcon mamba": ("mamba", "FalconMamba", {"state_size": 8}, {"d_state": 8, "norm_dt_b_c": True, "norm_eps": 1e-6}),
    "mamba2 of one group": (
        "mamba2",
        "Mamba2",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
        {"num_heads": 4, "num_groups": 1, **STATE},
    ),
    "mamba2 of two groups": (
        "mamba2",
        "Mamba2",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
        {"num_heads": 4, "num_groups": 2, **STATE},
    ),
}


def our_name(name: str) -> str:
    for theirs, ours in (
        ("backbone.embeddings", "embedding"),
        ("backbone.norm_f", "norm"),
        ("backbone.layers", "blocks"),
        (".norm.weight", ".mixer_norm.weight" if ".mixer." not in name else ".norm.weight"),
        ("lm_head", "head"),
    ):
        name = name.replace(theirs, ours)
    return name


def pair(case: str) -> tuple[LanguageModel, Any, str]:
    """The two models, every parameter drawn so that none hides a mistake in another."""
    mechanism, family, options, mixer = CASES[case]
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": False}
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes, use_cache=False, **options)
    ).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ours = LanguageModel(
        ModelConfig(
            vocab_size=50, d_model=32, num_layers=2, pattern=mechanism, mixers={mechanism: mixer}, mlp_ratio=0,
            norm_eps=1e-5, tie_embeddings=False,
        )
    )  # fmt: skip
    ours.load_state_dict({our_name(name): value for name, value in theirs.state_dict().items()})
    return ours, theirs, f"transformers {family}ForCausalLM"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {our_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str, padding: int) -> None:
    """With the embedding untied, its gradient is that of the input.

    Padded rows of ours against rows of theirs alone: where their first projection has a bias, their convolution sees
    what it makes of padding.
    """
    ours, theirs, oracle = pair(case)
    mask = torch.ones(IDS.shape, dtype=torch.bool)
    mask[1, :padding] = False
    weight = torch.randn(*IDS.shape, 50, generator=torch.Generator().manual_seed(1)) * mask[..., None]
    got = ours(IDS, mask=mask if padding else None)[0] * mask[..., None]
    alone = theirs(IDS[1:, padding:]).logits
    wanted = torch.cat([theirs(IDS[:1]).logits, F.pad(alone, (0, 0, padding, 0))])
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    judge(CASES[case][0], oracle, "logits", got, wanted)
    judge(CASES[case][0], oracle, "gradients", gradients(ours), gradients(theirs))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_token_by_token(case: str) -> None:
    """Ours from a state, one by one and in pieces, against their whole run and their own steps.

    Their Mamba continues from a cache with one token only: with more it starts from an empty state.
    """
    ours, theirs, oracle = pair(case)
    whole = theirs(IDS).logits
    for cuts in (range(1, 70), (3, 40, 41, 69)):
        now, pieces = None, []
        for ids in IDS.tensor_split(list(cuts), 1):
            logits, now = ours(ids, now)
            pieces.append(logits)
        judge(CASES[case][0], oracle, "token by token", torch.cat(pieces, 1), whole)
    cache, steps = None, []
    for ids in IDS[:, :12].split(1, 1):
        output = theirs(ids, cache=cache, use_cache=True)
        cache = output.cache
        steps.append(output.logits)
    judge(CASES[case][0], oracle, "token by token", ours(IDS[:, :12])[0], torch.cat(steps, 1))
