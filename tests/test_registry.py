"""The table of mechanisms, the choice of backend, and what explains it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import linattn
from linattn import registry
from linattn.recurrence import Decay, Engine, Mode, Normalizer, Read, Recurrence, Write
from linattn.testing import Subject, forms

MECHANISMS = """
    softmax_attention linear_attention retention lightning_attention gated_linear_attention hgrn2 mamba mamba2 mamba3
    mlstm delta_rule gated_delta_rule kimi_delta_attention gated_delta_product rwkv4 rwkv5 rwkv6 rwkv7 hgrn rg_lru
    log_linear_mamba2 log_linear_gated_delta_rule
""".split()


def test_the_family_is_registered() -> None:
    assert sorted(linattn.names()) == sorted(MECHANISMS)
    assert set(linattn.names(composite=True)) - set(MECHANISMS) == {"parallel_heads"}


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_entry_is_complete(name: str) -> None:
    mechanism = linattn.get(name)
    assert mechanism.function is getattr(linattn, name)
    assert issubclass(mechanism.layer, torch.nn.Module)
    assert all([mechanism.title, mechanism.equation, mechanism.when])
    assert "arXiv" in mechanism.paper
    assert all(argument.meaning for argument in mechanism.arguments)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("gla", "gated_linear_attention"),
        ("gdn", "gated_delta_rule"),
        ("deltanet", "delta_rule"),
        ("retnet", "retention"),
        ("ssd", "mamba2"),
        ("linear", "linear_attention"),
        ("softmax", "softmax_attention"),
        ("Gated-Delta-Rule", "gated_delta_rule"),
        (" GLA ", "gated_linear_attention"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert linattn.get(alias).name == name


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown name 'gated_delta_rul'; did you mean 'gated_delta_rule'\?"):
        linattn.get("gated_delta_rul")
    with pytest.raises(ValueError, match=r"known: .*mamba2"):
        linattn.get("zzzzzz")


def test_a_name_is_taken_once() -> None:
    for name in ("mamba2", "gla"):
        newcomer = dataclasses.replace(linattn.get("retention"), name="newcomer", aliases=(name,))
        with pytest.raises(ValueError, match=f"'{name}' is already registered"):
            registry.register(newcomer)
    assert "newcomer" not in linattn.names()


def test_recurrences_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="bonus"):
        Recurrence(bonus=True)
    with pytest.raises(ValueError, match="normalizer"):
        Recurrence(write=Write.DELTA, normalizer=Normalizer.SUM)
    assert Recurrence(read=Read.BEFORE, bonus=True).bonus
    assert [decay for decay in Decay if decay.fixed] == [Decay.HEAD, Decay.CHANNEL]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MECHANISMS[1:])
def test_two_backends_serve_the_cpu(name: str, dtype: torch.dtype) -> None:
    served = {(backend, mode) for backend, mode in forms(Subject.of(name), dtype=dtype)}
    recurrence = linattn.get(name).recurrence
    assert recurrence is not None
    # a selective scan has no matrix of pairs
    modes = [mode for mode in Mode if recurrence.engine is not Engine.SELECTIVE or mode is not Mode.PARALLEL]
    assert served >= {("reference", "recurrent"), *(("chunked", mode.value) for mode in modes)}


def test_auto_prefers_speed_and_says_so() -> None:
    explanation = linattn.explain("gla", mode="parallel")  # which the compiled kernels do not have
    assert explanation.backend == "chunked"
    assert "chunked" in explanation.refusals["reference"]
    assert "backend 'chunked' serves this call" in str(explanation)


def test_a_named_backend_serves_or_says_why_not() -> None:
    assert linattn.explain("gla", backend="reference").backend == "reference"
    refused = linattn.explain("gla", backend="reference", mode="chunkwise")
    assert refused.backend is None
    assert "no backend serves this call" in str(refused)
    assert "recurrent" in refused.refusals["reference"]
    assert linattn.explain("softmax").backend == "torch"
    for bad in (
        {"mechanism": "nothing"},
        {"mechanism": "gla", "backend": "cuda"},
        {"mechanism": "gla", "mode": "fast"},
    ):
        with pytest.raises(ValueError, match=r"^(mechanism|backend|mode): "):
            linattn.explain(**bad)
