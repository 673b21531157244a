"""One decoding step of a batch in fixed places, so that it can be captured once and replayed.

A step's tables say where every row's tensors are and how long they are (``ops.rows``). Before a step they are
rewritten; the work itself is the same launches whoever the rows are.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from shadowkv.cache.base import CachedSequence, Geometry
from shadowkv.cache.layout import Region
from shadowkv.ops.rows import Address, Fact, LayerRows, RowFacts
from shadowkv.ops.splits import attention_splits, most_attention_runs

SAME_IN_ALL_LAYERS = (Address.ROPE_ROWS,)


class DecodeStep(ABC):
    """The tables of up to ``max_rows`` sequences, and what a method does with them layer by layer.

    Shapes: address_LBX [layers, max_rows, len(Address)] int64; facts_BI [max_rows, len(Fact)] int32.

    Args:
        columns: the names of the tensors behind the addresses; see :func:`addresses`.
        max_tokens: the most tokens that a row attends to.
        regions: what the method works in; see :meth:`Cache.step_regions`.
    """

    def __init__(
        self,
        layers: int,
        max_rows: int,
        columns: Mapping[Address, str],
        regions: Seq[Region],
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.columns = columns
        self.scratch = {r.name: torch.zeros(r.shape, dtype=r.dtype, device=device) for r in regions}
        self.address_LBX = self.scratch["addresses"]
        self.facts_BI = self.scratch["facts"]
        self._loaded: list[CachedSequence | None] = []
        self.clear()

    def clear(self) -> None:
        """Make every row padding, which no kernel reads or writes anything for."""
        self.load([], [], [])

    def load(self, seqs: Seq[CachedSequence], token_ids: Seq[int], rope_rows: Seq[int]) -> None:
        """Put these sequences, extended by one token each, into the first rows; the others become padding.

        Does not wait for the device: what is copied is pageable, and has been read when the copy returns.
        """
        empty = self.max_rows - len(seqs)
        rows: list[CachedSequence | None] = [*seqs, *([None] * empty)]
        if len(self._loaded) != len(rows) or any(a is not b for a, b in zip(rows, self._loaded, strict=True)):
            tables = [addresses(seq, self.layers, self.columns) for seq in seqs]
            nowhere = torch.zeros(self.layers, len(Address), dtype=torch.int64)
            self.address_LBX.copy_(torch.stack([*tables, *([nowhere] * empty)], dim=1), non_blocking=True)
            self._loaded = rows
        facts = [
            (*self.facts(seq)[: Fact.TOKEN], token, rope_row)
            for seq, token, rope_row in zip(seqs, token_ids, rope_rows, strict=True)
        ]
        self.facts_BI.copy_(torch.tensor(facts + [RowFacts()] * empty, dtype=torch.int32), non_blocking=True)

    def layer(self, layer: int, rows: int) -> LayerRows:
        """The tables of one layer, for the first ``rows`` rows."""
        return LayerRows(self.address_LBX[layer, :rows], self.facts_BI[:rows])

    def attention_scratch(self, rows: int, kv_heads: int, heads: int) -> dict[str, Tensor]:
        """The part of :func:`attention_regions` that a batch of ``rows`` rows uses, in its shape."""
        splits = attention_splits(rows, kv_heads, self.max_tokens)
        lead = (rows, kv_heads, splits, heads // kv_heads)
        partial, softmax = (self.scratch[name][: rows * splits * heads] for name in ("partial", "softmax"))
        return {"partial_BKXGD": partial.view(*lead, -1), "softmax_BKXG2": softmax.view(*lead, 2)}

    @abstractmethod
    def facts(self, seq: CachedSequence) -> RowFacts:
        """What kernels need to know of a sequence; the new token and its RoPE row are put in by :meth:`load`."""

    @property
    def foresees(self) -> bool:
        """See :attr:`Cache.foresees`."""
        return False

    def foresee(self, layer: int, q_BND: Tensor) -> None:
        """See :meth:`Cache.foresee`."""
        raise NotImplementedError(f"{type(self).__name__} does not foresee")

    @abstractmethod
    def attend(self, layer: int, q_BND: Tensor, out_BND: Tensor) -> None:
        """Attention of the new tokens, whose keys and values are in their slots already. Device work only."""

    @abstractmethod
    def finish(self) -> None:
        """Let the device wait for what the layers have left running. The last call of a step."""


def table_regions(layers: int, max_rows: int) -> list[Region]:
    """The two tables of a step."""
    return [
        Region("addresses", "step", (layers, max_rows, len(Address)), torch.int64),
        Region("facts", "step", (max_rows, len(Fact)), torch.int32),
    ]


def attention_regions(geometry: Geometry, max_rows: int, max_tokens: int) -> list[Region]:
    """Where attention's runs leave what is merged, for rows that see at most ``max_tokens`` tokens.

    Flat, since a smaller batch is divided into more runs.
    """
    runs = most_attention_runs(max_rows, geometry.kv_heads, max_tokens) * geometry.heads
    return [
        Region("partial", "step", (runs, geometry.head_dim), torch.float32),
        Region("softmax", "step", (runs, 2), torch.float32),
    ]


def addresses(seq: CachedSequence, layers: int, columns: Mapping[Address, str]) -> Tensor:
    """Where a sequence's tensors are, [layers, len(Address)] int64 on the host; made once.

    Args:
        columns: names of tensors whose first axis is the layer, or that exist once for every layer with the
            layer's number behind a dot. Those a sequence does not have (it is too short) are left at 0.
    """
    if seq.address_LX is None:
        table = torch.zeros(layers, len(Address), dtype=torch.int64)
        for column, name in columns.items():
            for layer in range(layers):
                tensor = seq.tensors.get(f"{name}.{layer}", seq.tensors.get(name))
                if tensor is None:
                    continue
                by_layer = tensor.dim() > 1 and name in seq.tensors and column not in SAME_IN_ALL_LAYERS
                table[layer, column] = (tensor[layer] if by_layer else tensor).data_ptr()
        seq.address_LX = table
    return seq.address_LX
