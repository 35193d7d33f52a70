"""fla's linear attention: no convolution, and no normaliser unless asked for; heads share the map that they learn."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn.checkpoints.fla.frame import layout, projections
from linattn.checkpoints.layout import Config, Rule, demand, same
from linattn.layers.feature_maps import FUNCTIONS, Product

NAMES = {"elu": "elu", "relu": "relu", "identity": "identity", "dpfp": "dpfp", "elementwise_product": "product"}
"""Our feature maps by their names."""
NU = 4


def _options(config: Config) -> dict[str, Any]:
    demand(
        config, num_kv_heads=(None, config["num_heads"]), norm_q=False, norm_k=False, elementwise_affine=True,
        expand_k=1.0, expand_v=1.0, tie_feature_map_qk=False, feature_map=tuple(NAMES),
    )  # fmt: skip
    name = NAMES[config["feature_map"]]
    return {
        "num_heads": config["num_heads"],
        "feature_map": name,
        **({"feature_map_options": {"nu": NU}} if name == "dpfp" else {}),
        "normalize": config["norm_feature_map"],
        "conv_size": 0,
        "norm_eps": config["norm_eps"],
    }


def _describe(mixer: Any) -> dict[str, Any]:
    phi = mixer.feature_map
    if isinstance(phi, partial):
        phi = phi.func
    ours = "product" if isinstance(phi, Product) else next((name for name, f in FUNCTIONS.items() if f is phi), phi)
    name = next((theirs for theirs, name in NAMES.items() if name == ours), repr(ours))
    return {"num_heads": mixer.num_heads, "norm_feature_map": mixer.normalize, "feature_map": name}


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    width, heads = config["hidden_size"], config["num_heads"]
    yield projections("q k v", width, width, width)
    if config["feature_map"] == "elementwise_product":
        size = width // heads

        def names(kind: str) -> tuple[str, ...]:
            return tuple(f"feature_map_{side}.layer{half}.{kind}" for side in "qk" for half in (1, 2))

        yield Rule(
            "feature_map.weight", names("weight"), (size,) * 4,
            lambda t: t.view(2, 1, 2 * size, size).mT.expand(-1, heads, -1, -1),
            lambda t: _one_head(t).mT.reshape(4 * size, size),
        )  # fmt: skip
        yield Rule(
            "feature_map.bias", names("bias"), (size,) * 4,
            lambda t: t.view(2, 1, 2 * size).expand(-1, heads, -1),
            lambda t: _one_head(t).reshape(4 * size),
        )  # fmt: skip
    yield from same("norm.weight")
    yield Rule("out_proj.weight", ("o_proj.weight",))


def _one_head(tensor: Tensor) -> Tensor:
    """What all heads, on the second axis, have in common. Raises ValueError if they have not."""
    if not torch.equal(tensor, tensor[:, :1].expand_as(tensor)):
        raise ValueError("model: got feature maps that differ between heads, wanted one, as flash-linear-attention has")
    return tensor[:, 0]


LINEAR_ATTN = layout(
    "linear_attn", "linear_attention", "LinearAttentionForCausalLM",
    defaults={
        "expand_k": 1.0, "expand_v": 1.0, "num_heads": 4, "num_kv_heads": None, "feature_map": "elementwise_product",
        "tie_feature_map_qk": False, "norm_q": False, "norm_k": False, "norm_feature_map": False,
        "elementwise_affine": True,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
)  # fmt: skip
