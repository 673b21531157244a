"""From a model's files to its spec, and to a decoder."""

from typing import Literal

import torch

from shadowkv.errors import ConfigError
from shadowkv.models.checkpoint import SafetensorsDirectory, TensorSource, read_json
from shadowkv.models.config_reader import ConfigOverrides, family_of_config, spec_from_config
from shadowkv.models.decoder import Decoder
from shadowkv.models.families import Family, Names
from shadowkv.models.gguf_config import config_from_gguf, spec_from_gguf
from shadowkv.models.gguf_file import GgufFile
from shadowkv.models.locate import ModelFiles
from shadowkv.models.lora import LoraAdapter
from shadowkv.models.rope import build_rope
from shadowkv.models.spec import ModelSpec
from shadowkv.models.weights import Progress, load_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_spec(files: ModelFiles) -> ModelSpec:
    """What the model is, from its config.json or GGUF header (and its adapter's overrides); no weights.

    Raises:
        UnsupportedModelError: the model is of a kind that cannot be run.
        CheckpointError: a file is missing or damaged.
    """
    overrides = LoraAdapter(files.adapter).overrides if files.adapter is not None else None
    return _Opened(files, overrides).spec


def load_decoder(
    files: ModelFiles,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | Literal["auto"] = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """The model with its weights on the device.

    Args:
        dtype: of the weights; auto is the checkpoint's own on a GPU and float32 on a CPU.

    Raises:
        UnsupportedModelError: the model is of a kind that cannot be run.
        CheckpointError: a file is missing, damaged, or does not match the config; names the tensor.
        ConfigError: the dtype is not one of ``DTYPES``.
    """
    place = torch.device(device)
    adapter = LoraAdapter(files.adapter) if files.adapter is not None else None
    opened = _Opened(files, adapter.overrides if adapter is not None else None)
    chosen = resolve_dtype(opened.spec, place, dtype)
    rope = build_rope(opened.spec, place)
    for length in (1, opened.spec.context_tokens):
        rope.row(length)  # a bad setting is found before the weights are read, not by a request
    weights = load_weights(
        opened.spec,
        opened.source(),
        opened.names,
        device=place,
        dtype=chosen,
        permuted=opened.permuted,
        adapter=adapter,
        adapter_names=opened.family.names,
        progress=progress,
    )
    return Decoder(opened.spec, weights, rope)


def resolve_dtype(spec: ModelSpec, device: torch.device, dtype: torch.dtype | Literal["auto"]) -> torch.dtype:
    """What "auto" means for this model on this device."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else spec.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype}; allowed: auto, {', '.join(str(d) for d in DTYPES)}")
    return dtype


class _Opened:
    """A model's files with their config read."""

    family: Family
    spec: ModelSpec
    names: Names
    permuted: bool

    def __init__(self, files: ModelFiles, overrides: ConfigOverrides | None) -> None:
        self._files = files
        self._gguf: GgufFile | None = None
        if files.gguf is not None:
            self._gguf = GgufFile(files.gguf)
            self.family = family_of_config(config_from_gguf(self._gguf))
            self.spec = spec_from_gguf(self._gguf, overrides)
            assert self.family.gguf_names is not None
            self.names, self.permuted = self.family.gguf_names, self.family.gguf_permuted
        else:
            assert files.directory is not None
            config = read_json(files.directory / "config.json")
            self.family = family_of_config(config)
            self.spec = spec_from_config(config, overrides)
            self.names, self.permuted = self.family.names, False

    def source(self) -> TensorSource:
        if self._gguf is not None:
            return self._gguf
        assert self._files.directory is not None
        return SafetensorsDirectory(self._files.directory)
