"""A prompt's keys, values and queries of all layers, kept so that several caches can take the same prompt.

The attention of a prompt is exact under every method, so it is computed once and given to each of them.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shadowkv.cache.base import Geometry, require_finite
from shadowkv.ops.lowrank import Spectrum, find_spectra

Found = TypeVar("Found")


class Once(Protocol):
    """:meth:`RecordedPrompt.once`, or what has no record and does the work each time."""

    def __call__(self, key: Hashable, work: Callable[[], Found]) -> Found: ...


def recorded_bytes(geometry: Geometry, tokens: int, prompt_queries: int) -> int:
    """What a :class:`RecordedPrompt` of so many tokens takes."""
    keys_and_values = 3 * tokens * geometry.key_dim
    queries = min(prompt_queries, tokens) * geometry.heads * geometry.head_dim
    return geometry.layers * geometry.dtype.itemsize * (keys_and_values + queries)


class RecordedPrompt:
    """A sink for one prefill. Shapes: k_pre [L, S, K, D]; k, v [L, K, S, D]; q [L, N, W, D].

    Args:
        prompt_queries: the most that any cache will ask for; see :attr:`Cache.prompt_queries`.
    """

    def __init__(self, geometry: Geometry, device: torch.device, prompt_queries: int = 0) -> None:
        self.geometry = geometry
        self.prompt_queries = prompt_queries
        self.tokens = 0
        self.logits_V: Tensor | None = None
        """After the last token; whoever runs the prefill puts them here."""
        self._device = device
        self._worked_out: dict[Hashable, Any] = {}

    def begin_prompt(self, seq: Any, tokens: int) -> None:
        """Make room."""
        g, self.tokens = self.geometry, tokens

        def room(*shape: int) -> Tensor:
            return torch.empty(g.layers, *shape, dtype=g.dtype, device=self._device)

        self.k_pre_LSKD = room(tokens, g.kv_heads, g.head_dim)
        self.k_LKSD, self.v_LKSD = (room(g.kv_heads, tokens, g.head_dim) for _ in range(2))
        self.q_LNWD = room(g.heads, min(self.prompt_queries, tokens), g.head_dim)

    def take_layer(
        self, layer: int, seq: Any, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        """Keep a copy of one layer.

        Raises:
            NumericsError: a key is NaN or infinite; names the layer.
        """
        require_finite(layer, k_KSD)
        self.k_pre_LSKD[layer], self.k_LKSD[layer], self.v_LKSD[layer] = k_pre_SKD, k_KSD, v_KSD
        if q_NWD is not None:
            self.q_LNWD[layer] = q_NWD

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """One layer's keys before RoPE [S, K, D], keys after it and values, both [K, S, D]."""
        return self.k_pre_LSKD[layer], self.k_LKSD[layer], self.v_LKSD[layer]

    def queries(self, layer: int, wanted: int) -> Tensor | None:
        """The last ``wanted`` positions' queries of a layer (fewer of a shorter prompt), or None for none."""
        assert wanted <= self.prompt_queries, "a cache asks for more queries than were recorded"
        return self.q_LNWD[layer][:, -wanted:] if wanted else None

    def last_queries(self, wanted: int) -> Tensor:
        """:meth:`queries` of all layers."""
        assert 0 < wanted <= self.prompt_queries, "a cache asks for more queries than were recorded"
        return self.q_LNWD[:, :, -wanted:]

    def once(self, key: Hashable, work: Callable[[], Found]) -> Found:
        """What ``work`` finds, kept for the next cache that asks by the same key: it may depend on nothing else."""
        if key not in self._worked_out:
            self._worked_out[key] = work()
        found: Found = self._worked_out[key]
        return found

    def spectra(self, *, centre: bool) -> list[Spectrum]:
        """The spectrum of each layer's pre-RoPE keys.

        Raises:
            NumericsError: a key is NaN or infinite.
        """
        return self.once(("spectra", centre), lambda: find_spectra(self.k_pre_LSKD, centre=centre))
