"""What mechanisms share: norms, short convolution, rotary embedding, MLP, and the frame of a mixing layer."""

from __future__ import annotations

from linattn.layers.convolution import ShortConvolution
from linattn.layers.feature_maps import FeatureMap
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer
from linattn.layers.mlp import SwiGLU
from linattn.layers.norms import RMSNorm, l2_normalize
from linattn.layers.rotary import Rotary

__all__ = ["FeatureMap", "Linear", "Mixer", "RMSNorm", "Rotary", "ShortConvolution", "SwiGLU", "l2_normalize"]
