"""Rotary position embedding: rows of frequencies, angles of positions, rotation and its inverse.

A *row* is one set of frequencies. Most models have one. longrope has two (short and long); dynamic
scaling makes a new one whenever the sequence outgrows the trained length, while keys that are cached
already keep the row that they were rotated with. So whoever stores a key stores its row too, and every
method here takes positions together with rows. Knows no model config: ``models.rope`` builds it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Frequencies = tuple[Tensor, float]
"""Inverse frequencies [rotary/2] and the attention factor that cos and sin are multiplied with."""

FIRST_ROWS = 8
"""Rows that there is room for at first; most models never need more."""


@dataclass(frozen=True)
class RopeTable:
    """The rows of a :class:`Rope` as kernels read them.

    The tensors stay where they are until more rows are asked for than they have room for; then they move.
    Rows that are not in use are zero.

    Shapes: inv_freq_XF [rows, rotary_dim/2], factor_X [rows]; both float32.
    """

    inv_freq_XF: Tensor
    factor_X: Tensor
    interleaved: bool
    rotary_dim: int


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
        with torch.inference_mode(False):  # rows may be written in and out of inference mode
            self._inv_freq_XF = torch.zeros(FIRST_ROWS, rotary_dim // 2, dtype=torch.float32, device=device)
            self._factor_X = torch.zeros(FIRST_ROWS, dtype=torch.float32, device=device)

    @property
    def table(self) -> RopeTable:
        """The rows in use so far and room for more; written in place as rows are added."""
        return RopeTable(self._inv_freq_XF, self._factor_X, self.interleaved, self.rotary_dim)

    def row(self, length_tokens: int) -> int:
        """The row that tokens written by a forward pass get when the sequence ends at this length."""
        key = self._row_key(length_tokens)
        if key not in self._row_of_key:
            inv_freq_F, factor = self._frequencies_of(length_tokens)
            row = len(self._row_of_key)
            if row == len(self._factor_X):
                self._double()
            self._inv_freq_XF[row] = inv_freq_F.to(self._inv_freq_XF.device, torch.float32)
            self._factor_X[row] = factor
            self._row_of_key[key] = row
        return self._row_of_key[key]

    def _double(self) -> None:
        """Room for twice as many rows, in new tensors."""
        with torch.inference_mode(False):
            grown_XF, grown_X = (torch.cat([x, torch.zeros_like(x)]) for x in (self._inv_freq_XF, self._factor_X))
        self._inv_freq_XF, self._factor_X = grown_XF, grown_X

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
