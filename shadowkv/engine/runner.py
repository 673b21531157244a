"""Runs the decoder over the cache: a prompt, an append of any length, one step of a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shadowkv.cache.base import Cache, CachedSequence
from shadowkv.cache.pool import Reservation
from shadowkv.cache.recorded import RecordedPrompt
from shadowkv.engine.graphs import StepRunner
from shadowkv.models.decoder import Decoder, LayerProgress

Progress = Callable[[int, int], None]
"""Called with tokens done and tokens in all."""


class Runner:
    """Token ids in, logits of the last position out, in float32.

    Args:
        steps: how a batch decodes; without it, sequence by sequence in plain PyTorch.
    """

    def __init__(self, decoder: Decoder, cache: Cache[Any, Any], steps: StepRunner | None = None) -> None:
        self.decoder = decoder
        self.cache = cache
        self.steps = steps
        self.computed_tokens = 0
        """Tokens of prompts, appends and steps that have been computed so far."""
        self.recorded: Mapping[tuple[int, ...], RecordedPrompt] = {}
        """Prompts, by their tokens, that are taken from a record instead of being computed anew."""

    @torch.inference_mode()
    def record(
        self, token_ids: Sequence[int], prompt_queries: int, progress: LayerProgress | None = None
    ) -> RecordedPrompt:
        """Compute a prompt for any number of caches, on the device; see :attr:`recorded`."""
        prompt = RecordedPrompt(self.cache.geometry, self.decoder.device, prompt_queries)
        hidden_1M = self.decoder.prefill(self._input(token_ids), prompt, None, progress=progress)
        prompt.logits_V = self.decoder.logits(hidden_1M)[-1]
        return prompt

    @torch.inference_mode()
    def prefill(
        self, capacity: int | Reservation, token_ids: Sequence[int], progress: Progress | None = None
    ) -> tuple[CachedSequence, Tensor]:
        """A new sequence that holds these tokens, and the logits [V] after the last.

        On an error the sequence is released before it is raised.
        """
        seq = self.cache.open(capacity)
        try:
            known = self.recorded.get(tuple(token_ids))
            if known is not None:
                assert known.logits_V is not None, "the record was not finished"
                self.cache.take_prompt(seq, known)
                return seq, known.logits_V
            layers = self.decoder.spec.layers
            on_layer = None
            if progress is not None:
                report, tokens = progress, len(token_ids)

                def on_layer(done: int, total: int = layers) -> None:
                    report(tokens * done // total, tokens)

            hidden_1M = self.decoder.prefill(self._input(token_ids), self.cache, seq, progress=on_layer)
            return seq, self.decoder.logits(hidden_1M)[-1]
        except BaseException:
            self.cache.release(seq)
            raise

    @torch.inference_mode()
    def append(self, seq: CachedSequence, token_ids: Sequence[int], progress: Progress | None = None) -> Tensor:
        """Add tokens to one sequence, in blocks as long as its cache takes; the logits [V] after the last."""
        total, block = seq.tokens + len(token_ids), self.cache.append_tokens
        hidden_1TM = None
        for start in range(0, len(token_ids), block):
            part = self._input(token_ids[start : start + block])
            hidden_1TM = self.decoder.forward(part[None], self.cache, [seq], rope_lengths=[total])
            if progress is not None:
                progress(min(start + block, len(token_ids)), len(token_ids))
        assert hidden_1TM is not None, "nothing to append"
        return self.decoder.logits(hidden_1TM[0, -1:])[0]

    @torch.inference_mode()
    def decode(self, seqs: Sequence[CachedSequence], token_ids: Sequence[int]) -> Tensor:
        """One token for each sequence: logits [B, V], valid until the next call."""
        if self.steps is not None:
            self.computed_tokens += len(token_ids)
            self.cache.extend(seqs, 1)
            return self.steps.decode(seqs, token_ids)
        hidden_B1M = self.decoder.forward(self._input(token_ids)[:, None], self.cache, seqs)
        return self.decoder.logits(hidden_B1M[:, 0])

    def must_recompute(self, tokens_before: int, tokens_after: int) -> bool:
        """Whether growing a sequence makes its cached keys stale (longrope: see ``ops.rope``)."""
        return self.decoder.rope.must_recompute(tokens_before, tokens_after)

    def _input(self, token_ids: Sequence[int]) -> Tensor:
        """Tokens on the device, counted."""
        self.computed_tokens += len(token_ids)
        return torch.tensor(list(token_ids), dtype=torch.long, device=self.decoder.device)
