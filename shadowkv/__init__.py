"""ShadowKV: long-context inference with low-rank keys on the device and values in host memory.

Importing this package touches no GPU and loads no library until a model is opened.
"""

from typing import TYPE_CHECKING, Any

from shadowkv.config import (
    FullConfig,
    InfiniGenConfig,
    LandmarksConfig,
    LokiConfig,
    OracleConfig,
    QuestConfig,
    RandomConfig,
    SamplingParams,
    SelectionConfig,
    ShadowKVConfig,
    SnapKVConfig,
    StreamingConfig,
)
from shadowkv.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    NumericsError,
    RequestError,
    ShadowKVError,
    ShapeError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from shadowkv.context import Context
    from shadowkv.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Context",
    "FullConfig",
    "InfiniGenConfig",
    "LandmarksConfig",
    "LokiConfig",
    "NumericsError",
    "OracleConfig",
    "QuestConfig",
    "RandomConfig",
    "RequestError",
    "SamplingParams",
    "SelectionConfig",
    "ShadowKVConfig",
    "ShadowKVError",
    "ShapeError",
    "SnapKVConfig",
    "StreamingConfig",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from shadowkv.llm import LLM

        return LLM
    if name == "Context":
        from shadowkv.context import Context

        return Context
    raise AttributeError(f"module 'shadowkv' has no attribute {name!r}")
