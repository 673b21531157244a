"""One decoding step of a batch through the decoder, in kernels over fixed places: what a CUDA graph captures.

The same arithmetic as ``Decoder.forward`` with one token a sequence, fused where a launch saves a trip through
memory. Linears are the library's.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.cache.step import DecodeStep
from shadowkv.models.decoder import Decoder
from shadowkv.ops.rows import Fact


def decode_step(decoder: Decoder, step: DecodeStep, rows: int) -> Tensor:
    """The next logits of the first ``rows`` rows, which ``step`` has loaded.

    Shapes: the result [rows, V] in float32.
    """
    from shadowkv.ops.triton.pointwise import add_norm, gate, rope_append

    spec, eps = decoder.spec, decoder.spec.norm_eps
    facts_BI = step.facts_BI[:rows].long()
    cos_BF, sin_BF = decoder.rope.cos_sin(facts_BI[:, Fact.TOKENS] - 1, facts_BI[:, Fact.ROPE_ROW])
    hidden_BM = F.embedding(facts_BI[:, Fact.TOKEN], decoder.embed)
    normed_BM, q_BND = torch.empty_like(hidden_BM), hidden_BM.new_empty(rows, spec.heads, spec.head_dim)
    o_BND, gated_BF = torch.empty_like(q_BND), hidden_BM.new_empty(rows, spec.ffn)
    layers = decoder.layers
    add_norm(hidden_BM, None, layers[0].input_norm, eps, normed_BM, None)
    for i, weights in enumerate(layers):
        if step.foresees and i + 1 < len(layers):
            ahead_BND = decoder.queries_ahead(hidden_BM, i + 1)
            step.foresee(i + 1, decoder.rope.turn(ahead_BND, cos_BF[:, None], sin_BF[:, None]))
        qkv_BX = F.linear(normed_BM, weights.qkv, weights.qkv_bias)
        rope_append(
            step.layer(i, rows),
            qkv_BX,
            cos_BF,
            sin_BF,
            spec.kv_heads,
            spec.head_dim,
            spec.rope.rotary_dim,
            spec.rope.interleaved,
            weights.q_norm,
            weights.k_norm,
            eps,
            q_BND,
        )
        step.attend(i, q_BND, o_BND)
        attended_BM = F.linear(o_BND.flatten(1), weights.o, weights.o_bias)
        add_norm(hidden_BM, attended_BM, weights.mlp_norm, eps, normed_BM, weights.attention_out_norm)
        gate(F.linear(normed_BM, weights.gate_up, weights.gate_up_bias), gated_BF, spec.activation)
        widened_BM = F.linear(gated_BF, weights.down, weights.down_bias)
        next_norm = layers[i + 1].input_norm if i + 1 < len(layers) else decoder.norm
        add_norm(hidden_BM, widened_BM, next_norm, eps, normed_BM, weights.mlp_out_norm)
    step.finish()
    return F.linear(normed_BM, decoder.head).float()
