"""Every operation with a kernel, found by its contract: a new one needs no line here."""

import importlib
import inspect
import pkgutil
from typing import Any

from shadowkv.ops import contract
from shadowkv.ops.contract.base import Op


def _found() -> tuple[Op[Any, Any], ...]:
    """One instance of every concrete contract, in the order of module names and of definition."""
    kinds: dict[type[Op[Any, Any]], None] = {}
    for module in pkgutil.iter_modules(contract.__path__, f"{contract.__name__}."):
        if module.name == __name__:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            own = inspect.isclass(value) and value.__module__ == module.name
            if own and issubclass(value, Op) and not inspect.isabstract(value):
                kinds[value] = None
    return tuple(kind() for kind in kinds)


OPS: tuple[Op[Any, Any], ...] = _found()
"""All of them."""
