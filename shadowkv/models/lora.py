"""LoRA adapters in peft's format, merged into the weights while they are loaded.

An adapter may change its base's config: by ``shadowkv.json`` beside it, or by the metadata of its
safetensors file, with the keys of ``ConfigOverrides``; the JSON file wins.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shadowkv.errors import CheckpointError, UnsupportedModelError
from shadowkv.models.checkpoint import SafetensorsFile, read_json
from shadowkv.models.config_reader import ConfigOverrides
from shadowkv.models.families import Config

OVERRIDES_FILE = "shadowkv.json"
_PREFIX = "base_model.model."
_SUFFIXES = {"lora_A.weight": "a", "lora_B.weight": "b"}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    # Other initialisations (PiSSA, OLoRA, CorDA, LoftQ) change the base weights too.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings that decide what an adapter means, with the values that are implemented."""


@dataclass(frozen=True)
class LowRankUpdate:
    """W' = W + scale * B @ A. Shapes: a [R, in], b [out, R]."""

    a: Tensor
    b: Tensor
    scale: float


class LoraAdapter:
    """An adapter's updates by the module they belong to.

    Raises:
        CheckpointError: a file is missing or damaged, or two of its statements disagree.
        UnsupportedModelError: it uses a variant of LoRA that is not implemented; names the setting.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = read_json(directory / "adapter_config.json")
        _refuse_variants(directory, self._config)
        self._file = SafetensorsFile(directory / "adapter_model.safetensors")
        self._names: dict[str, dict[str, str]] = {}
        for name in self._file.shapes:
            module, side = self._split(name)
            self._names.setdefault(module, {})[side] = name
        self.overrides = _overrides(directory, self._file.metadata)

    @property
    def modules(self) -> list[str]:
        """Names of the base model's modules that the adapter updates."""
        return list(self._names)

    def update(self, module: str) -> LowRankUpdate:
        """One module's update, on the host."""
        sides = self._names[module]
        for side in ("a", "b"):
            if side not in sides:
                raise CheckpointError(f"the adapter {self.directory} holds only one of lora_A and lora_B of {module}")
        a, b = (self._file.read(sides[s], 0, self._file.shapes[sides[s]][0]) for s in ("a", "b"))
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise CheckpointError(
                f"lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} of {module} do not multiply to an update"
            )
        rank = self._of_module("rank_pattern", "r", module)
        if rank != a.shape[0]:
            raise CheckpointError(f"adapter_config.json gives {module} rank {rank}, its tensors have {a.shape[0]}")
        alpha = self._of_module("alpha_pattern", "lora_alpha", module)
        root = bool(self._config.get("use_rslora", False))
        return LowRankUpdate(a, b, alpha / (math.sqrt(rank) if root else rank))

    def _of_module(self, patterns: str, default: str, module: str) -> float:
        """peft's rule: the first pattern, as a regular expression, that matches the name's end from a dot on."""
        for pattern, value in (self._config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        if not isinstance(self._config.get(default), (int, float)):
            raise CheckpointError(f"adapter_config.json in {self.directory} has no number {default}")
        return float(self._config[default])

    def _split(self, name: str) -> tuple[str, str]:
        for suffix, side in _SUFFIXES.items():
            if name.startswith(_PREFIX) and name.endswith("." + suffix):
                return name[len(_PREFIX) : -len(suffix) - 1], side
        raise UnsupportedModelError(
            f"the adapter tensor {name} in {self.directory} is not implemented; "
            f"implemented are names like {_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
        )


def _refuse_variants(directory: Path, config: Config) -> None:
    for key, value in config.items():
        allowed = _NEUTRAL.get(key)
        if key.startswith("use_") and key != "use_rslora":
            allowed = (False, None)
        if allowed is not None and value not in allowed:
            raise UnsupportedModelError(f"the adapter {directory} sets {key} to {value!r}, which is not implemented")
    if "peft_type" not in config:
        raise CheckpointError(f"adapter_config.json in {directory} has no peft_type")


def _overrides(directory: Path, metadata: Mapping[str, str]) -> ConfigOverrides:
    path = directory / OVERRIDES_FILE
    stated: Config = {key: metadata[key] for key in ConfigOverrides.__dataclass_fields__ if key in metadata}
    stated |= read_json(path) if path.exists() else {}
    if unknown := stated.keys() - ConfigOverrides.__dataclass_fields__.keys():
        allowed = ", ".join(ConfigOverrides.__dataclass_fields__)
        raise CheckpointError(f"{path} sets {', '.join(sorted(unknown))}; allowed: {allowed}")
    try:
        theta = float(stated["rope_theta"]) if "rope_theta" in stated else None
        positions = int(stated["max_position_embeddings"]) if "max_position_embeddings" in stated else None
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the adapter {directory} overrides the config with something not a number: {error}"
        ) from error
    if (theta is not None and not theta > 0) or (positions is not None and positions < 1):
        raise CheckpointError(f"the adapter {directory} overrides the config with {stated}; both must be positive")
    return ConfigOverrides(theta, positions)
