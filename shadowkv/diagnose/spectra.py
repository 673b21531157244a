"""How much of keys, values and weights few directions hold, and how alike two subspaces are.

Source: arXiv 2410.21465, section 3.1 and figures 1 and 2.
"""

import torch
from torch import Tensor

from shadowkv.ops.lowrank import Spectrum, find_spectra

ENERGIES = (0.90, 0.95, 0.99)
"""Shares of the energy (the sum of squares) that ranks are given for."""
ROUNDING = 1e-9
"""What an energy may fall short of by the rounding of its sum."""


def shares_of(values_X: Tensor) -> Tensor:
    """Eigenvalues of a Gram matrix, in ascending order, as shares of their sum, largest first: [X] in float64 on the
    CPU; zeros where all are."""
    shares_X = values_X.detach().double().cpu().flip(0).clamp_min(0)
    return shares_X / shares_X.sum().clamp_min(torch.finfo(torch.float64).tiny)


def energy_shares(x_SKD: Tensor, *, centre: bool) -> Tensor:
    """Shares of the energy of S rows that their principal directions hold, over all heads together: [K*D].

    Raises:
        NumericsError: a number is NaN or infinite.
    """
    (spectrum,) = find_spectra([x_SKD], centre=centre)
    return shares_of(spectrum.values_X)


def weight_shares(weight_XM: Tensor) -> Tensor:
    """Shares of the energy of a projection's weights [K*D, M] by direction: [K*D]."""
    wide_XM = weight_XM.double()
    return shares_of(torch.linalg.eigvalsh(wide_XM @ wide_XM.mT))


def relative_singular_values(shares_X: Tensor) -> Tensor:
    """Singular values over the largest one; zeros where all are."""
    return (shares_X / shares_X[0].clamp_min(torch.finfo(torch.float64).tiny)).sqrt()


def rank_for(shares_X: Tensor, energy: float) -> int:
    """The fewest directions that hold this share of the energy; 0 where there is none."""
    if not float(shares_X.sum()):
        return 0
    kept_X = shares_X.cumsum(0)
    return min(int((kept_X < energy - ROUNDING).sum()) + 1, len(shares_X))


def top_basis(spectrum: Spectrum, rank: int) -> Tensor:
    """The ``rank`` directions that hold most, as orthonormal columns [X, R], most first."""
    return spectrum.vectors_XX[:, -rank:].flip(1)


def similarity(a_XR: Tensor, b_XR: Tensor) -> float:
    """||A^T B||_F^2 / r of two orthonormal bases: 1 for the same subspace, r/X on average for random ones.

    It is the paper's <H1, H2>_F / r of the projectors H = U U^T (arXiv 2410.21465, section 3.1).
    """
    return float((a_XR.mT @ b_XR).square().sum()) / a_XR.shape[1]


def kept_by(basis_XR: Tensor, spectrum: Spectrum) -> float:
    """The share of the energy of a spectrum's rows that lies in somebody else's subspace; 1 where there is none."""
    values_X = spectrum.values_X.clamp_min(0)
    total = float(values_X.sum())
    along_XR = spectrum.vectors_XX.mT @ basis_XR
    return float((values_X[:, None] * along_XR.square()).sum()) / total if total else 1.0
