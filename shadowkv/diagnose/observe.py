"""Looks at a prompt layer by layer while it is computed: keys and values are seen once, and only figures stay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shadowkv.cache.base import Cache, CachedSequence, require_finite
from shadowkv.diagnose.cosines import Cosines, cosines_of
from shadowkv.diagnose.coverage import Covered, Split, coverage
from shadowkv.diagnose.spectra import energy_shares, kept_by, shares_of, similarity, top_basis, weight_shares
from shadowkv.models.decoder import Decoder, LayerProgress
from shadowkv.ops.lowrank import Spectrum, find_spectra

PRE, PRE_CENTRED = "pre-RoPE keys", "pre-RoPE keys, centred"
POST, POST_CENTRED = "post-RoPE keys", "post-RoPE keys, centred"
VALUES, VALUES_CENTRED = "values", "values, centred"
KEY_WEIGHTS, VALUE_WEIGHTS = "W_k", "W_v"
KINDS = (PRE, PRE_CENTRED, POST, POST_CENTRED, VALUES, VALUES_CENTRED, KEY_WEIGHTS, VALUE_WEIGHTS)


@dataclass(frozen=True)
class Basis:
    """The subspaces of the first half of a prompt in one layer, [K*D, R]: of the keys, and of keys about their mean."""

    plain_XR: Tensor
    centred_XR: Tensor


@dataclass(frozen=True)
class Likeness:
    """How some keys lie to the subspaces of the first half.

    ``plain`` and ``centred`` are similarities (``spectra.similarity``). ``kept`` is the share of these keys' energy
    about their mean that the first half's centred subspace holds, ``own`` what their own of the same rank holds.
    """

    plain: float
    centred: float
    kept: float
    own: float

    @classmethod
    def of(cls, k_pre_SKD: Tensor, basis: Basis) -> "Likeness":
        """Of keys [S, K, D] before RoPE."""
        plain, centred = both_spectra(k_pre_SKD)
        rank = basis.plain_XR.shape[1]
        return cls(
            similarity(basis.plain_XR, top_basis(plain, rank)),
            similarity(basis.centred_XR, top_basis(centred, rank)),
            kept_by(basis.centred_XR, centred),
            float(centred.subspace(rank, 1).energy),
        )


def both_spectra(k_pre_SKD: Tensor) -> tuple[Spectrum, Spectrum]:
    """As they are, and about their mean."""
    (plain,), (centred,) = (find_spectra([k_pre_SKD], centre=centre) for centre in (False, True))
    return plain, centred


@dataclass(frozen=True)
class LayerFigures:
    """What stays of one layer. ``shares`` of the energy by direction are by kind, see ``KINDS``; ``missed`` is the mean
    attention mass that landmarks leave out, by split and budget."""

    shares: Mapping[str, Tensor]
    basis: Basis
    continuation: Likeness
    cosines: Cosines
    landmarks: Covered
    oracle: Covered
    missed: Mapping[Split, list[float]]


class Observer:
    """A sink for one prompt's prefill that may pass it on to a cache.

    Args:
        rank: of the subspaces that are compared.
        split: what the figures are about.
        budgets: by split, in chunks per KV head; those other than ``split`` are only measured for ``missed``.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rank: int,
        query_tokens: int,
        split: Split,
        budgets: Mapping[Split, Sequence[int]],
        cache: Cache[Any, Any] | None = None,
    ) -> None:
        assert split in budgets, "the figures' own split has budgets too"
        self.prompt_queries = query_tokens
        self.layers: list[LayerFigures] = []
        self._decoder, self._rank, self._split, self._budgets, self._cache = decoder, rank, split, budgets, cache

    def begin_prompt(self, seq: CachedSequence | None, tokens: int) -> None:
        """A prompt begins."""
        if self._cache is not None:
            self._cache.begin_prompt(seq, tokens)

    def take_layer(
        self,
        layer: int,
        seq: CachedSequence | None,
        k_pre_SKD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        q_NWD: Tensor | None = None,
    ) -> None:
        """Look at one layer.

        Raises:
            NumericsError: a key is NaN or infinite; names the layer.
        """
        require_finite(layer, k_KSD)
        assert q_NWD is not None, "the decoder gives the queries that were asked for"
        if self._cache is not None:
            self._cache.take_layer(layer, seq, k_pre_SKD, k_KSD, v_KSD)
        half = k_pre_SKD.shape[0] // 2
        plain, centred = both_spectra(k_pre_SKD[:half])
        basis = Basis(top_basis(plain, self._rank), top_basis(centred, self._rank))
        by_landmarks, oracle = coverage(q_NWD, k_KSD, self._budgets, self._split)
        self.layers.append(
            LayerFigures(
                self._shares(layer, k_pre_SKD, k_KSD.transpose(0, 1), v_KSD.transpose(0, 1)),
                basis,
                Likeness.of(k_pre_SKD[half:], basis),
                cosines_of(k_KSD, self._split.chunk_tokens, self._split.outliers),
                by_landmarks[self._split],
                oracle,
                {split: [1 - mean for mean in found.mean] for split, found in by_landmarks.items()},
            )
        )

    def _shares(self, layer: int, k_pre_SKD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> dict[str, Tensor]:
        spec, weights_XM = self._decoder.spec, self._decoder.layers[layer].qkv
        keys, values = spec.q_rows, spec.q_rows + spec.kv_rows
        plain, centred = both_spectra(k_pre_SKD)
        return {
            PRE: shares_of(plain.values_X),
            PRE_CENTRED: shares_of(centred.values_X),
            POST: energy_shares(k_SKD, centre=False),
            POST_CENTRED: energy_shares(k_SKD, centre=True),
            VALUES: energy_shares(v_SKD, centre=False),
            VALUES_CENTRED: energy_shares(v_SKD, centre=True),
            KEY_WEIGHTS: weight_shares(weights_XM[keys:values]),
            VALUE_WEIGHTS: weight_shares(weights_XM[values : values + spec.kv_rows]),
        }


class OtherText:
    """A sink for another text's prefill: how its keys lie to the subspaces of the first one."""

    prompt_queries = 0

    def __init__(self, bases: Sequence[Basis]) -> None:
        self.layers: list[Likeness] = []
        self._bases = bases

    def begin_prompt(self, seq: None, tokens: int) -> None:
        """A text begins."""

    def take_layer(
        self, layer: int, seq: None, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        """Look at one layer.

        Raises:
            NumericsError: a key is NaN or infinite; names the layer.
        """
        require_finite(layer, k_KSD)
        self.layers.append(Likeness.of(k_pre_SKD, self._bases[layer]))


@torch.inference_mode()
def look_at(
    decoder: Decoder, token_ids: Sequence[int], sink: Observer | OtherText, seq: Any, progress: LayerProgress
) -> None:
    """Compute a prompt for a sink. ``seq`` is that of the sink's cache, if it has one."""
    tokens_S = torch.tensor(list(token_ids), dtype=torch.long, device=decoder.device)
    decoder.prefill(tokens_S, sink, seq, progress=progress)
