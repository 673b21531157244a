"""Builds the rows of RoPE frequencies that a model's config asks for, by transformers' own functions."""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shadowkv.errors import CheckpointError
from shadowkv.models.spec import ModelSpec
from shadowkv.ops.rope import Frequencies, Rope


def build_rope(spec: ModelSpec, device: torch.device | str = "cpu") -> Rope:
    """The model's RoPE.

    dynamic: a forward pass that ends beyond the trained length uses frequencies made for its length,
    while keys cached before keep theirs. longrope: the long factors apply to sequences longer than the
    original length, and crossing it makes cached keys stale.

    Raises:
        CheckpointError: (when a row is asked for) the parameters are incomplete, or do not give one finite
            number per frequency.

    Source: transformers.modeling_rope_utils, dynamic_rope_update and ROPE_INIT_FUNCTIONS.
    """
    rope = spec.rope
    switch = _switch_tokens(spec)

    def row_key(length_tokens: int) -> int:
        if rope.kind not in ("dynamic", "longrope") or length_tokens <= switch:
            return 0
        return length_tokens if rope.kind == "dynamic" else 1

    def frequencies_of(length_tokens: int) -> Frequencies:
        return _frequencies(spec, length_tokens if row_key(length_tokens) else None, device)

    return Rope(
        frequencies_of,
        row_key,
        rotary_dim=rope.rotary_dim,
        interleaved=rope.interleaved,
        recompute_on_switch=rope.kind == "longrope",
        device=device,
    )


def _switch_tokens(spec: ModelSpec) -> int:
    if spec.rope.kind == "longrope":
        original = spec.rope.parameters["original_max_position_embeddings"]
        assert isinstance(original, int)
        return original
    return spec.rope.trained_tokens


def _frequencies(spec: ModelSpec, length_tokens: int | None, device: torch.device | str) -> Frequencies:
    rope = spec.rope
    if rope.kind == "default":
        return _default(rope.parameters["rope_theta"], rope.rotary_dim, rope.divisors)
    # Only the sizes count; the parameters were standardised by the model's own config class.
    carrier = LlamaConfig(
        hidden_size=spec.q_rows,
        num_attention_heads=spec.heads,
        head_dim=spec.head_dim,
        max_position_embeddings=rope.trained_tokens,
        rope_parameters=dict(rope.parameters),
    )
    # transformers makes the first row on the host from a plain number and later ones on the device from
    # a tensor; for equal frequencies to the last bit, so does this.
    make = ROPE_INIT_FUNCTIONS[rope.kind]
    try:
        if length_tokens is None:
            inv_freq, factor = make(carrier, "cpu")
        elif rope.kind == "dynamic":
            inv_freq, factor = make(carrier, device, seq_len=torch.tensor(length_tokens, device=device))
        else:
            inv_freq, factor = make(carrier, device, seq_len=length_tokens)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"no {rope.kind} RoPE can be made of {dict(rope.parameters)}: {error!r}") from error
    if 2 * inv_freq.shape[0] != rope.rotary_dim or not torch.isfinite(inv_freq).all():
        raise CheckpointError(f"{dict(rope.parameters)} gives no {rope.rotary_dim // 2} finite RoPE frequencies")
    return inv_freq, float(factor)


def _default(theta: object, rotary_dim: int, divisors: tuple[float, ...] | None) -> Frequencies:
    """Raises CheckpointError when the divisors are not one per frequency."""
    assert isinstance(theta, (int, float))
    inv_freq_R: Tensor = 1.0 / (float(theta) ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim))
    if divisors is not None:
        if len(divisors) != len(inv_freq_R):
            raise CheckpointError(
                f"rope_freqs.weight holds {len(divisors)} numbers for {len(inv_freq_R)} frequencies; "
                "0 means that the file ends before them"
            )
        inv_freq_R = inv_freq_R / torch.tensor(divisors)
    return inv_freq_R, 1.0
