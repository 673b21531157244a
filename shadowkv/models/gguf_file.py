"""GGUF files: the header (metadata and the list of tensors), and tensors read through gguf's dequantisers.

The header is parsed here and not by gguf.GGUFReader, for two reasons: it must be readable from a file
that ends after it (to plan memory before fetching gigabytes), and the vocabulary is stepped over, which
takes 15 ms instead of the 2 s that making Python objects of 49,152 tokens does. What the keys mean is
``gguf_config``'s business.

Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from shadowkv.errors import CheckpointError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEPT_ARRAY_LENGTH = 256
"""Longer arrays (vocabulary, merges) are stepped over: the tokenizer reads them itself."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored. ``shape`` is in torch's order, rows first."""

    shape: tuple[int, ...]
    storage: Any
    offset: int

    @property
    def row_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.storage]
        return int(self.shape[-1] // block * block_bytes)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """An open GGUF file.

    Raises:
        CheckpointError: it is not there, is not a GGUF file of version 2 or 3, or ends within its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged or ends within its header, at byte {self._at}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def holds(self, name: str) -> bool:
        """Whether the tensor's bytes are in the file, and not only its entry in the header."""
        tensor = self.tensors[name]
        return tensor.offset + tensor.size_bytes <= len(self._bytes)

    def require_whole(self) -> None:
        """Refuse a file that ends before its last tensor does.

        Raises:
            CheckpointError: names the first tensor that is not all there.
        """
        for name in self.tensors:
            if not self.holds(name):
                raise CheckpointError(f"{self.path} ends before {name} does; fetch it again")

    def read(self, name: str, first_row: int, rows: int) -> Tensor:
        """Some rows of a tensor, dequantised to float32. The rows of a vector are its elements."""
        if not self.holds(name):
            raise CheckpointError(f"{self.path} ends before {name} does; fetch it again")
        tensor = self.tensors[name]
        vector = len(tensor.shape) == 1
        row_bytes = tensor.row_bytes
        start, count = (tensor.offset, 1) if vector else (tensor.offset + first_row * row_bytes, rows)
        stored = numpy.frombuffer(self._bytes, numpy.uint8, count * row_bytes, start).reshape(count, row_bytes)
        try:
            numbers = dequantize(stored, tensor.storage).astype(numpy.float32, copy=False)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"{name} is stored as {tensor.storage.name}: {error}") from error
        if not numbers.flags.writeable:
            numbers = numbers.copy()
        whole = torch.from_numpy(numbers)
        return whole[0, first_row : first_row + rows] if vector else whole.reshape(rows, *tensor.shape[1:])

    def _parse(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it begins with {self._bytes[:4]!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is of GGUF version {version}; versions 2 and 3 can be read")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        for _ in range(pairs):
            key = self._string()
            value = self._value(self._scalar("I"))
            if value is not None:
                self.metadata[key] = value
        entries = [self._entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path} is damaged: its alignment is {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, storage, offset in entries:
            if name in self.tensors:
                raise CheckpointError(f"{self.path} lists {name} twice")
            self.tensors[name] = GgufTensor(shape, storage, data_start + offset)

    def _entry(self) -> tuple[str, tuple[int, ...], Any, int]:
        name = self._string()
        axes = self._scalar("I")
        if not 1 <= axes <= 4:
            raise CheckpointError(f"{self.path} is damaged: {name} has {axes} axes")
        shape = tuple(reversed([self._scalar("Q") for _ in range(axes)]))
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            storage = GGMLQuantizationType(number)
            block, _ = GGML_QUANT_SIZES[storage]
        except (ValueError, KeyError):
            raise UnsupportedModelError(f"{name} is stored as GGML type {number}, which gguf does not know") from None
        if shape[-1] % block:
            raise CheckpointError(f"{self.path} is damaged: {name} {shape} does not divide into {storage.name} blocks")
        return name, shape, storage, offset

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._bytes[self._at : self._at + length]
        if len(raw) != length:
            raise struct.error
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        """A metadata value; None for one that was stepped over."""
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} is damaged: a value of kind {kind} at byte {self._at}")
        item, length = self._scalar("I"), self._scalar("Q")
        if length <= _KEPT_ARRAY_LENGTH:
            return [self._value(item) for _ in range(length)]
        if item in _SCALARS:
            self._at += length * struct.calcsize("<" + _SCALARS[item])
        elif item == _STRING:
            for _ in range(length):
                self._at += 8 + struct.unpack_from("<Q", self._bytes, self._at)[0]
        else:
            raise CheckpointError(f"{self.path} is damaged: a long array of arrays at byte {self._at}")
        return None
