"""Where weights come from: named tensors that are read a few rows at a time. Knows no model.

Reads Hugging Face directories of safetensors files; ``gguf_file`` reads GGUF files by the same protocol.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shadowkv.errors import CheckpointError, UnsupportedModelError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it is not there or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; a JSON object is needed")
    return value


class TensorSource(Protocol):
    """A checkpoint's tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that the files hold."""

    def read(self, name: str, first_row: int, rows: int) -> Tensor:
        """Some rows of a tensor, on the host, in a floating-point dtype.

        Raises:
            CheckpointError: the file is damaged.
            UnsupportedModelError: the numbers are stored in a way that cannot be read.
        """


def _open(path: Path) -> Any:  # safetensors' own stubs are without types
    return safe_open(str(path), framework="pt", device="cpu")


class SafetensorsFile:
    """One safetensors file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The handle stays open: its pages are the file's, not a copy.
            self._file = _open(path)
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(self._file.get_slice(name).get_shape())
                for name in self._file.keys()  # noqa: SIM118
            }
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or damaged ({error}); fetch it again") from error

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self._file.metadata() or {})

    def read(self, name: str, first_row: int, rows: int) -> Tensor:
        try:
            tensor: Tensor = self._file.get_slice(name)[first_row : first_row + rows]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} in {self.path} cannot be read ({error}); fetch the file again") from error
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModelError(f"{name} in {self.path} is stored as {tensor.dtype}, which is not implemented")
        return tensor


class SafetensorsDirectory:
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

    Raises:
        CheckpointError: there is neither, a shard is missing or damaged, or the index names a tensor
            that its shard does not hold.
    """

    def __init__(self, directory: Path) -> None:
        self._file_of: dict[str, SafetensorsFile] = {}
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.exists():
            self._open_shards(directory, index)
        elif single.exists():
            self._add(SafetensorsFile(single))
        else:
            raise CheckpointError(_why_no_weights(directory))
        self.shapes: Mapping[str, tuple[int, ...]] = {n: f.shapes[n] for n, f in self._file_of.items()}

    def read(self, name: str, first_row: int, rows: int) -> Tensor:
        return self._file_of[name].read(name, first_row, rows)

    def _open_shards(self, directory: Path, index: Path) -> None:
        shard_of = read_json(index).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        for shard in sorted(set(shard_of.values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names the shard {shard!r}; only files beside it are read")
            self._add(SafetensorsFile(directory / shard))
        for name, shard in shard_of.items():
            if name not in self._file_of or self._file_of[name].path.name != shard:
                raise CheckpointError(f"{name} should be in {directory / shard} and is not")

    def _add(self, file: SafetensorsFile) -> None:
        for name in file.shapes:
            if name in self._file_of:
                raise CheckpointError(f"{name} is in both {self._file_of[name].path} and {file.path}")
            self._file_of[name] = file


def _why_no_weights(directory: Path) -> str:
    found = sorted(path.name for path in directory.iterdir())
    if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
        return (
            f"{directory} holds pickled weights only (.bin); they can run code when they are read, so they are not. "
            "Convert them with transformers: save_pretrained(directory) writes model.safetensors"
        )
    if ggufs := [name for name in found if name.endswith(".gguf")]:
        return f"{directory} holds no model.safetensors; to load a GGUF file give its path: {directory / ggufs[0]}"
    return f"{directory} holds neither model.safetensors nor model.safetensors.index.json"
