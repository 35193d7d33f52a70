"""Other libraries' checkpoints: written and read back, and refused with every reason named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import linattn
from linattn import checkpoints
from linattn.checkpoints.files import read_pickle
from linattn.models import LanguageModel, ModelConfig

IDS = torch.randint(90, (2, 19), generator=torch.Generator().manual_seed(0))


def fla(pattern: str, tied: bool = False, layers: int = 2, **options: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=90, d_model=32, num_layers=layers, pattern=pattern, mixers={pattern: {"norm_eps": 1e-6, **options}},
        mlp="swiglu", mlp_hidden=56, norm="rms", embedding_norm=False, norm_eps=1e-6, tie_embeddings=tied,
    )  # fmt: skip


def rwkv(pattern: str, mlp: str, **options: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=90, d_model=32, num_layers=3, pattern=pattern, mixers={pattern: options},
        mlp=mlp, mlp_hidden=64, norm="layer", embedding_norm=True, norm_eps=1e-5, tie_embeddings=False,
    )  # fmt: skip


def stack(pattern: str, tied: bool = True, **options: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=90, d_model=32, num_layers=2, pattern=pattern, mixers={pattern: options}, mlp_ratio=0,
        norm_eps=1e-5, tie_embeddings=tied,
    )  # fmt: skip


MODELS: dict[str, tuple[str, ModelConfig]] = {
    "transformers mamba2": ("transformers", stack("mamba2", num_heads=4, d_state=8, num_groups=2)),
    "transformers mamba2 untied": ("transformers", stack("mamba2", False, num_heads=8, d_state=8, expand=1.5)),
    "transformers rwkv": ("transformers", rwkv("rwkv4", "channel_mix")),
    "mamba_ssm mamba2": ("mamba_ssm", stack("mamba2", num_heads=4, d_state=8, num_groups=4, conv_size=3)),
    "mamba_ssm mamba2 untied": ("mamba_ssm", stack("mamba2", False, num_heads=8, d_state=8)),
    "transformers mamba": ("transformers", stack("mamba", d_state=4)),
    "transformers mamba with biases": ("transformers", stack("mamba", False, bias=True, conv_bias=False, dt_rank=3)),
    "transformers falcon_mamba": ("transformers", stack("mamba", d_state=4, norm_dt_b_c=True, norm_eps=1e-4)),
    "mamba_ssm mamba": ("mamba_ssm", stack("mamba", d_state=4, expand=1.5)),
    "mamba_ssm mamba with biases": ("mamba_ssm", stack("mamba", False, bias=True, conv_bias=False, dt_rank=3)),
    "fla gla": ("fla", fla("gated_linear_attention", num_heads=2)),
    "fla gla tied": ("fla", fla("gated_linear_attention", True, num_heads=4, expand_k=1.0, expand_v=2.0)),
    "fla retnet": ("fla", fla("retention", num_heads=2, expand_v=1.5, rope=True, norm_affine=True)),
    "fla delta_net": ("fla", fla("delta_rule", num_heads=2)),
    "fla delta_net without convolution": ("fla", fla("delta_rule", num_heads=2, conv_size=0, allow_neg_eigval=True)),
    "fla gated_deltanet": ("fla", fla("gated_delta_rule", num_heads=2, head_dim=8, num_v_heads=4)),
    "fla gated_deltanet without convolution": (
        "fla",
        fla("gated_delta_rule", num_heads=2, head_dim=12, expand_v=0.5, conv_size=0, allow_neg_eigval=True),
    ),
    "fla hgrn2": ("fla", fla("hgrn2", layers=4, num_heads=2, norm_eps=1e-5)),
    "fla hgrn2 with convolution": ("fla", fla("hgrn2", True, num_heads=4, norm_eps=1e-5, conv_size=4)),
    "fla rwkv6": ("fla", rwkv("rwkv6", "channel_mix", num_heads=2, group_norm_eps=1e-5, expand_k=0.5)),
    "fla rwkv7": ("fla", rwkv("rwkv7", "channel_mix_v7", num_heads=2, group_norm_eps=16e-5, value_rank=5)),
    "fla linear_attn": ("fla", fla("linear_attention", num_heads=2, feature_map="relu", normalize=False, conv_size=0)),
    "fla linear_attn normalized": ("fla", fla("linear_attention", True, num_heads=2, feature_map="elu", conv_size=0)),
}


def random_model(config: ModelConfig) -> LanguageModel:
    """Every weight random, so that each of them matters."""
    torch.manual_seed(1)
    model = LanguageModel(config)
    for name, parameter in model.named_parameters():
        # The bounds of forget gates rise with the layer, as their layout has it.
        parameter.data += (0.01 if name.endswith("bound") else 0.1) * torch.randn_like(parameter)
    return model


def write(folder: Path, name: str) -> LanguageModel:
    layout, config = MODELS[name]
    model = random_model(config)
    checkpoints.save(folder, model, layout=layout)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    pickled = folder / "pytorch_model.bin"
    return read_pickle(pickled) if pickled.exists() else load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_written_in_their_layout_it_comes_back(tmp_path: Path, name: str) -> None:
    model = write(tmp_path / "m", name)
    loaded = linattn.load(tmp_path / "m")
    assert loaded.config.layers == model.config.layers
    # The bounds of hgrn2 go through a softmax, the lerps of rwkv through 1 - x.
    exact = "hgrn2" not in name and name != "transformers rwkv"
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS)[0], model(IDS)[0], rtol=0, atol=0 if exact else 1e-5)
    assert len(list(loaded.parameters())) == len(list(model.parameters()))  # still tied
    checkpoints.save(tmp_path / "again", loaded, layout=MODELS[name][0])
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "m" / "config.json").read_text()
    first, second = tensors_of(tmp_path / "m"), tensors_of(tmp_path / "again")
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(second[key], first[key], rtol=0, atol=0 if exact else 1e-5)


def test_their_names() -> None:
    """What stands in files of fla's and mamba_ssm's own models, by their sources."""
    from linattn.checkpoints.formats import _translated

    config, tensors = _translated(random_model(MODELS["fla gla"][1]), "fla")
    assert config["model_type"] == "gla"
    assert {name for name in tensors if ".1." not in name or "gk_proj.1" in name} >= {
        "model.embeddings.weight", "model.layers.0.attn_norm.weight", "model.layers.0.attn.q_proj.weight",
        "model.layers.0.attn.k_proj.weight", "model.layers.0.attn.v_proj.weight", "model.layers.0.attn.g_proj.weight",
        "model.layers.0.attn.gk_proj.0.weight", "model.layers.0.attn.gk_proj.1.weight",
        "model.layers.0.attn.gk_proj.1.bias", "model.layers.0.attn.g_norm_swish_gate.weight",
        "model.layers.0.attn.o_proj.weight", "model.layers.0.mlp_norm.weight",
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    assert tensors["model.layers.0.attn.q_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (56, 32)
    config, tensors = _translated(random_model(MODELS["mamba_ssm mamba2"][1]), "mamba_ssm")
    assert "model_type" not in config
    assert {name.removeprefix("backbone.layers.0.") for name in tensors if ".1." not in name} == {
        "backbone.embedding.weight", "norm.weight", "mixer.in_proj.weight", "mixer.conv1d.weight",
        "mixer.conv1d.bias", "mixer.dt_bias", "mixer.A_log", "mixer.D", "mixer.norm.weight", "mixer.out_proj.weight",
        "backbone.norm_f.weight",
    }  # fmt: skip


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_and_left_over_tensors_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "m", "fla gla")
    change(tmp_path / "m", lambda t: t.update({"model.layers.1.attn.qq_proj.weight": t.pop("model.norm.weight")}))
    with pytest.raises(
        ValueError, match=r"m: not the tensors of .*gla: missing model\.norm\.weight; left over"
    ) as caught:
        linattn.load(tmp_path / "m")
    assert "left over model.layers.1.attn.qq_proj.weight" in str(caught.value)


def test_tensors_of_two_families_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a", "transformers mamba2")
    write(tmp_path / "b", "fla gla")
    other = load_file(tmp_path / "b" / "model.safetensors")
    change(tmp_path / "a", lambda tensors: tensors.update(other))
    with pytest.raises(ValueError, match=r"not the tensors of transformers' Mamba2: left over .* and \d+ more"):
        linattn.load(tmp_path / "a")
    shutil.copy(tmp_path / "b" / "config.json", tmp_path / "a")
    with pytest.raises(ValueError, match=r"not the tensors of .*gla: left over backbone\."):
        linattn.load(tmp_path / "a")


def test_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "m", "fla gla")
    name = "model.layers.0.attn.q_proj.weight"
    change(tmp_path / "m", lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    with pytest.raises(ValueError, match=r"other shapes: blocks\.0\.mixer\.in_proj\.weight \[111, 32\] instead of"):
        linattn.load(tmp_path / "m")
    change(tmp_path / "m", lambda tensors: tensors.update({name: tensors[name][:, 1:].contiguous()}))
    with pytest.raises(ValueError, match=r"shapes that do not go together: .*q_proj\.weight \[15, 31\], "):
        linattn.load(tmp_path / "m")


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = write(tmp_path / "m", "transformers mamba2")
    change(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["backbone.embeddings.weight"].clone()}))
    with torch.no_grad():
        assert torch.equal(linattn.load(tmp_path / "m")(IDS)[0], model(IDS)[0])
    change(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"left over lm_head\.weight"):
        linattn.load(tmp_path / "m")


def test_the_first_version_of_fla_s_rwkv7(tmp_path: Path) -> None:
    model = write(tmp_path / "m", "fla rwkv7")

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            parts = [tensors.pop(f"model.layers.{layer}.attn.x_{letter}") for letter in "rwkvag"]
            tensors[f"model.layers.{layer}.attn.x_x"] = torch.cat(parts)[:, 0]

    change(tmp_path / "m", age)
    with torch.no_grad():
        assert torch.equal(linattn.load(tmp_path / "m")(IDS)[0], model(IDS)[0])


def test_fla_s_models_of_2024_have_gate_and_up_in_one(tmp_path: Path) -> None:
    model = write(tmp_path / "m", "fla gla")

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            gate, up = (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            tensors[gate] = torch.cat([tensors[gate], tensors.pop(up)])

    change(tmp_path / "m", age)
    with torch.no_grad():
        assert torch.equal(linattn.load(tmp_path / "m")(IDS)[0], model(IDS)[0])


def shard(folder: Path) -> None:
    """Cut the weights in three files with an index, as transformers does beyond some size."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == place}, folder / place)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards(tmp_path: Path) -> None:
    model = write(tmp_path / "m", "fla gla")
    shard(tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(linattn.load(tmp_path / "m")(IDS)[0], model(IDS)[0])


def point(name: str, place: object) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"][name] = place
        index.write_text(json.dumps(content))

    return spoil


SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / SECOND).unlink(), "model-00002-of-00003.*cannot be read: No such file"),
        (lambda folder: os.truncate(folder / SECOND, 50), "model-00002-of-00003.*cannot be read"),
        (point("model.norm.weight", "../m/x"), r"index\.json: weight_map: got '\.\./m/x', wanted the name of a file"),
        (point("model.norm.weight", 3), r"index\.json: weight_map: got dict, wanted the file of each tensor"),
        (point("lost", SECOND), rf"{SECOND}: lacks lost, which model\.safetensors\.index\.json places there"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), r"weight_map: got NoneType"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "m: holds no weights, wanted model.safe"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: cannot be read"),
    ],
)
def test_damaged_shards_are_named(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    write(tmp_path / "m", "fla gla")
    shard(tmp_path / "m")
    spoil(tmp_path / "m")
    with pytest.raises(ValueError, match=message):
        linattn.load(tmp_path / "m")


class Mischief:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("mischief",)


def test_nothing_but_tensors_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m", "mamba_ssm mamba2")
    file = tmp_path / "m" / "pytorch_model.bin"
    torch.save({"backbone.embedding.weight": Mischief()}, file)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: cannot be read: it holds more than tensors"):
        linattn.load(tmp_path / "m")
    assert not (tmp_path / "mischief").exists()
    torch.save([torch.zeros(1)], file)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: got a list, wanted tensors by name"):
        linattn.load(tmp_path / "m")


@pytest.mark.parametrize("size", [0, 3, 100, 9000])
def test_a_truncated_pickle_is_named(tmp_path: Path, size: int) -> None:
    write(tmp_path / "m", "mamba_ssm mamba2")
    os.truncate(tmp_path / "m" / "pytorch_model.bin", size)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: cannot be read"):
        linattn.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fla gla", "use_short_conv", True),
        ("fla gla", "feature_map", "relu"),
        ("fla gla", "num_kv_heads", 1),
        ("fla gla", "clamp_min", -3.0),
        ("fla gla", "use_output_gate", False),
        ("fla gla", "attn", {"layers": [1], "num_heads": 2}),
        ("fla gla", "hidden_act", "powlu"),
        ("fla gla", "attnres_block_size", 2),
        ("fla retnet", "expand_k", 0.5),
        ("fla delta_net", "qk_norm", "sum"),
        ("fla delta_net", "use_gate", True),
        ("fla gated_deltanet", "use_gate", False),
        ("fla linear_attn", "norm_q", True),
        ("fla linear_attn", "feature_map", "relish"),
        ("transformers mamba2", "use_bias", True),
        ("transformers mamba2", "hidden_act", "relu"),
        ("transformers mamba2", "time_step_limit", [0.0, 0.1]),
        ("mamba_ssm mamba2", "attn_layer_idx", [1]),
        ("mamba_ssm mamba2", "d_intermediate", 64),
        ("mamba_ssm mamba2", "rms_norm", False),
    ],
)
def test_a_config_without_an_equal_is_refused_by_its_key(tmp_path: Path, name: str, key: str, value: object) -> None:
    write(tmp_path / "m", name)
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"m: {key}: got .*, wanted .*linattn has no other"):
        linattn.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_before_gate": True}, "norm_before_gate: got True"),
        ({"headdims": 3}, "ssm_cfg: got unknown headdims"),
        ({"layer": "Mamba9"}, r"ssm_cfg\.layer: got 'Mamba9', wanted .*'Mamba2'"),
    ],
)
def test_a_mixer_without_an_equal_is_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    write(tmp_path / "m", "mamba_ssm mamba2")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    config["ssm_cfg"] |= options
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        linattn.load(tmp_path / "m")


def test_the_padded_vocabulary_of_mamba_ssm(tmp_path: Path) -> None:
    model = random_model(stack("mamba2", num_heads=4, d_state=8))
    checkpoints.save(tmp_path / "m", model, layout="mamba_ssm")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"vocab_size": 86, "pad_vocab_size_multiple": 10}))
    assert linattn.load(tmp_path / "m").config.vocab_size == 90


def test_what_a_layout_cannot_say_is_not_written(tmp_path: Path) -> None:
    deep = random_model(fla("gated_linear_attention", num_heads=2, gate_low_rank_dim=8))
    with pytest.raises(ValueError, match=r"model: got .*8.*, wanted what a config of .*gla can say"):
        checkpoints.save(tmp_path / "m", deep, layout="fla")
    unlike = random_model(fla("retention", num_heads=2))
    with pytest.raises(ValueError, match=r"wanted what a config of .*retnet can say"):
        checkpoints.save(tmp_path / "m", unlike, layout="fla")
    with pytest.raises(ValueError, match=r"layout: got 'transformers' for 'retention', wanted a model of mamba"):
        checkpoints.save(tmp_path / "m", unlike, layout="transformers")
    with pytest.raises(ValueError, match="layout: got 'torch', wanted one of 'linattn'"):
        checkpoints.save(tmp_path / "m", unlike, layout="torch")
    with pytest.raises(ValueError, match="tokenizer: got ByteTokenizer, wanted a HuggingFaceTokenizer"):
        checkpoints.save(tmp_path / "m", deep, tokenizer=checkpoints.ByteTokenizer(), layout="fla")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    tokenizer = checkpoints.HuggingFaceTokenizer(tmp_path / "t.json")
    checkpoints.save(tmp_path / "m", random_model(MODELS["fla gla"][1]), tokenizer=tokenizer, layout="fla")
    assert linattn.load_tokenizer(tmp_path / "m").encode("b") == [1]
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"m: has no tokenizer\.json; name a tokenizer yourself"):
        linattn.load_tokenizer(tmp_path / "m")


def test_a_folder_of_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"config\.json: got model_type='bert' and no format, wanted .*mamba2.*gla"):
        linattn.load(tmp_path)
