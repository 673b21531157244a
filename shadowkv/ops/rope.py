"""Rotary position embedding: rows of frequencies, angles of positions, rotation and its inverse.

A *row* is one set of frequencies. Most models have one. longrope has two (short and long); dynamic
scaling makes a new one whenever the sequence outgrows the trained length, while keys that are cached
already keep the row that they were rotated with. So whoever stores a key stores its row too, and every
method here takes positions together with rows. Knows no model config: ``models.rope`` builds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Frequencies = tuple[Tensor, float]
"""Inverse frequencies [rotary/2] and the attention factor that cos and sin are multiplied with."""


class Rope:
    """Frequencies by row, grown on demand.

    Shapes: x [..., D], of which the first ``rotary_dim`` dimensions are rotated.

    Args:
        frequencies_of: frequencies for a sequence of the given length.
        row_key: lengths with an equal key share a row (constant for static scalings).
        recompute_on_switch: whether keys cached before a change of row must be computed again with
            the new row (longrope, as transformers' Phi-3 does), instead of being kept as they are.
    """

    def __init__(
        self,
        frequencies_of: Callable[[int], Frequencies],
        row_key: Callable[[int], int],
        *,
        rotary_dim: int,
        interleaved: bool,
        recompute_on_switch: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.recompute_on_switch = recompute_on_switch
        self._frequencies_of = frequencies_of
        self._row_key = row_key
        self._row_of_key: dict[int, int] = {}
        self._inv_freq_XF = torch.empty(0, rotary_dim // 2, dtype=torch.float32, device=device)
        self._factor_X = torch.empty(0, dtype=torch.float32, device=device)

    def row(self, length_tokens: int) -> int:
        """The row that tokens written by a forward pass get when the sequence ends at this length."""
        key = self._row_key(length_tokens)
        if key not in self._row_of_key:
            inv_freq_F, factor = self._frequencies_of(length_tokens)
            device = self._inv_freq_XF.device
            inv_freq_1F = inv_freq_F.to(device, torch.float32)[None]
            self._inv_freq_XF = torch.cat([self._inv_freq_XF, inv_freq_1F])
            self._factor_X = torch.cat([self._factor_X, torch.tensor([factor], device=device)])
            self._row_of_key[key] = len(self._row_of_key)
        return self._row_of_key[key]

    def must_recompute(self, length_before: int, length_after: int) -> bool:
        """Whether growing from one length to the other makes the cached keys stale."""
        return self.recompute_on_switch and self._row_key(length_before) != self._row_key(length_after)

    def cos_sin(self, positions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., rotary/2] in float32 for positions [...] and rows [...] (integers)."""
        rows = rows.long()
        angles = positions.to(torch.float32)[..., None] * self._inv_freq_XF[rows]
        factor = self._factor_X[rows][..., None]
        return angles.cos() * factor, angles.sin() * factor

    def rotate(self, x: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Rotate x [..., D] to positions [...] that broadcast against x's leading axes."""
        return self.turn(x, *self.cos_sin(positions, rows))

    def unrotate(self, x: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Undo :meth:`rotate`; float32 inside, so exact to the rounding of x's dtype."""
        cos, sin = self.cos_sin(positions, rows)
        norm = cos.square() + sin.square()
        return self.turn(x, cos / norm, -sin / norm)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """:meth:`rotate` by angles from :meth:`cos_sin`, which all layers of a forward pass share."""
        rotary, rest = x[..., : self.rotary_dim].float(), x[..., self.rotary_dim :]
        if self.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = rotary.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)
