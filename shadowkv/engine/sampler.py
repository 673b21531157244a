"""From logits to tokens, one row per running sample. Knows no model, no tokenizer and no scheduler.

Order, as in vLLM: log-probabilities are taken from the logits as they come; then end tokens are masked
(``min_tokens``), repetition, frequency and presence penalties applied, the logits divided by the
temperature, and candidates cut by min-p, top-k and top-p, each over what the one before left.

Greedy rows share one argmax. A random row is drawn alone, by one uniform number of its own generator and
an integer inverse CDF, so that neither neighbours, nor row order, nor batch size, nor the order in which a
device adds numbers up can change its token. Everything stays on the device until one copy at the end.
"""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.config import SamplingParams
from shadowkv.errors import NumericsError, ShapeError

WEIGHT_BITS = 43
"""Probabilities are integers with the most likely token at 2^43: sums over 2^19 tokens stay below 2^63, and
what is lost (tokens 10^13 times less likely than the first) has less than 10^-7 together."""

FEW = 2048
"""Top-p nearly always keeps fewer tokens."""

_TOKEN, _USABLE, _LOGPROB, _TOP = 0, 1, 2, 3
"""Columns of the one tensor that goes to the host: token, whether the row was usable, its log-probability,
then pairs of token and log-probability of the most likely ones. Float64 holds token ids exactly."""


@dataclass(frozen=True)
class Sampled:
    """A row's token. ``top`` has (token, log-probability), best first, at equal ones the lowest id first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SampleState:
    """What one running sample's draws depend on. Made by :meth:`Sampler.open`, advanced by ``sample``."""

    def __init__(self, params: SamplingParams, index: int, masked_M: Tensor | None) -> None:
        self.params = params
        self.generated_tokens = 0
        self.masked_M = masked_M
        self.counts_V: Tensor | None = None
        self.seen_V: Tensor | None = None
        # Random takes the absolute value of a seed, and -1 and 1 must not be the same.
        seed = None if params.seed is None else (params.seed + index) % (1 << 64)
        self._random = random.Random(seed)

    @property
    def masks_ends(self) -> bool:
        return self.masked_M is not None and self.generated_tokens < self.params.min_tokens

    @property
    def penalised(self) -> bool:
        return self.counts_V is not None or self.seen_V is not None

    def uniform(self) -> float:
        """The next number in [0, 1) of this sample alone. Python fixes the sequence of a seed for good."""
        return self._random.random()

    def count(self, token: Tensor) -> None:
        """Take note of the chosen token (a tensor without axes), without waiting for its value."""
        self.generated_tokens += 1
        if self.counts_V is not None:
            self.counts_V.index_add_(0, token.view(1), torch.ones_like(self.counts_V[:1]))
        if self.seen_V is not None:
            self.seen_V.index_fill_(0, token.view(1), True)


class Sampler:
    """Chooses the next token of every row.

    Args:
        vocab: width of the logits.
    """

    def __init__(self, vocab: int, device: torch.device | str) -> None:
        self.vocab = vocab
        self.device = torch.device(device)

    def open(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        end_token_ids: Collection[int] = (),
        index: int = 0,
    ) -> SampleState:
        """State of the ``index``-th sample of a request.

        Args:
            end_token_ids: what ends an answer besides ``params.stop_token_ids``; not chosen before
                ``params.min_tokens`` tokens.
        """
        ends = sorted(t for t in {*end_token_ids, *params.stop_token_ids} if 0 <= t < self.vocab)
        masked_M = torch.tensor(ends, device=self.device) if params.min_tokens and ends else None
        state = SampleState(params, index, masked_M)
        if params.presence_penalty or params.frequency_penalty:
            state.counts_V = torch.zeros(self.vocab, dtype=torch.float32, device=self.device)
        if params.repetition_penalty != 1.0:
            state.seen_V = torch.zeros(self.vocab, dtype=torch.bool, device=self.device)
            if prompt_token_ids:
                state.seen_V[torch.tensor(sorted(set(prompt_token_ids)), device=self.device)] = True
        return state

    def sample(self, logits_BV: Tensor, states: Sequence[SampleState]) -> list[Sampled | NumericsError]:
        """The next token of every row, or the error of a row whose logits leave none to choose.

        Log-probabilities are those of the model: before masks, penalties and temperature.

        Raises:
            ShapeError: not one row of the vocabulary's width per state.
        """
        if logits_BV.shape != (len(states), self.vocab):
            raise ShapeError(f"logits have shape {tuple(logits_BV.shape)}; expected {(len(states), self.vocab)}")
        if not states:
            return []
        logits_BV = logits_BV.float()
        tokens_B = logits_BV.argmax(dim=1)  # ties: the lowest id
        # The maximum is NaN if one logit is, and -inf if all are.
        usable_B = logits_BV.amax(dim=1).isfinite()
        for i, state in enumerate(states):
            if not (state.params.temperature or state.penalised or state.masks_ends):
                continue
            row_V = adjusted(logits_BV[i], state)
            usable_B[i] &= row_V.amax().isfinite()
            tokens_B[i] = draw(row_V, state.params, state.uniform()) if state.params.temperature else row_V.argmax()
        for i, state in enumerate(states):
            state.count(tokens_B[i])
        return self._to_host(logits_BV, tokens_B, usable_B, states)

    def _to_host(
        self, logits_BV: Tensor, tokens_B: Tensor, usable_B: Tensor, states: Sequence[SampleState]
    ) -> list[Sampled | NumericsError]:
        wanted = [None if s.params.logprobs is None else min(s.params.logprobs, self.vocab) for s in states]
        width = _TOP + 2 * max((top or 0 for top in wanted), default=0)
        answers = torch.zeros(len(states), width, dtype=torch.float64, device=logits_BV.device)
        answers[:, _TOKEN] = tokens_B
        answers[:, _USABLE] = usable_B
        for i, top in enumerate(wanted):
            if top is None:
                continue
            logprobs_V = logits_BV[i].log_softmax(dim=0)
            answers[i, _LOGPROB] = logprobs_V.gather(0, tokens_B[i].view(1))[0]
            best = logprobs_V.topk(top)
            answers[i, _TOP : _TOP + 2 * top : 2] = best.indices
            answers[i, _TOP + 1 : _TOP + 2 * top : 2] = best.values
        return [_outcome(row, top) for row, top in zip(answers.tolist(), wanted, strict=True)]


def _outcome(row: list[float], top: int | None) -> Sampled | NumericsError:
    if not row[_USABLE]:
        return NumericsError(
            "the logits are NaN or infinite, or no token is left once end tokens are masked; "
            "check the checkpoint, the dtype and min_tokens"
        )
    if top is None:
        return Sampled(int(row[_TOKEN]))
    pairs = zip(row[_TOP : _TOP + 2 * top : 2], row[_TOP + 1 : _TOP + 2 * top : 2], strict=True)
    best = sorted(((int(token), logprob) for token, logprob in pairs), key=lambda pair: (-pair[1], pair[0]))
    return Sampled(int(row[_TOKEN]), row[_LOGPROB], tuple(best))


def adjusted(logits_V: Tensor, state: SampleState) -> Tensor:
    """Logits after the mask of end tokens and the penalties; a new tensor where anything changes.

    Repetition looks at prompt and answer: positive logits are divided, others multiplied (CTRL, arXiv
    1909.05858). Frequency (times the count) and presence look at the answer and are subtracted (OpenAI).
    """
    params = state.params
    if state.seen_V is not None:
        rate = params.repetition_penalty
        punished_V = torch.where(logits_V > 0, logits_V / rate, logits_V * rate)
        logits_V = torch.where(state.seen_V, punished_V, logits_V)
    if state.counts_V is not None:
        logits_V = logits_V - params.frequency_penalty * state.counts_V
        logits_V = logits_V - params.presence_penalty * (state.counts_V > 0)
    if state.masks_ends and state.masked_M is not None:
        logits_V = logits_V.index_fill(0, state.masked_M, -math.inf)
    return logits_V


def draw(logits_V: Tensor, params: SamplingParams, uniform: float) -> Tensor:
    """A token id (a tensor without axes) by one uniform number in [0, 1).

    The most likely token passes every cut, so a row with a finite maximum always has a candidate.
    """
    # Float64, and shifted before it is scaled, so that no temperature overflows.
    scaled_V = (logits_V.double() - logits_V.amax()) / params.temperature
    if params.min_p:
        scaled_V = scaled_V.masked_fill(scaled_V < math.log(params.min_p), -math.inf)
    weights_V = weigh(scaled_V)
    if params.top_p < 1 or 0 < params.top_k < len(weights_V):
        weights_V = cut(scaled_V, weights_V, params)
    upto_V = weights_V.cumsum(0)
    # The first token whose cumulative weight exceeds the target; a float product may round up to the total.
    target = torch.minimum((upto_V[-1].double() * uniform).to(torch.int64), upto_V[-1] - 1)
    return torch.searchsorted(upto_V, target.view(1), right=True)[0].clamp(max=len(upto_V) - 1)


def weigh(scaled_V: Tensor) -> Tensor:
    """Integer weights, see :data:`WEIGHT_BITS`."""
    return (scaled_V.exp() * 2.0**WEIGHT_BITS).to(torch.int64)


def cut(scaled_V: Tensor, weights_V: Tensor, params: SamplingParams) -> Tensor:
    """The weights with those of tokens outside top-k and top-p set to 0.

    Top-p keeps the fewest most likely tokens whose share reaches it, so both cuts keep a number of them; it
    is found on sorted values, and of equally likely tokens at the edge the lowest ids stay.
    """
    top_k = min(params.top_k or len(scaled_V), len(scaled_V))
    if params.top_k:
        best_V = scaled_V.topk(top_k).values
        target = weigh(best_V).sum().double() * params.top_p
    else:
        target = weights_V.sum().double() * params.top_p
        few_V = scaled_V.topk(min(FEW, len(scaled_V))).values
        # On the CPU, looking at a value costs nothing and sorting a vocabulary does: 20 ms for 128K tokens.
        enough = scaled_V.device.type == "cpu" and bool(weigh(few_V).sum() >= target)
        best_V = few_V if enough else scaled_V.sort(descending=True).values
    best_weights_V = weigh(best_V)
    kept = torch.ones_like(best_weights_V).sum()
    if params.top_p < 1:
        kept = (best_weights_V.cumsum(0) - best_weights_V < target).sum()
    edge = best_V.gather(0, (kept - 1).view(1))
    above_V, at_V = scaled_V > edge, scaled_V == edge
    return weights_V * (above_V | (at_V & (at_V.cumsum(0) <= kept - above_V.sum())))
