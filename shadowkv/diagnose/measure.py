"""Which of several settings agrees best with full attention on this text, measured on its logits.

In two rounds, so that the figures of what is recommended are not those that it was chosen by. The first compares the
candidates on the prompt's continuation. The second moves the prompt on by as many tokens as were fed, and
measures the best candidate there, with its whole budget chosen in each step and with parts of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shadowkv.config import ShadowKVConfig
from shadowkv.diagnose.recommend import Candidate, fewer_fetches
from shadowkv.diagnose.settings import RESIDENT_MULTIPLES, DiagnoseSettings
from shadowkv.eval.agreement import Agreement, Report, compare, copy_passage, natural_passage
from shadowkv.models.decoder import Decoder


@dataclass(frozen=True)
class Measured:
    """One candidate on a passage that goes on and on one that repeats an early part of itself."""

    candidate: Candidate
    natural: Agreement
    copy: Agreement

    @property
    def kl(self) -> float:
        """Mean of both passages, in nats."""
        return (self.natural.kl.mean + self.copy.kl.mean) / 2

    @property
    def kl_high(self) -> float:
        """Mean of the upper ends of both intervals."""
        return (self.natural.kl.high + self.copy.kl.high) / 2

    @property
    def fetched_bytes_per_step(self) -> float:
        """Mean of both passages."""
        return (self.natural.fetched_bytes_per_step + self.copy.fetched_bytes_per_step) / 2


@dataclass(frozen=True)
class Recommendation:
    """What was tried and what is left of it: ``chosen`` is one of ``second``."""

    first: list[Measured]
    second: list[Measured]
    chosen: Measured


def tokens_needed(settings: DiagnoseSettings) -> int:
    """How long the text has to be for both rounds."""
    return settings.prompt_tokens + 2 * settings.steps + 1


def measure(
    decoder: Decoder, token_ids: Sequence[int], settings: DiagnoseSettings, tried: Sequence[Candidate], report: Report
) -> Recommendation:
    """Both rounds. Of the settings with one memory, those with the fewest fetches are recommended whose KL is not above
    the interval of the one that fetches most.

    Raises:
        RequestError: the text is shorter than :func:`tokens_needed`, or the steps too many for the prompt.
        CapacityError: the recorded prompt and a cache do not fit beside each other.
    """
    first = _round(decoder, token_ids, settings, tried, "choosing", report)
    best = min(first, key=lambda one: one.kl).candidate
    variants = [replace(best, config=config) for config in _variants(best.config)]
    second = _round(decoder, token_ids[settings.steps :], settings, variants, "measuring", report)
    allowed = second[0].kl_high
    chosen = min((one for one in second if one.kl <= allowed), key=lambda one: one.fetched_bytes_per_step)
    return Recommendation(first, second, chosen)


def _variants(config: ShadowKVConfig) -> list[ShadowKVConfig]:
    """The same memory, with all of the resident set chosen in each step, a half, a quarter."""
    parts = [fewer_fetches(config, m) for m in RESIDENT_MULTIPLES if 1 < m <= config.resident_chunks]
    return list(dict.fromkeys([config, *parts]))


def _round(
    decoder: Decoder,
    token_ids: Sequence[int],
    settings: DiagnoseSettings,
    tried: Sequence[Candidate],
    name: str,
    report: Report,
) -> list[Measured]:
    methods = [(f"{number} of {len(tried)}", one.config) for number, one in enumerate(tried, start=1)]
    passages = [make(token_ids, settings.prompt_tokens, settings.steps) for make in (natural_passage, copy_passage)]
    found = [
        compare(decoder, passage, methods, lambda stage, *counts: report(f"{name}, {stage}", *counts))[1:]
        for passage in passages
    ]
    return [Measured(*one) for one in zip(tried, *found, strict=True)]
