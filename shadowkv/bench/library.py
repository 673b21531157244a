"""PyTorch's own attention at the sizes of dense decoding, for the same table as our kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shadowkv.bench.ceilings import Ceilings
from shadowkv.bench.kernels import Timed, timed
from shadowkv.bench.timing import Stopwatch
from shadowkv.ops.contract.base import Traffic

OP = "attention"
"""Whose table these rows stand in."""
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Llama-3.1-8B."""
BACKENDS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class DenseCase:
    """Decoding of one layer: a new token of each sequence attends to all tokens."""

    batch: int
    tokens: int

    @property
    def label(self) -> str:
        """As our own cases are named."""
        return f"dense, {self.batch} x {self.tokens:,} tokens"

    def traffic(self, dtype: torch.dtype) -> Traffic:
        """Keys and values once; two products of every query head with them."""
        pairs = self.batch * self.tokens
        return Traffic(2 * pairs * KV_HEADS * HEAD_DIM * dtype.itemsize, 0, 4 * pairs * HEADS * HEAD_DIM)


CASES = (DenseCase(1, 32768), DenseCase(1, 122880), DenseCase(7, 122880))


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The call that is timed: one query token per sequence, heads grouped."""

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def time_library(dtype: torch.dtype, watch: Stopwatch, ceilings: Ceilings) -> list[Timed]:
    """Every backend that takes the dtype, at every size."""
    rows = []
    for case in CASES:
        q = torch.randn(case.batch, HEADS, 1, HEAD_DIM, device=watch.device, dtype=dtype)
        k, v = (
            torch.randn(case.batch, KV_HEADS, case.tokens, HEAD_DIM, device=watch.device, dtype=dtype) for _ in range(2)
        )
        for name, backend in BACKENDS.items():
            try:
                spread = watch.time([sdpa(backend, q, k, v)])
            except RuntimeError:  # this backend does not take the dtype, or is not in this build
                continue
            rows.append(timed(OP, case.label, dtype, name, spread, case.traffic(dtype), ceilings))
        del q, k, v
        torch.cuda.empty_cache()
    return rows
