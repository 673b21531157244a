"""The one way to a figure: matplotlib without its global state, and what is said where it is missing."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shadowkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "figures need matplotlib, which is not installed: pip install 'shadowkv-inference[figures]'"
DOTS_PER_INCH = 120


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sizes in inches, whose parts do not overlap.

    Raises:
        ConfigError: matplotlib is not installed; says how to get it.
    """
    if not can_draw():
        raise ConfigError(MISSING)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path
