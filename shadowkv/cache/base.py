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
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from shadowkv.cache.arena import Arena
from shadowkv.cache.layout import Region, bytes_by_kind, carve, copy_overlap, total_bytes
from shadowkv.cache.pool import Reservation, release, reserve
from shadowkv.errors import CapacityError, ConfigError, NumericsError
from shadowkv.ops.rope import Rope
from shadowkv.ops.views import View

if TYPE_CHECKING:
    from shadowkv.cache.recorded import RecordedPrompt
    from shadowkv.cache.step import DecodeStep


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that a cache needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def key_dim(self) -> int:
        """Width of all KV heads together, K*D."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Price:
    """Bytes that one sequence reserves, by kind. Nothing else is allocated for it."""

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass
class CacheStats:
    """What a method did for one sequence. Counts are summed over layers, KV heads and steps.

    ``hits`` and ``misses`` split the selected chunks; ``fetched_bytes`` crossed from the value store;
    ``resident_bytes`` are the keys and values in slots of the exact region now.
    ``hit_rates`` (hits over selected chunks), ``rank`` and ``energy`` (share of the squared norm of the compressed
    keys that the rank keeps) are by layer, and empty while attention is exact.
    """

    method: str
    attention: str
    tokens: int
    device_bytes: int
    host_bytes: int
    hits: int = 0
    misses: int = 0
    hit_rates: list[float] = field(default_factory=list)
    fetched_chunks: int = 0
    fetched_bytes: int = 0
    resident_bytes: int = 0
    rank: list[int] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)

    @property
    def selected_chunks(self) -> int:
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.selected_chunks if self.selected_chunks else None


@dataclass(eq=False)
class CachedSequence:
    """One sequence's memory, tensors and lengths.

    ``owns_memory`` says whether :meth:`Cache.release` gives the reservation back, or whoever made it.
    """

    reservation: Reservation
    owns_memory: bool
    price: Price
    tensors: dict[str, Tensor]
    tokens: int = 0
    released: bool = False
    address_LX: Tensor | None = None
    """Where kernels find the tensors, on the host, once a step has asked for it (``cache.step``)."""

    @property
    def capacity_tokens(self) -> int:
        return self.reservation.capacity_tokens


DENSE_APPEND_TOKENS = 128
"""What methods with a dense view take of an appended turn at a time: it bounds the [T, S] mask."""


class PromptSink(Protocol):
    """What a prompt is given to, layer by layer: a cache, or several at once."""

    @property
    def prompt_queries(self) -> int:
        """See :attr:`Cache.prompt_queries`."""

    def begin_prompt(self, seq: Any, tokens: int) -> None:
        """See :meth:`Cache.begin_prompt`."""

    def take_layer(
        self, layer: int, seq: Any, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        """See :meth:`Cache.take_layer`."""


ConfigT = TypeVar("ConfigT")
SequenceT = TypeVar("SequenceT", bound=CachedSequence)


class Cache(ABC, Generic[ConfigT, SequenceT]):
    """What is remembered of every running sequence, for all layers."""

    name: ClassVar[str]
    foresees: ClassVar[bool] = False
    """Whether :meth:`foresee` is to be told every layer's queries, all but the first's, before the layer's turn."""

    def __init__(self, geometry: Geometry, config: ConfigT, rope: Rope, device: Arena, host: Arena) -> None:
        self.check(geometry, config)
        self.geometry = geometry
        self.config = config
        self.rope = rope
        self.device_arena = device
        self.host_arena = host

    # Prices: pure arithmetic, so that a plan needs no tensor and no device.

    @classmethod
    def check(cls, geometry: Geometry, config: ConfigT) -> None:
        """Raise ConfigError where the settings do not fit the model."""

    @classmethod
    @abstractmethod
    def regions(cls, geometry: Geometry, config: ConfigT, capacity_tokens: int) -> tuple[list[Region], list[Region]]:
        """The tensors of a sequence of at most ``capacity_tokens`` tokens: on the device, on the host."""

    @classmethod
    def price(cls, geometry: Geometry, config: ConfigT, capacity_tokens: int) -> Price:
        """Bytes that :meth:`open` reserves for a sequence of at most ``capacity_tokens`` tokens."""
        device, host = cls.regions(geometry, config, capacity_tokens)
        return Price(bytes_by_kind(device), bytes_by_kind(host))

    @property
    @abstractmethod
    def append_tokens(self) -> int:
        """The most tokens that one :meth:`extend` may add to a sequence."""

    # The life of a sequence.

    def open(self, capacity: int | Reservation) -> SequenceT:
        """A new, empty sequence for at most ``capacity`` tokens.

        Args:
            capacity: tokens, to reserve memory here and give it back on release; or memory reserved
                already at :meth:`price`, which stays the caller's.

        Raises:
            ConfigError: the capacity is not positive.
            CapacityError: the memory is not there; nothing has been taken then.
        """
        tokens = capacity if isinstance(capacity, int) else capacity.capacity_tokens
        if tokens < 1:
            raise ConfigError(f"the capacity is {tokens} tokens; it must be at least 1")
        on_device, on_host = self.regions(self.geometry, self.config, tokens)
        reservation = self._reserve(tokens, on_device, on_host) if isinstance(capacity, int) else capacity
        tensors = carve(self.device_arena, reservation.device, on_device)
        if reservation.host is not None:
            tensors |= carve(self.host_arena, reservation.host, on_host)
        price = self.price(self.geometry, self.config, tokens)
        return self._new_sequence(reservation, isinstance(capacity, int), price, tensors)

    def _reserve(self, tokens: int, on_device: list[Region], on_host: list[Region]) -> Reservation:
        device_bytes, host_bytes = total_bytes(on_device), total_bytes(on_host)
        reservation = reserve(self.device_arena, self.host_arena, tokens, device_bytes, host_bytes)
        if reservation is None:
            raise CapacityError(
                f"a sequence of {tokens} tokens needs {device_bytes:,} bytes on the device "
                f"({self.device_arena.describe_free()}) and {host_bytes:,} on the host "
                f"({self.host_arena.describe_free()})"
            )
        return reservation

    def can_fork(self, seq: SequenceT, capacity_tokens: int) -> bool:
        """Whether a sequence opened for so many tokens has the tensors to go on from this one."""
        return True

    def fork(self, seq: SequenceT, capacity: int | Reservation) -> SequenceT:
        """An independent copy; ``capacity`` as for :meth:`open`.

        Raises:
            CapacityError: the memory is not there, or the capacity is below the tokens there are.
        """
        tokens = capacity if isinstance(capacity, int) else capacity.capacity_tokens
        if tokens < seq.tokens:
            raise CapacityError(f"{seq.tokens} tokens do not fit into a copy for {tokens}")
        copy = self.open(capacity)
        copy_overlap(seq.tensors, copy.tensors)
        self._copy_lengths(seq, copy)
        return copy

    def release(self, seq: SequenceT) -> None:
        """Forget the sequence, and give back at once the memory that it owns."""
        assert not seq.released, "sequence released twice"
        seq.released = True
        seq.tensors.clear()
        if seq.owns_memory:
            release(self.device_arena, self.host_arena, seq.reservation)

    @abstractmethod
    def _new_sequence(
        self, reservation: Reservation, owns_memory: bool, price: Price, tensors: dict[str, Tensor]
    ) -> SequenceT: ...

    @abstractmethod
    def _copy_lengths(self, source: SequenceT, target: SequenceT) -> None: ...

    # One prompt.

    @abstractmethod
    def begin_prompt(self, seq: SequenceT, tokens: int) -> None:
        """Announce a prompt of ``tokens`` tokens for an empty sequence.

        Raises:
            CapacityError: it is longer than the reservation.
        """

    @property
    def prompt_queries(self) -> int:
        """How many of the prompt's last positions' post-RoPE queries :meth:`take_layer` needs."""
        return 0

    @abstractmethod
    def take_layer(
        self, layer: int, seq: SequenceT, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        """Keep one layer of the prompt: keys before and after RoPE, values. They may be freed afterwards.

        Args:
            q_NWD: the last ``prompt_queries`` positions' queries after RoPE (fewer where the prompt is
                shorter), or None where the method asks for none.

        Raises:
            NumericsError: a key is NaN or infinite; names the layer.
        """

    def take_prompt(self, seq: SequenceT, prompt: "RecordedPrompt") -> None:
        """Take a whole prompt that was computed before, into an empty sequence.

        Raises:
            CapacityError, NumericsError: as :meth:`begin_prompt` and :meth:`take_layer`.
        """
        self.begin_prompt(seq, prompt.tokens)
        for layer in range(self.geometry.layers):
            self.take_layer(layer, seq, *prompt.layer(layer), prompt.queries(layer, self.prompt_queries))

    # New tokens.

    @abstractmethod
    def extend(self, seqs: Seq[SequenceT], tokens: int, rope_lengths: Seq[int] | None = None) -> None:
        """Add ``tokens`` positions to each sequence, to be written by :meth:`append` in every layer.

        Args:
            rope_lengths: the length that decides each sequence's RoPE row, when these tokens are a
                piece of a longer append; by default the new length.

        Raises:
            CapacityError: a reservation is too short; nothing has been changed then.
        """

    @abstractmethod
    def append(self, layer: int, seqs: Seq[SequenceT], k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Write the post-RoPE keys and the values of the positions just added."""

    def foresee(self, layer: int, q_BNTD: Tensor) -> None:
        """What this layer's queries, after RoPE, would be if the layer before it added nothing."""

    @abstractmethod
    def view(self, layer: int, seqs: Seq[SequenceT], q_BNTD: Tensor) -> list[View]:
        """What these queries (the last T positions, already appended) may attend to, per sequence."""

    # One step of a batch by kernels.

    @classmethod
    def step_regions(
        cls, geometry: Geometry, config: ConfigT, max_rows: int, capacity_tokens: int
    ) -> list[Region] | None:
        """What a step of ``max_rows`` sequences of at most ``capacity_tokens`` tokens works in, besides theirs.

        None: there are no kernels for this method or these settings; it is computed sequence by sequence.
        """
        return None

    def make_step(self, max_rows: int, capacity_tokens: int) -> "DecodeStep | None":
        """See ``cache.step``; None where :meth:`step_regions` is."""
        return None

    @abstractmethod
    def stats(self, seq: SequenceT) -> CacheStats:
        """This sequence's counters (waits for the device)."""

    def _check_room(self, seqs: Seq[SequenceT], tokens: int) -> None:
        assert 1 <= tokens <= self.append_tokens, "an append is longer than append_tokens"
        for seq in seqs:
            if seq.tokens + tokens > seq.capacity_tokens:
                raise CapacityError(
                    f"the sequence holds {seq.tokens} of {seq.capacity_tokens} reserved tokens and "
                    f"{tokens} more were to be added; reserve more when it is opened or forked"
                )

    def _check_prompt(self, seq: SequenceT, tokens: int) -> None:
        assert seq.tokens == 0, "a prompt starts an empty sequence"
        if not 1 <= tokens <= seq.capacity_tokens:
            raise CapacityError(
                f"a prompt of {tokens} tokens does not fit a sequence reserved for {seq.capacity_tokens}"
            )


def require_finite(layer: int, k_KSD: Tensor) -> None:
    """Refuse keys that are NaN or infinite with a NumericsError that names the layer."""
    if not torch.isfinite(k_KSD).all():
        raise NumericsError(f"layer {layer}: a key is NaN or infinite; check the checkpoint and the dtype")
