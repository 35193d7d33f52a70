"""Published sizes: the numbers of parameters that their papers give."""

from __future__ import annotations

import pytest
import torch

from linattn.models import LanguageModel, count_parameters, preset
from linattn.models.presets import PRESETS

PARAMETERS = {
    "rwkv4-169m": 169_342_464,
    "rwkv4-14b": 14_148_597_760,
    "rwkv6-1.6b": 1_599_873_024,
    "rwkv6-7b": 7_635_746_816,
    "rwkv7-0.1b": 191_034_624,
    "rwkv7-0.4b": 450_767_872,
    "rwkv7-1.5b": 1_527_404_544,
    "rwkv7-2.9b": 2_947_735_040,
    "mamba-130m": 129_135_360,
    "mamba2-130m": 128_989_632,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters(name: str, count: int) -> None:
    with torch.device("meta"):
        assert count_parameters(LanguageModel(preset(name))) == count


# RWKV's own names for its smallest models leave out the embedding.
@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"rwkv7-0.1b"}))
def test_every_preset_is_about_as_large_as_its_name_says(name: str) -> None:
    size = name.rsplit("-", 1)[-1]
    wanted = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    with torch.device("meta"):
        model = LanguageModel(preset(name, num_layers=2))
    layers = preset(name).num_layers
    block = count_parameters(model.blocks[1])
    assert count_parameters(model) + (layers - 2) * block == pytest.approx(wanted, rel=0.16)


def test_overrides_and_unknown_names() -> None:
    config = preset("RWKV7_0.1b", num_layers=2, vocab_size=256)
    assert (config.num_layers, config.vocab_size, config.d_model, config.mlp) == (2, 256, 768, "channel_mix_v7")
    with pytest.raises(ValueError, match=r"preset: got unknown name 'rwkv7-01b', wanted did you mean 'rwkv7-0.1b'"):
        preset("rwkv7-01b")
    with pytest.raises(ValueError, match="unknown key 'layers'"):
        preset("gla-340m", layers=3)
