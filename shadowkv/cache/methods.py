"""Which class implements which config: the one place that knows all methods."""

from typing import Any

from shadowkv.cache.base import Cache
from shadowkv.cache.full import FullCache
from shadowkv.cache.infinigen import InfiniGenCache
from shadowkv.cache.loki import LokiCache
from shadowkv.cache.oracle import OracleCache
from shadowkv.cache.quest import QuestCache
from shadowkv.cache.random import RandomCache
from shadowkv.cache.selection import SelectionCache
from shadowkv.cache.shadowkv import ShadowKVCache
from shadowkv.cache.snapkv import SnapKVCache
from shadowkv.cache.streaming import StreamingCache
from shadowkv.config import (
    CacheConfig,
    FullConfig,
    InfiniGenConfig,
    LokiConfig,
    OracleConfig,
    QuestConfig,
    RandomConfig,
    SelectionConfig,
    ShadowKVConfig,
    SnapKVConfig,
    StreamingConfig,
)
from shadowkv.errors import ConfigError

METHODS: dict[type, type[Cache[Any, Any]]] = {
    FullConfig: FullCache,
    ShadowKVConfig: ShadowKVCache,
    SelectionConfig: SelectionCache,
    QuestConfig: QuestCache,
    LokiConfig: LokiCache,
    InfiniGenConfig: InfiniGenCache,
    OracleConfig: OracleCache,
    RandomConfig: RandomCache,
    SnapKVConfig: SnapKVCache,
    StreamingConfig: StreamingCache,
}


def method_of(config: CacheConfig) -> type[Cache[Any, Any]]:
    """The method is chosen by the type of its config."""
    if type(config) not in METHODS:
        known = ", ".join(kind.__name__ for kind in METHODS)
        raise ConfigError(f"cache is {config!r}; give an instance of {known}")
    return METHODS[type(config)]
