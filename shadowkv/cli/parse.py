"""Text of a flag to a number: sizes, token counts, bandwidths. Knows no flag and no setting."""

import re

from shadowkv.errors import ConfigError

_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)(?P<per_second>/s)?")
_BYTES = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_TOKENS = {"": 1, "k": 1024, "m": 1024**2}


def parse_tokens(text: str) -> int:
    """``4096``, ``8k`` or ``1M``; k is 1,024 and M is 1,024 squared, as context lengths are named."""
    return _scaled(text, _TOKENS, "a number of tokens such as 4096, 8k or 1M")


def parse_bytes(text: str) -> int:
    """``512MiB``, ``80GiB``, ``80G`` (binary) or ``80GB`` (decimal)."""
    return _scaled(text, _BYTES, "a size such as 512MiB, 80GiB or 80GB")


def parse_bandwidth(text: str) -> int:
    """Bytes per second: a size, with or without ``/s``."""
    return _scaled(text, _BYTES, "a bandwidth such as 31.5GB/s", rate=True)


def parse_integer(text: str) -> int:
    """A whole number, with a sign if it has one."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


def parse_number(text: str) -> float:
    """A finite decimal number."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{text!r} is not a finite number")
    return value


def parse_share(text: str) -> float:
    """``1.56%`` or ``0.0156``: above 0 and up to 1."""
    share = parse_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share <= 1:
        raise ConfigError(f"{text!r} is not a share; give one above 0 and up to 1, such as 1.56% or 0.0156")
    return share


def format_bytes(count: float) -> str:
    """A size for people: binary units, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration for people: ``4.2 s``, ``3:05`` or ``1:02:03``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scaled(text: str, units: dict[str, int], wanted: str, *, rate: bool = False) -> int:
    match = _NUMBER.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None or match["unit"].lower() not in units or (match["per_second"] and not rate):
        raise ConfigError(f"{text!r} is not {wanted}")
    return round(float(match["number"]) * units[match["unit"].lower()])
