"""What stands between a decode step's matrix products: residual and norm, gated activation, RoPE and cache write.

Notes on the design:
- Nothing here is bound by bandwidth. 48 rows of 4,096 elements are 0.4 MB, 0.1 us; what counts is the launch, some
  2 us of it in a captured step, so each is one kernel, without a trip through memory in between.
- Values are rounded to the model's dtype wherever the layer-by-layer code rounds them, so that both give the same
  numbers; inside, everything is float32. Products and sums of rounded values are formed in float32 and rounded
  once, which is what PyTorch does.
- RoPE takes a head's rotated dimensions as two halves, loaded apart, so that a pair meets in one thread without a
  shuffle. A head is one warp: 48 heads of 48 rows are 2,304 of them, 17 per SM, all in flight at once.

Predicted, at 4.3 TB/s, Llama-8B geometry, 48 rows, 16 bits: add_norm 4 x 0.39 MB and 6 operations per element,
0.4 us; gate 3 x 1.4 MB, 1 us; rope_append 2 x 0.6 MB, 0.3 us; each at least the 2 us of its launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.errors import ConfigError
from shadowkv.ops.rows import LayerRows
from shadowkv.ops.triton.rows import SLOTS, WRITE_SLOT, K, V, fact, tensor_of

NORM_ELEMENTS_PER_THREAD = 8
"""Of a row that is normed by one program; the number of warps follows, within these limits."""
NORM_WARPS = (4, 16)
GATE_BLOCK = 1024
GATE_WARPS = 4
ROPE_WARPS = 1

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""By their names in config.json."""


def add_norm(
    hidden_BM: Tensor,
    delta_BM: Tensor | None,
    weight_M: Tensor,
    eps: float,
    out_BM: Tensor,
    delta_norm_M: Tensor | None,
) -> None:
    """Add ``delta`` to ``hidden`` in place, and its root-mean-square norm times ``weight`` to ``out``.

    Shapes: all [B, M], the last axis contiguous. ``delta`` is normed first where it has a norm of its own.
    """
    batch, width = hidden_BM.shape
    assert out_BM.shape == hidden_BM.shape
    assert hidden_BM.stride(1) == out_BM.stride(1) == 1
    delta = hidden_BM if delta_BM is None else delta_BM
    assert delta.shape == hidden_BM.shape
    assert delta.stride(1) == 1
    block = triton.next_power_of_2(width)
    least, most = NORM_WARPS
    _add_norm[(batch,)](
        hidden_BM,
        delta,
        weight_M,
        weight_M if delta_norm_M is None else delta_norm_M,
        out_BM,
        hidden_BM.stride(0),
        delta.stride(0),
        out_BM.stride(0),
        eps,
        WIDTH=width,
        ADDS=delta_BM is not None,
        NORMS_DELTA=delta_norm_M is not None,
        BLOCK_M=block,
        num_warps=min(max(block // (32 * NORM_ELEMENTS_PER_THREAD), least), most),
    )


def gate(gate_up_BX: Tensor, out_BF: Tensor, activation: str) -> None:
    """activation(gate) * up of [gate | up] side by side. Shapes: gate_up [B, 2F], out [B, F].

    Raises:
        ConfigError: the activation is not one of :data:`ACTIVATIONS`.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    batch, width = out_BF.shape
    assert gate_up_BX.shape == (batch, 2 * width)
    assert gate_up_BX.stride(1) == out_BF.stride(1) == 1
    _gate[(triton.cdiv(width, GATE_BLOCK), batch)](
        gate_up_BX,
        out_BF,
        gate_up_BX.stride(0),
        out_BF.stride(0),
        width,
        ACTIVATION=activation,
        BLOCK_F=GATE_BLOCK,
        num_warps=GATE_WARPS,
    )


def rope_append(
    rows: LayerRows,
    qkv_BX: Tensor,
    cos_BF: Tensor,
    sin_BF: Tensor,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    q_out_BND: Tensor,
) -> None:
    """Rotated queries to ``q_out``; the new token's rotated keys, and values, to every row's WRITE_SLOT.

    A row whose WRITE_SLOT is -1 gets queries only. Queries and keys are normed per head first, if there are norms.

    Shapes: qkv [B, (N + 2K) * D], q_out [B, N, D], their last axes contiguous; cos, sin [B, rotary/2] in float32.
    """
    batch, heads, _ = q_out_BND.shape
    assert qkv_BX.shape == (batch, (heads + 2 * kv_heads) * head_dim)
    assert q_out_BND.shape[2] == head_dim
    assert qkv_BX.stride(1) == q_out_BND.stride(2) == cos_BF.stride(1) == sin_BF.stride(1) == 1
    assert cos_BF.shape == sin_BF.shape == (batch, rotary_dim // 2)
    assert cos_BF.stride(0) == sin_BF.stride(0)
    assert (q_norm_D is None) == (k_norm_D is None)
    _rope_append[(heads + 2 * kv_heads, batch)](
        rows.address_BX,
        rows.facts_BI,
        qkv_BX,
        cos_BF,
        sin_BF,
        qkv_BX if q_norm_D is None else q_norm_D,
        qkv_BX if k_norm_D is None else k_norm_D,
        q_out_BND,
        qkv_BX.stride(0),
        cos_BF.stride(0),
        q_out_BND.stride(0),
        q_out_BND.stride(1),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        HALF=rotary_dim // 2,
        INTERLEAVED=interleaved,
        NORMS=q_norm_D is not None,
        BLOCK_H=triton.next_power_of_2(rotary_dim // 2),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        num_warps=ROPE_WARPS,
    )


@triton.jit
def _rounded(b_x, element: tl.constexpr):
    """float32 that has been through another dtype."""
    return b_x.to(element).to(tl.float32)


@triton.jit
def _add_norm(
    p_hidden,
    p_delta,
    p_weight,
    p_delta_norm,
    p_out,
    hidden_stride,
    delta_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One row."""
    i_row = tl.program_id(0).to(tl.int64)
    element: tl.constexpr = p_hidden.dtype.element_ty
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < WIDTH
    p_mine = p_hidden + i_row * hidden_stride + o_m
    # Asked for before the sums that they wait for.
    b_weight = tl.load(p_weight + o_m, mask=m_m, other=0.0).to(tl.float32)
    b_x = tl.load(p_mine, mask=m_m, other=0.0).to(tl.float32)
    if ADDS:
        b_delta = tl.load(p_delta + i_row * delta_stride + o_m, mask=m_m, other=0.0).to(tl.float32)
        if NORMS_DELTA:
            b_own = tl.load(p_delta_norm + o_m, mask=m_m, other=0.0).to(tl.float32)
            b_delta *= tl.rsqrt(tl.sum(b_delta * b_delta, 0) / WIDTH + eps)
            b_delta = _rounded(_rounded(b_delta, element) * b_own, element)
        b_x = _rounded(b_x + b_delta, element)
        tl.store(p_mine, b_x.to(element), mask=m_m)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) / WIDTH + eps)
    b_x = _rounded(b_x, element) * b_weight
    tl.store(p_out + i_row * out_stride + o_m, b_x.to(p_out.dtype.element_ty), mask=m_m)


@triton.jit
def _gate(p_gate_up, p_out, gate_up_stride, out_stride, width, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr):
    """One block of one row."""
    i_row = tl.program_id(1).to(tl.int64)
    o_f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < width
    p_gate = p_gate_up + i_row * gate_up_stride + o_f
    b_x = tl.load(p_gate, mask=m_f, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + width, mask=m_f, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        b_x = tl.div_rn(b_x, 1.0 + tl.exp(-b_x))
    elif ACTIVATION == "gelu":
        b_x = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh z) is 1 / (1 + exp(-2 z)), which does not cancel where z is negative.
        b_z = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_x = tl.div_rn(b_x, 1.0 + tl.exp(-2.0 * b_z))
    b_x = _rounded(b_x, p_gate_up.dtype.element_ty) * b_up
    tl.store(p_out + i_row * out_stride + o_f, b_x.to(p_out.dtype.element_ty), mask=m_f)


@triton.jit
def _rope_append(
    p_address,
    p_facts,
    p_qkv,
    p_cos,
    p_sin,
    p_q_norm,
    p_k_norm,
    p_q_out,
    qkv_stride,
    angle_stride,
    q_row_stride,
    q_head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One head of one row: a query, a key or a value, in this order."""
    i_head = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    element: tl.constexpr = p_qkv.dtype.element_ty
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < HALF
    if INTERLEAVED:
        o_a = 2 * o_h
        o_b = 2 * o_h + 1
    else:
        o_a = o_h
        o_b = o_h + HALF
    o_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    m_rest = o_rest < DIM
    # The way to the slot is asked for first: it is the longest chain of loads.
    slot = fact(p_facts, i_row, WRITE_SLOT).to(tl.int64)
    slots = fact(p_facts, i_row, SLOTS).to(tl.int64)
    p_k = tensor_of(p_address, i_row, K, element)
    p_v = tensor_of(p_address, i_row, V, element)
    p_head = p_qkv + i_row * qkv_stride + i_head.to(tl.int64) * DIM
    b_a = tl.load(p_head + o_a, mask=m_h, other=0.0).to(tl.float32)
    b_b = tl.load(p_head + o_b, mask=m_h, other=0.0).to(tl.float32)
    b_rest = tl.load(p_head + o_rest, mask=m_rest, other=0.0).to(tl.float32)
    if i_head < HEADS + KV_HEADS:
        b_cos = tl.load(p_cos + i_row * angle_stride + o_h, mask=m_h, other=0.0)
        b_sin = tl.load(p_sin + i_row * angle_stride + o_h, mask=m_h, other=0.0)
        if NORMS:
            p_norm = p_q_norm
            if i_head >= HEADS:
                p_norm = p_k_norm
            b_norm_a = tl.load(p_norm + o_a, mask=m_h, other=0.0).to(tl.float32)
            b_norm_b = tl.load(p_norm + o_b, mask=m_h, other=0.0).to(tl.float32)
            b_norm_rest = tl.load(p_norm + o_rest, mask=m_rest, other=0.0).to(tl.float32)
            square = tl.sum(b_a * b_a, 0) + tl.sum(b_b * b_b, 0) + tl.sum(b_rest * b_rest, 0)
            scale = tl.rsqrt(square / DIM + eps)
            b_a = _rounded(_rounded(b_a * scale, element) * b_norm_a, element)
            b_b = _rounded(_rounded(b_b * scale, element) * b_norm_b, element)
            b_rest = _rounded(_rounded(b_rest * scale, element) * b_norm_rest, element)
        b_turned = b_a * b_cos - b_b * b_sin
        b_b = b_b * b_cos + b_a * b_sin
        b_a = b_turned
    b_a, b_b, b_rest = b_a.to(element), b_b.to(element), b_rest.to(element)
    p_to = p_q_out + i_row * q_row_stride + i_head.to(tl.int64) * q_head_stride
    if i_head >= HEADS:
        p_to = p_k + ((i_head - HEADS) * slots + slot) * DIM
        if i_head >= HEADS + KV_HEADS:
            p_to = p_v + ((i_head - HEADS - KV_HEADS) * slots + slot) * DIM
    if (i_head < HEADS) | (slot >= 0):
        tl.store(p_to + o_a, b_a, mask=m_h)
        tl.store(p_to + o_b, b_b, mask=m_h)
        if 2 * HALF < DIM:
            tl.store(p_to + o_rest, b_rest, mask=m_rest)
