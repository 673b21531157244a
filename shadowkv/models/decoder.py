"""Token ids to hidden states to logits, for inference. Knows neither how attention is approximated nor requests.

The prompt goes layer by layer, and of each layer in slices of tokens wherever tokens do not meet, so that
the peak above the weights is the hidden states, one layer's queries, keys and values, and one slice.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.cache.base import Cache, CachedSequence, PromptSink
from shadowkv.errors import ConfigError, RequestError
from shadowkv.models.layers import ACTIVATIONS, LayerWeights, mlp, rms_norm
from shadowkv.models.spec import ModelSpec
from shadowkv.ops.attention import decode_attention, prefill_attention
from shadowkv.ops.rope import Rope
from shadowkv.ops.views import DenseView

LayerProgress = Callable[[int, int], None]
"""Called with the layers that are done and the layers there are."""


class Decoder:
    """A loaded model.

    Args:
        weights: the tensors of ``spec.weight_shapes()``, all on one device and in one dtype.
        slice_tokens: tokens that a prompt's projections and MLP take at a time.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], rope: Rope, *, slice_tokens: int = 4096) -> None:
        if slice_tokens < 1:
            raise ConfigError(f"slice_tokens is {slice_tokens}; it must be at least 1")
        self.spec = spec
        self.rope = rope
        self.slice_tokens = slice_tokens
        self.embed = weights["embed"]
        self.norm = weights["norm"]
        self.head = self.embed if spec.tied_embeddings else weights["head"]
        self.layers = [_layer_weights(weights, f"layers.{i}.") for i in range(spec.layers)]
        self._activation = ACTIVATIONS[spec.activation]

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def prefill(
        self,
        tokens_S: Tensor,
        cache: PromptSink,
        seq: Any,
        *,
        want_positions: Literal["all", "last"] = "last",
        progress: LayerProgress | None = None,
    ) -> Tensor:
        """One whole prompt, exactly; the cache takes each layer as soon as its attention is done.

        Shapes: tokens [S] (integers); the result [S, M], or [1, M] for the last position only.

        Raises:
            RequestError: the prompt is empty, or holds a token that the vocabulary does not.
            CapacityError: it is longer than the sequence's reservation.
        """
        total = tokens_S.shape[0]
        self._check_tokens(tokens_S)
        cache.begin_prompt(seq, total)
        observed = cache.prompt_queries
        hidden_SM = F.embedding(tokens_S.to(self.device), self.embed)
        positions_S = torch.arange(total, device=self.device)
        row = torch.full((1,), self.rope.row(total), device=self.device)
        for i, weights in enumerate(self.layers):
            last_only = i == len(self.layers) - 1 and want_positions == "last" and total > 1
            # Of the last layer one position's output is wanted, and as many queries as the cache asks for.
            q_first = max(total - max(observed, 1), 0) if last_only else 0
            q_NTD, k_pre_SKD, k_KSD, v_KSD = self._prompt_qkv(hidden_SM, weights, positions_S, row, q_first)
            if last_only:
                o_NTD = decode_attention(q_NTD[:, -1:], DenseView(k_KSD, v_KSD))
                hidden_SM = hidden_SM[-1:]
            else:
                o_NTD = prefill_attention(q_NTD, k_KSD, v_KSD)
            q_NWD = q_NTD[:, -observed:].clone() if observed else None
            del q_NTD
            cache.take_layer(i, seq, k_pre_SKD, k_KSD, v_KSD, q_NWD)
            del k_pre_SKD, k_KSD, v_KSD
            for part in self._slices(hidden_SM.shape[0]):
                hidden_SM[part] = self._after_attention(hidden_SM[part], o_NTD[:, part].transpose(0, 1), weights)
            del o_NTD
            if progress is not None:
                progress(i + 1, len(self.layers))
        return hidden_SM[-1:] if want_positions == "last" else hidden_SM

    def forward(
        self,
        tokens_BT: Tensor,
        cache: Cache[Any, Any],
        seqs: Seq[CachedSequence],
        rope_lengths: Seq[int] | None = None,
    ) -> Tensor:
        """T new tokens of each of B sequences, which may be of unequal lengths.

        Shapes: tokens [B, T] (integers); the result [B, T, M].

        Args:
            rope_lengths: the length that decides each sequence's RoPE row, when these tokens are a
                piece of a longer append; by default the new length.

        Raises:
            RequestError: a token is not in the vocabulary.
            CapacityError: a reservation is too short; nothing has been changed then.
        """
        self._check_tokens(tokens_BT)
        tokens = tokens_BT.shape[1]
        cache.extend(seqs, tokens, rope_lengths)
        lengths = [seq.tokens for seq in seqs]
        rows = [self.rope.row(length) for length in (rope_lengths or lengths)]
        starts_B11 = torch.tensor(lengths, device=self.device)[:, None, None] - tokens
        positions_B1T = starts_B11 + torch.arange(tokens, device=self.device)
        rows_B11 = torch.tensor(rows, device=self.device)[:, None, None]
        cos, sin = self.rope.cos_sin(positions_B1T, rows_B11)
        hidden_BTM = F.embedding(tokens_BT.to(self.device), self.embed)
        for i, weights in enumerate(self.layers):
            if cache.foresees and i + 1 < len(self.layers):
                ahead_BTND = self.queries_ahead(hidden_BTM, i + 1)
                cache.foresee(i + 1, self.rope.turn(ahead_BTND.transpose(1, 2), cos, sin))
            q_BTND, k_BTKD, v_BTKD = self._project(hidden_BTM, weights)
            # Queries and keys turn together: half the launches of two rotations.
            qk_BXTD = torch.cat([q_BTND, k_BTKD], dim=2).transpose(1, 2)
            qk_BXTD = self.rope.turn(qk_BXTD, cos, sin)
            q_BNTD, k_BKTD = torch.split(qk_BXTD, [self.spec.heads, self.spec.kv_heads], dim=1)
            cache.append(i, seqs, k_BKTD, v_BTKD.transpose(1, 2))
            views = cache.view(i, seqs, q_BNTD)
            o_BNTD = torch.stack([decode_attention(q, view) for q, view in zip(q_BNTD, views, strict=True)])
            hidden_BTM = self._after_attention(hidden_BTM, o_BNTD.transpose(1, 2), weights)
        return hidden_BTM

    def queries_ahead(self, hidden: Tensor, layer: int) -> Tensor:
        """A layer's queries before RoPE, [..., N, D], if this [..., M] entered it."""
        spec, weights = self.spec, self.layers[layer]
        bias = weights.qkv_bias[: spec.q_rows] if weights.qkv_bias is not None else None
        q = F.linear(rms_norm(hidden, weights.input_norm, spec.norm_eps), weights.qkv[: spec.q_rows], bias)
        q = q.view(*q.shape[:-1], spec.heads, spec.head_dim)
        return rms_norm(q, weights.q_norm, spec.norm_eps) if weights.q_norm is not None else q

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head. Shapes: [..., M] to [..., V] in float32."""
        return F.linear(rms_norm(hidden, self.norm, self.spec.norm_eps), self.head).float()

    def _prompt_qkv(
        self, hidden_SM: Tensor, weights: LayerWeights, positions_S: Tensor, row: Tensor, q_first: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries from position ``q_first`` on, and every position's keys (before and after RoPE) and values."""
        spec, total = self.spec, hidden_SM.shape[0]
        q_NTD = hidden_SM.new_empty(spec.heads, total - q_first, spec.head_dim)
        k_pre_SKD = hidden_SM.new_empty(total, spec.kv_heads, spec.head_dim)
        k_KSD, v_KSD = (hidden_SM.new_empty(spec.kv_heads, total, spec.head_dim) for _ in range(2))
        for part in self._slices(total):
            q_TND, k_TKD, v_TKD = self._project(hidden_SM[part], weights)
            k_pre_SKD[part] = k_TKD
            k_KSD[:, part] = self.rope.rotate(k_TKD.transpose(0, 1), positions_S[part], row)
            v_KSD[:, part] = v_TKD.transpose(0, 1)
            skipped = max(q_first - part.start, 0)
            if part.stop > q_first:
                wanted = slice(part.start + skipped - q_first, part.stop - q_first)
                turned = self.rope.rotate(q_TND[skipped:].transpose(0, 1), positions_S[part][skipped:], row)
                q_NTD[:, wanted] = turned
        return q_NTD, k_pre_SKD, k_KSD, v_KSD

    def _project(self, hidden: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before RoPE. Shapes: [..., M] to [..., N, D], [..., K, D] and [..., K, D]."""
        spec = self.spec
        normed = rms_norm(hidden, weights.input_norm, spec.norm_eps)
        fused = F.linear(normed, weights.qkv, weights.qkv_bias)
        fused = fused.view(*fused.shape[:-1], -1, spec.head_dim)
        q, k, v = torch.split(fused, [spec.heads, spec.kv_heads, spec.kv_heads], dim=-2)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, spec.norm_eps), rms_norm(k, weights.k_norm, spec.norm_eps)
        return q, k, v

    def _after_attention(self, hidden: Tensor, o_heads: Tensor, weights: LayerWeights) -> Tensor:
        """Output projection, residual and MLP. Shapes: hidden [..., M]; o_heads [..., N, D]."""
        eps = self.spec.norm_eps
        attended = F.linear(o_heads.flatten(-2), weights.o, weights.o_bias)
        if weights.attention_out_norm is not None:
            attended = rms_norm(attended, weights.attention_out_norm, eps)
        hidden = hidden + attended
        widened = mlp(rms_norm(hidden, weights.mlp_norm, eps), weights, self._activation)
        if weights.mlp_out_norm is not None:
            widened = rms_norm(widened, weights.mlp_out_norm, eps)
        return hidden + widened

    def _slices(self, total: int) -> Iterator[slice]:
        for first in range(0, total, self.slice_tokens):
            yield slice(first, min(first + self.slice_tokens, total))

    def _check_tokens(self, tokens: Tensor) -> None:
        """Host tensors only: a token id that was sampled on the device is in range, and asking would wait for it."""
        if tokens.numel() == 0:
            raise RequestError("there are no tokens; give at least one")
        if tokens.device.type == "cpu" and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.spec.vocab):
            raise RequestError(
                f"token ids from {int(tokens.min())} to {int(tokens.max())} were given; "
                f"the vocabulary is 0 to {self.spec.vocab - 1}"
            )


def _layer_weights(weights: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return LayerWeights(**own)
