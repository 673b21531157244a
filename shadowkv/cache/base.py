"""The contract between a decoder and what it remembers: verbs, views, prices.

A *sequence* owns one extent of device memory and one of host memory, reserved for its whole capacity
when it is opened, so nothing is allocated while it runs and nothing can run out half-way. Lengths live
on the host and are never inferred from tensors.

Order of calls. Prompt: ``open``, ``begin_prompt``, ``take_layer`` for every layer. Then, for every
forward pass: ``extend`` once (makes room, moves the lengths), and for every layer ``append`` and ``view``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.pool import Extent
from shadowkv.errors import CapacityError
from shadowkv.ops.rope import Rope


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that a cache needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def key_dim(self) -> int:
        """Width of all KV heads together, K*D."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Price:
    """Bytes that one sequence takes, by kind. These are the bytes that ``open`` reserves."""

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class DenseView:
    """Attend causally to a contiguous run: the T queries are the last T of the S tokens.

    Shapes: k_KSD, v_KSD.
    """

    k_KSD: Tensor
    v_KSD: Tensor


@dataclass(frozen=True)
class SlotView:
    """Attend to slots in any order; ``allowed_KTE`` says which slot each query may see.

    Shapes: k_KED, v_KED, allowed_KTE (bool).
    """

    k_KED: Tensor
    v_KED: Tensor
    allowed_KTE: Tensor


View = DenseView | SlotView


@dataclass
class CacheStats:
    """What a method did for one sequence. Counts are summed over layers, KV heads and steps.

    ``hits`` and ``misses`` count selected chunks; ``fetched_bytes`` crossed from the value store.
    ``rank`` and ``energy`` (share of the squared norm of the prompt's centred keys) are by layer.
    """

    attention: str = "exact"
    steps: int = 0
    selected_chunks: int = 0
    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    rank: list[int] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float | None:
        looked_up = self.hits + self.misses
        return self.hits / looked_up if looked_up else None


@dataclass(eq=False)
class CachedSequence:
    """One sequence's reservation and lengths. Methods subclass it to hang their tensors on."""

    capacity_tokens: int
    device: Extent
    host: Extent | None
    tokens: int = 0
    released: bool = False


class Cache(ABC):
    """What is remembered of every running sequence, for all layers."""

    name: str

    def __init__(self, geometry: Geometry, rope: Rope, device: Arena, host: Arena) -> None:
        self.geometry = geometry
        self.rope = rope
        self.device_arena = device
        self.host_arena = host

    @classmethod
    @abstractmethod
    def price(cls, geometry: Geometry, config: object, capacity_tokens: int) -> Price:
        """Bytes that a sequence of at most ``capacity_tokens`` tokens reserves."""

    @property
    @abstractmethod
    def append_tokens(self) -> int:
        """The most tokens that one ``extend`` of a sequence may add."""

    @abstractmethod
    def open(self, capacity_tokens: int) -> CachedSequence:
        """Reserve memory for a new, empty sequence. Raises CapacityError when it does not fit."""

    @abstractmethod
    def begin_prompt(self, seq: CachedSequence, tokens: int) -> None:
        """Announce a prompt of ``tokens`` tokens for an empty sequence."""

    @abstractmethod
    def take_layer(self, layer: int, seq: CachedSequence, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Keep one layer of the prompt; the tensors may be freed by the caller afterwards.

        Raises:
            NumericsError: a key is NaN or infinite; names the layer.
        """

    @abstractmethod
    def extend(self, seqs: Seq[CachedSequence], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        """Add ``tokens`` positions to each sequence, to be written by ``append`` in every layer.

        Args:
            rope_lengths: length that decides each sequence's RoPE row, when these tokens are a piece
                of a longer append; by default the new length.

        Raises:
            CapacityError: a reservation is too short; nothing has been changed then.
        """

    @abstractmethod
    def append(self, layer: int, seqs: Seq[CachedSequence], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Write the post-RoPE keys and the values of the positions just added."""

    @abstractmethod
    def view(self, layer: int, seqs: Seq[CachedSequence], q_BNTD: Tensor) -> list[View]:
        """What these queries (of the last T positions, already appended) may attend to, per sequence."""

    @abstractmethod
    def fork(self, seq: CachedSequence, capacity_tokens: int) -> CachedSequence:
        """An independent copy with its own reservation; ``capacity_tokens`` >= ``seq.tokens``."""

    @abstractmethod
    def stats(self, seq: CachedSequence) -> CacheStats:
        """Counters of this sequence (copied; waits for the device)."""

    def release(self, seq: CachedSequence) -> None:
        """Give the sequence's memory back at once. Releasing twice is an error of the caller."""
        assert not seq.released, "sequence released twice"
        seq.released = True
        self.device_arena.free(seq.device)
        if seq.host is not None:
            self.host_arena.free(seq.host)

    def rope_row(self, tokens: int) -> int:
        return self.rope.row(tokens)

    def _check_room(self, seqs: Seq[CachedSequence], tokens: int) -> None:
        for seq in seqs:
            if seq.tokens + tokens > seq.capacity_tokens:
                raise CapacityError(
                    f"the sequence holds {seq.tokens} of {seq.capacity_tokens} reserved tokens and "
                    f"{tokens} more were to be added; open or fork it with a larger capacity"
                )
