"""Flags that name several methods with their settings, and budgets as shares of a length."""

from shadowkv.cli.options import methods, swept
from shadowkv.cli.parse import parse_share
from shadowkv.config import CacheConfig
from shadowkv.errors import ConfigError

METHODS_HELP = "Methods, with commas; METHOD:SETTING=VALUE changes a setting. Default: the one of --method."
BUDGET_HELP = "Budgets as shares of the length, as 1.56%,3.1%. Default: --budget-tokens."


def compared_methods(text: str | None, cache: CacheConfig) -> dict[str, CacheConfig]:
    """The settings of every method that ``--methods`` lists, by what it says there.

    Args:
        cache: the settings of the method of ``--method``, which others have as defaults.

    Raises:
        ConfigError: no such method, setting or value.
    """
    known = methods()
    own = next(name for name, kind in known.items() if kind is type(cache))
    chosen: dict[str, CacheConfig] = {}
    for one in text.split(",") if text else [own]:
        name, *changes = one.split(":")
        if name not in known:
            raise ConfigError(f"--methods names {name!r}; allowed: {', '.join(known)}")
        config = cache if name == own else known[name]()
        for change in changes:
            if change.count("=") != 1:
                raise ConfigError(f"--methods has {one!r}; give METHOD:SETTING=VALUE, such as quest:page-tokens=8")
            ((_, config),) = swept(config, change, flag_name="--methods")
        chosen[one] = config
    return chosen


def budget_shares(text: str) -> list[float]:
    """``1.56%,0.0312`` as shares.

    Raises:
        ConfigError: not above 0 and up to 1.
    """
    return [_share(one) for one in text.split(",")]


def _share(text: str) -> float:
    try:
        return parse_share(text)
    except ConfigError:
        raise ConfigError(f"--budget is {text!r}; give shares of the length such as 1.56% or 0.0156") from None
