"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """The finest dtype of a device, for angles that grow with the sequence: float64 where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


class Rotary:
    """Turns pairs of channels by position · frequency, so that q·k sees the distance only.

    The frequencies are RoPE's base^(-2j/size) (Su et al., arXiv 2104.09864); ``inclusive``: RetNet's
    base^(-j/(size/2-1)), whose last one is 1/base. The pairs are channels (j, j+size/2); ``interleaved``: (2j, 2j+1).
    Raises ValueError for an odd size.
    """

    def __init__(self, size: int, base: float = 10000.0, *, interleaved: bool = False, inclusive: bool = False) -> None:
        if size % 2:
            raise ValueError(f"head size: got {size}, wanted an even one for rotary embedding, such as {size + 1}")
        self.size, self.base, self.interleaved, self.inclusive = size, base, interleaved, inclusive

    def angles(self, position: Tensor) -> Tensor:
        """position [B, T] -> [B, T, size/2] in radians.

        In float64, where float32 would be off by 0.006 at position 100,000; held in no buffer, which a cast of the
        model to half precision would round.
        """
        exact = exact_dtype(position.device)
        pair = torch.arange(self.size // 2, device=position.device, dtype=exact)
        exponent = pair / max(self.size // 2 - 1, 1) if self.inclusive else pair * (2 / self.size)
        return position.to(exact)[..., None] * self.base**-exponent

    def __call__(self, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """position [1 or B, T]; each tensor [B, T, H, size] comes back turned, in its dtype."""
        angle = self.angles(position)[:, :, None]
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        return tuple(turn(x, cos, sin, interleaved=self.interleaved) for x in tensors)


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Pairs of x's channels turned by the angles of ``cos`` and ``sin`` [..., size/2], in x's dtype."""
    if interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = x.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return turned.to(x.dtype)
