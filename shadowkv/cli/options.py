"""Settings to flags: the one place where a field of a dataclass becomes an option of a command.

A command asks for ``cache: CacheConfig``, ``sampling: SamplingParams`` or any frozen dataclass in its
signature, and ``settings_as_flags`` puts one flag per field in its place, with the field's docstring as
help. A new setting, or a new method in ``CacheConfig``, needs no line here.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from shadowkv.cli.failures import reported
from shadowkv.cli.parse import parse_bandwidth, parse_bytes, parse_integer, parse_number, parse_share, parse_tokens
from shadowkv.config import CacheConfig, ShadowKVConfig
from shadowkv.errors import ConfigError

Given = str | bool | list[str] | None
"""What typer hands over for a generated flag; None where the user did not write it."""
SWITCH = {"yes": True, "no": False}
"""How a switch is written where it is not a flag of its own."""


@dataclass(frozen=True)
class Flag:
    """One generated option and how its text becomes the field's value."""

    field: str
    option: str
    metavar: str
    help: str
    default: str
    annotation: object
    read: Callable[[Given], object]

    def value(self, given: Given) -> object:
        """The field's value. Raises ConfigError that names the flag."""
        try:
            return self.read(given)
        except ConfigError as error:
            raise ConfigError(f"{self.option}: {error}") from None

    def swept_value(self, text: str) -> object:
        """The field's value where a switch, too, is written as text. Raises ConfigError that names the flag."""
        if self.annotation != (bool | None):
            return self.value(text)
        if text not in SWITCH:
            raise ConfigError(f"{self.option}: {text!r} is not allowed; allowed: {', '.join(SWITCH)}")
        return SWITCH[text]

    def parameter(self) -> inspect.Parameter:
        """The parameter that makes typer show and parse this flag."""
        flag = self.option.removeprefix("--")
        declaration = f"--{flag}/--no-{flag}" if self.annotation == (bool | None) else f"--{flag}"
        option = typer.Option(
            declaration,
            metavar=self.metavar or None,
            help=f"{self.help} Default: {self.default}.".strip() if self.default else self.help,
            show_default=False,
        )
        return inspect.Parameter(
            self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[self.annotation, option]
        )


def methods() -> dict[str, type]:
    """Every cache method by its name on the command line."""
    return {_kind_name(config): config for config in get_args(CacheConfig)}


def flags_of(config: type) -> list[Flag]:
    """One flag for each field of a dataclass."""
    hints, helps = get_type_hints(config), field_docs(config)
    found = []
    for item in fields(config):
        default = item.default if item.default is not MISSING else item.default_factory
        metavar, annotation, read = _reader(item.name, hints[item.name])
        option = item.metadata.get("option", "--" + item.name.removesuffix("_bytes").replace("_", "-"))
        found.append(Flag(item.name, option, metavar, helps.get(item.name, ""), _shown(default), annotation, read))
    return found


def swept(base: CacheConfig, option: str, flag_name: str = "--sweep") -> list[tuple[str, CacheConfig]]:
    """The configs that one ``SETTING=VALUE,VALUE`` asks for, each with its label.

    Args:
        flag_name: what the error names.

    Raises:
        ConfigError: no such setting, or no such value of it.
    """
    name, found, values = option.partition("=")
    flags = {flag.option.removeprefix("--"): flag for flag in flags_of(type(base))}
    flag = flags.get(name.replace("_", "-"))
    if not found or not values or flag is None:
        raise ConfigError(f"{flag_name} has {option!r}; give SETTING=VALUE,... with one of {', '.join(flags)}")
    made: list[tuple[str, CacheConfig]] = []
    for value in values.split(","):
        change: dict[str, Any] = {flag.field: flag.swept_value(value)}
        made.append((f"{name}={value}", replace(base, **change)))
    return made


def words_of(config: CacheConfig) -> list[str]:
    """What to write on a command line for these settings: the flags of those that differ from the defaults."""
    usual = type(config)()
    words = [] if isinstance(config, ShadowKVConfig) else ["--method", _kind_name(type(config))]
    for flag in flags_of(type(config)):
        value = getattr(config, flag.field)
        if value == getattr(usual, flag.field):
            continue
        if isinstance(value, bool):
            words.append(flag.option if value else f"--no-{flag.option.removeprefix('--')}")
        else:
            parts = value if isinstance(value, tuple) else (value,)
            words += [flag.option, ",".join(str(part) for part in parts)]
    return words


def field_docs(config: type) -> dict[str, str]:
    """The string under each field of a class or of those that it extends, on one line."""
    docs = {}
    for owner in reversed([kind for kind in config.__mro__ if is_dataclass(kind)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[item.target.id] = " ".join(after.value.value.replace("``", "").split())
    return docs


def settings_as_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter that is a settings dataclass (or ``CacheConfig``) by its flags."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    builders: dict[str, Callable[[dict[str, Given]], object]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if hint == CacheConfig:
            generated, builders[parameter.name] = _method_flags()
        elif isinstance(hint, type) and is_dataclass(hint):
            generated, builders[parameter.name] = _dataclass_flags(hint)
        else:
            generated = [parameter.replace(annotation=hint)]
        parameters += generated

    plain = [p.name for p in inspect.signature(command).parameters.values() if p.name not in builders]

    # typer calls back by keyword, and which keywords there are is known only here, at run time.
    @functools.wraps(command)
    def called(**given: Any) -> None:
        with reported():
            built = {name: build(given) for name, build in builders.items()}
            command(**{name: given[name] for name in plain}, **built)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    called.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in keyword_only}
    return called


def _dataclass_flags(config: type) -> tuple[list[inspect.Parameter], Callable[[dict[str, Given]], object]]:
    flags = flags_of(config)

    def build(given: dict[str, Given]) -> object:
        return config(**{f.field: f.value(given[f.field]) for f in flags if _written(given[f.field])})

    return [flag.parameter() for flag in flags], build


def _method_flags() -> tuple[list[inspect.Parameter], Callable[[dict[str, Given]], object]]:
    by_method = {name: {flag.field: flag for flag in flags_of(config)} for name, config in methods().items()}
    merged: dict[str, Flag] = {}
    defaults: dict[str, dict[str, list[str]]] = {}
    for method, flags in by_method.items():
        for name, flag in flags.items():
            assert merged.setdefault(name, flag).annotation == flag.annotation, f"--{name} means two things"
            defaults.setdefault(name, {}).setdefault(flag.default, []).append(method)
    merged = {name: replace(flag, default=_by_method(defaults[name])) for name, flag in merged.items()}
    default = _kind_name(ShadowKVConfig)
    choice = Flag("method", "--method", "|".join(by_method), "How the context is remembered.", default, str | None, str)

    def build(given: dict[str, Given]) -> object:
        method = given["method"] or default
        if method not in by_method:
            raise ConfigError(f"--method is {method!r}; allowed: {', '.join(by_method)}")
        written = {name: flag for name, flag in merged.items() if _written(given[name])}
        for name, flag in written.items():
            if name not in by_method[method]:
                owners = " or ".join(other for other, flags in by_method.items() if name in flags)
                raise ConfigError(f"{flag.option} is a setting of --method {owners}, not of --method {method}")
        return methods()[method](**{name: flag.value(given[name]) for name, flag in written.items()})

    return [flag.parameter() for flag in (choice, *merged.values())], build


def _by_method(defaults: dict[str, list[str]]) -> str:
    """A default that all owners of a flag share, or whose is which."""
    if len(defaults) == 1:
        return next(iter(defaults))
    return "; ".join(f"{default} ({', '.join(methods)})" for default, methods in defaults.items() if default)


def _written(given: Given) -> bool:
    return given is not None and given != []


def _kind_name(config: type) -> str:
    return config.__name__.removesuffix("Config").lower()


def _shown(default: object) -> str:
    if default is None or default == () or default is MISSING:
        return ""
    if is_dataclass(default):
        return _kind_name(type(default))
    return ("yes" if default else "no") if isinstance(default, bool) else str(default)


def _reader(name: str, hint: object) -> tuple[str, object, Callable[[Given], object]]:
    """Metavar, typer annotation and reader for a field of this name and type."""
    union = get_origin(hint) in (Union, UnionType)
    kinds = tuple(kind for kind in (get_args(hint) if union else (hint,)) if kind is not NoneType)
    if kinds == (bool,):
        return "", bool | None, bool
    if any(is_dataclass(kind) for kind in kinds):
        named = {_kind_name(kind): kind for kind in kinds if isinstance(kind, type)}
        return "|".join(named), str | None, lambda text: _chosen(text, named)()
    if get_origin(kinds[0]) is Literal:
        allowed = {str(value): value for value in get_args(kinds[0])}
        return "|".join(allowed), str | None, lambda text: _chosen(text, allowed)
    if kinds == (str,):
        return "TEXT", str | None, str
    if kinds == (float,) and name.endswith("_bandwidth"):
        return "SIZE/s", str | None, lambda text: float(parse_bandwidth(str(text)))
    if kinds == (float,) and name.endswith("_share"):
        return "SHARE", str | None, lambda text: parse_share(str(text))
    if kinds == (float,):
        return "X", str | None, lambda text: parse_number(str(text))
    if kinds == (tuple[str, ...],):
        return "TEXT", list[str] | None, lambda texts: tuple(_texts(texts))
    if kinds == (tuple[int, ...],):
        return "N", list[str] | None, lambda texts: tuple(parse_integer(text) for text in _texts(texts))
    if kinds == (int, tuple[int, ...]):
        return "N[,N...]", str | None, _one_or_several
    assert kinds == (int,), f"no flag is known for {name}: {hint}"
    if name.endswith("_bytes"):
        return "SIZE", str | None, lambda text: parse_bytes(str(text))
    if name.endswith("_tokens"):
        return "TOKENS", str | None, lambda text: parse_tokens(str(text))
    return "N", str | None, lambda text: parse_integer(str(text))


def _one_or_several(text: Given) -> int | tuple[int, ...]:
    numbers = tuple(parse_integer(part) for part in str(text).split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def _texts(given: Given) -> list[str]:
    assert isinstance(given, list)
    return given


def _chosen(text: Given, allowed: dict[str, Any]) -> Any:
    if text not in allowed:
        raise ConfigError(f"{text!r} is not allowed; allowed: {', '.join(allowed)}")
    return allowed[str(text)]
