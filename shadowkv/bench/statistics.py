"""Percentiles and spreads of repeated timings. Knows no device."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shadowkv.errors import ConfigError


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, by linear interpolation between its neighbours."""
    if not values:
        raise ConfigError("there is nothing to take a percentile of; measure at least once")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Spread:
    """Repeated timings of one thing, in milliseconds: median, and the 10th and 90th percentiles."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repetitions: int

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Spread":
        """Of all repetitions.

        Raises:
            ConfigError: there is none.
        """
        median, low, high = (percentile(times_ms, share) for share in (0.5, 0.1, 0.9))
        return cls(median, low, high, len(times_ms))

    def text(self) -> str:
        """``0.1234 (0.1230 to 0.1250)``, with four significant digits of the median."""
        return f"{self.median_ms:.4g} ({self.p10_ms:.4g} to {self.p90_ms:.4g})"

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)
