"""The method as its description has it, in numpy's float64 and loops, with every exact key at hand.

Written from the description and not from the code: nothing is packed, moved or forgotten. It keeps all
keys before and after RoPE and all values, and for every step says which tokens a query sees and how close
the decisions were, because a decision within float32's rounding may go either way.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from shadowkv.cache.base import Geometry
from shadowkv.config import ShadowKVConfig
from shadowkv.ops.contract.bounds import ACCUMULATOR, Bounded
from shadowkv.ops.rope import Rope
from tests import rounding
from tests.rounding import ROTATION

Array = NDArray[np.float64]
EPS = ACCUMULATOR
TURNED_BACK = 2 * ROTATION + EPS
"""What keys may lose, as a share of their length, that were turned, stored and turned back."""
GAP = 1e-2
"""With the first singular value left out this close to the last kept, the subspace is a matter of rounding."""
ZERO = 1e-5
"""A singular value (of the largest) that keys rounded to float32 cannot be said to have."""


@dataclass(frozen=True)
class RopeRule:
    """RoPE whose frequencies change every ``row_tokens`` tokens of the sequence's length."""

    rotary_share: float
    interleaved: bool = False
    factor: float = 1.0
    row_tokens: int = 1 << 30

    def key(self, length: int) -> int:
        return length // self.row_tokens

    def inv_freq(self, key: int, dim: int) -> NDArray[np.float32]:
        rotary_dim = int(self.rotary_share * dim)
        exponent = np.arange(0, rotary_dim, 2) / rotary_dim
        return ((50.0 + 300 * key) ** -exponent).astype(np.float32)

    def factor_of(self, key: int) -> float:
        return self.factor + key / 10

    def rope(self, dim: int, device: torch.device) -> Rope:
        def frequencies(length: int) -> tuple[torch.Tensor, float]:
            key = self.key(length)
            return torch.from_numpy(self.inv_freq(key, dim)), self.factor_of(key)

        return Rope(
            frequencies,
            self.key,
            rotary_dim=int(self.rotary_share * dim),
            interleaved=self.interleaved,
            device=device,
        )

    def rotate(self, x_XD: Array, position: int, key: int) -> Array:
        """Angles are float32 products, as models make them; all else is exact."""
        angles = (np.float32(position) * self.inv_freq(key, x_XD.shape[-1])).astype(np.float64)
        half, out = len(angles), x_XD.copy()
        for f, angle in enumerate(angles):
            i, j = (2 * f, 2 * f + 1) if self.interleaved else (f, half + f)
            a, b = x_XD[..., i], x_XD[..., j]
            cos, sin = np.cos(angle) * self.factor_of(key), np.sin(angle) * self.factor_of(key)
            out[..., i], out[..., j] = a * cos - b * sin, b * cos + a * sin
        return out


@dataclass
class Slot:
    chunk: int = -1
    used: int = -1
    arriving: int = -1
    """What comes after this step's attention, which still finds ``chunk`` here."""


@dataclass
class Layer:
    """Everything of one layer. ``sure``: no decision was close that all later outputs hang on."""

    pre: list[Array] = field(default_factory=list)  # by token [K, D]
    post: list[Array] = field(default_factory=list)
    v: list[Array] = field(default_factory=list)
    basis_XR: Array | None = None
    mean_X: Array | None = None
    lost: float = 0.0
    """How far keys before RoPE may be from those given, of all tokens together."""
    length: float = 1.0
    """Of the centred keys of all tokens together."""
    tilt: float = 0.0
    """What that may turn the directions kept by, as a sine."""
    energy: float = 1.0
    outliers: list[list[int]] = field(default_factory=list)  # by head
    slots: list[list[Slot]] = field(default_factory=list)  # by head
    spans_prompt_only: bool = False
    sure: bool = True
    order_sure: bool = True
    close_call: bool = False  # in the present step only


@dataclass
class Answer:
    """Attention of one step and how far rounding may put it. ``touched``: the chunks selected and resident
    afterwards, by head."""

    out: Bounded
    sure: bool
    touched: list[set[int]]


class Oracle:
    def __init__(self, geometry: Geometry, config: ShadowKVConfig, rule: RopeRule) -> None:
        self.g, self.c, self.rule = geometry, config, rule
        rank = config.rank if isinstance(config.rank, tuple) else (config.rank,) * geometry.layers
        self.ranks = [min(r, geometry.key_dim) for r in rank]
        self.layers = [Layer() for _ in range(geometry.layers)]
        self.row_keys: list[int] = []
        self.tokens = self.context = self.context_at_first = self.steps = 0
        self.compressed, self.compressed_at = False, 0
        self.selected = self.hits = self.fetched = 0
        self.budget = -(-config.budget_tokens // config.chunk_tokens)
        self.resident = -(-(config.resident_tokens or config.budget_tokens) // config.chunk_tokens)
        self.window = config.recent_chunks * config.chunk_tokens
        everything = (config.outlier_chunks + self.resident + config.recent_chunks) * config.chunk_tokens
        self.dense_limit = everything if config.exact_while_fits else self.window

    # What it is given.

    def prompt(self, pre: list[Array], post: list[Array], v: list[Array]) -> None:
        """By layer, [S, K, D]."""
        self.tokens = len(pre[0])
        self.row_keys = [self.rule.key(self.tokens)] * self.tokens
        for layer, *arrays in zip(self.layers, pre, post, v, strict=True):
            layer.pre, layer.post, layer.v = (list(x) for x in arrays)
        if self.tokens > self.dense_limit:
            self.compress()

    def extend(self, new: int) -> None:
        """Before the tokens are written: what no longer fits joins the context."""
        size = self.c.chunk_tokens
        if not self.compressed and self.tokens + new > self.dense_limit:
            self.compress()
        if self.compressed and self.tokens + new - self.context * size > self.window:
            self.context = self.tokens // size - self.c.local_chunks
            for layer in self.layers:
                layer.sure &= not layer.spans_prompt_only
        for slot in (slot for layer in self.layers for slots in layer.slots for slot in slots if slot.arriving >= 0):
            slot.chunk, slot.arriving = slot.arriving, -1
        self.tokens += new
        self.row_keys += [self.rule.key(self.tokens)] * new
        self.steps += 1

    def append(self, layer: int, pre_TKD: Array, post_TKD: Array, v_TKD: Array) -> None:
        self.layers[layer].pre += list(pre_TKD)
        self.layers[layer].post += list(post_TKD)
        self.layers[layer].v += list(v_TKD)

    # The moment of compression.

    def compress(self) -> None:
        self.compressed, self.compressed_at = True, self.steps
        self.context = self.context_at_first = max(self.tokens // self.c.chunk_tokens - self.c.local_chunks, 0)
        for layer, rank in zip(self.layers, self.ranks, strict=True):
            x = np.stack(layer.pre).reshape(self.tokens, -1)
            layer.mean_X = x.mean(0) if self.c.centre_keys else np.zeros(x.shape[1])
            _, sigma, vh = np.linalg.svd(x - layer.mean_X, full_matrices=True)
            layer.basis_XR = vh[:rank].T
            sigma = np.concatenate([sigma, np.zeros(len(vh) - len(sigma))])
            layer.lost, layer.length = TURNED_BACK * float(np.linalg.norm(x)), max(float(np.linalg.norm(sigma)), 1e-30)
            largest = max(sigma[0], 1e-30)
            sigma /= largest
            layer.energy = float((sigma[:rank] ** 2).sum() / max((sigma**2).sum(), 1e-30))
            if rank < len(vh) and sigma[rank - 1] > ZERO:
                layer.sure = bool(1 - sigma[rank] / sigma[rank - 1] > GAP)
                layer.tilt = layer.lost / largest / max(sigma[rank - 1] - sigma[rank], 1e-30)  # Wedin's theorem
            # Directions beyond the tokens' span are anyone's choice: the tokens lie inside, later ones need not.
            layer.spans_prompt_only = rank < len(vh) and bool(sigma[rank - 1] <= ZERO)
            layer.slots = [[Slot() for _ in range(self.resident)] for _ in range(self.g.kv_heads)]
            layer.outliers = [self.worst_described(layer, head) for head in range(self.g.kv_heads)]

    def worst_described(self, layer: Layer, head: int) -> list[int]:
        count = min(self.c.outlier_chunks, self.context)
        cosines, off = [], []
        for chunk in range(self.context):
            keys = [layer.post[p][head] for p in self.members(chunk)]
            mean = sum(keys) / len(keys)
            cosines.append(min(k @ mean / np.linalg.norm(k) / np.linalg.norm(mean) for k in keys))
            # Three sums of D products and two roots; the mean is a sum of L keys, which may cancel.
            longest = max(np.linalg.norm(k) for k in keys) / np.linalg.norm(mean)
            off.append((3 * self.g.head_dim + 8 + (len(keys) + 1) * longest) * EPS)
        sinks = list(range(min(self.c.sink_chunks, count)))
        rest = sorted(set(range(self.context)) - set(sinks), key=lambda c: cosines[c])
        wanted = count - len(sinks)
        kept, left_out = rest[:wanted], rest[wanted:]
        if kept and left_out:
            highest, lowest = max(cosines[c] + off[c] for c in kept), min(cosines[c] - off[c] for c in left_out)
            if highest >= lowest:
                layer.sure = layer.order_sure = False
        return sinks + kept

    def members(self, chunk: int) -> range:
        return range(chunk * self.c.chunk_tokens, (chunk + 1) * self.c.chunk_tokens)

    # One step.

    def attend(self, index: int, q_NTD: Array) -> Answer:
        layer, group = self.layers[index], self.g.heads // self.g.kv_heads
        new = q_NTD.shape[1]
        out, allowed, touched = np.zeros_like(q_NTD), np.zeros_like(q_NTD), []
        layer.close_call = False
        for head in range(self.g.kv_heads):
            rows = range(head * group, (head + 1) * group)
            far: list[tuple[Array, Array, float]] = []
            first_exact = 0
            if self.compressed:
                chunks, hit = self.select(layer, head, q_NTD[rows])
                touched.append(hit)
                outliers = (p for c in layer.outliers[head] for p in self.members(c))
                far = [(layer.post[p][head], layer.v[p][head], 0.0) for p in outliers]
                for p in (p for c in chunks for p in self.members(c)):
                    far.append((self.rebuilt(layer, head, p), layer.v[p][head], self.rebuilt_off(layer, p)))
                first_exact = self.context * self.c.chunk_tokens
            for t in range(new):
                last = self.tokens - new + t
                near = [(layer.post[p][head], layer.v[p][head], 0.0) for p in range(first_exact, last + 1)]
                keys, values, off = (np.stack(x) for x in zip(*far, *near, strict=True))
                seen = rounding.attention(
                    *(torch.from_numpy(x).float() for x in (q_NTD[rows, t][:, None], keys[None], values[None])),
                    torch.ones(1, 1, len(keys), dtype=torch.bool),
                    torch.from_numpy(off + EPS * np.linalg.norm(keys, axis=1))[None],
                )
                allowed[rows, t] = seen.error[:, 0]
                for n in rows:
                    logits = keys @ q_NTD[n, t] / np.sqrt(self.g.head_dim)
                    weights = np.exp(logits - logits.max())
                    out[n, t] = weights @ values / weights.sum()
        sure = not self.compressed or (layer.sure and not layer.close_call)
        return Answer(Bounded(torch.from_numpy(out), torch.from_numpy(allowed)), sure, touched)

    def rebuilt_off(self, layer: Layer, position: int) -> float:
        """How far rounding may put a rebuilt key, in length: sums of X and of R terms with an orthonormal basis, that
        basis turned a little and rounded, keys that were turned back, and turned again."""
        assert layer.basis_XR is not None
        assert layer.mean_X is not None
        width, rank = layer.basis_XR.shape
        length = float(np.linalg.norm(layer.pre[position]) + np.linalg.norm(layer.mean_X))
        stretch = self.rule.factor_of(self.row_keys[position])
        share = (width + rank + 4) * rank**0.5 * EPS + 2 * layer.tilt + TURNED_BACK + ROTATION + 2 * EPS
        return share * length * stretch

    def rebuilt(self, layer: Layer, head: int, position: int) -> Array:
        assert layer.basis_XR is not None
        assert layer.mean_X is not None
        coefficients = (layer.pre[position].reshape(-1) - layer.mean_X) @ layer.basis_XR
        pre = (layer.basis_XR @ coefficients + layer.mean_X).reshape(self.g.kv_heads, -1)[head]
        return self.rule.rotate(pre, position, self.row_keys[position])

    def select(self, layer: Layer, head: int, q_GTD: Array) -> tuple[list[int], set[int]]:
        """The chunks to attend to, and those that were selected and are there now."""
        if not self.c.reuse:
            layer.slots[head] = [Slot() for _ in range(self.resident)]
        candidates = [c for c in range(self.context) if c not in layer.outliers[head]]
        first = self.steps == self.compressed_at + 1
        fills = first and self.c.attend == "resident"
        count = min(self.resident if fills else self.budget, len(candidates))
        ranked = self.rank_chunks(layer, head, q_GTD, candidates, count)
        slots, cap = layer.slots[head], None if first else self.c.fetch_cap_chunks
        hits, fetched = bring(slots, ranked[:count], self.steps, cap, 0 if first else self.c.late_fetch_chunks)
        self.selected, self.hits, self.fetched = self.selected + count, self.hits + hits, self.fetched + fetched
        there = {slot.chunk for slot in slots if slot.chunk >= 0}
        arriving = {slot.arriving for slot in slots if slot.arriving >= 0}
        touched = (there | arriving) & set(ranked[:count])
        return sorted(there if self.c.attend == "resident" else touched), touched

    def rank_chunks(self, layer: Layer, head: int, q_GTD: Array, candidates: list[int], count: int) -> list[int]:
        """Best first, by the softmax of q . landmark / sqrt(D): summed over tokens, maximum over the group."""
        if not candidates:
            return []
        landmarks = [np.mean([layer.post[p][head] for p in self.members(c)], axis=0) for c in candidates]
        logits = q_GTD @ np.stack(landmarks).T / np.sqrt(self.g.head_dim)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        scores = (weights / weights.sum(-1, keepdims=True)).sum(1).max(0)
        order = np.argsort(-scores, kind="stable")
        best = np.log(scores[order])
        # A logit is a sum of D products with a mean of L keys. A share is off by what its logit is and by the mean of
        # that; its logarithm, and those of sums over chunks and tokens, are rounded.
        sizes = [np.mean([np.abs(layer.post[p][head]) for p in self.members(c)], axis=0) for c in candidates]
        size = (np.abs(q_GTD) @ np.stack(sizes).T).max() / np.sqrt(self.g.head_dim)
        off = 2 * (self.g.head_dim + self.c.chunk_tokens + 3) * EPS * size
        off += (len(candidates) + q_GTD.shape[1] + 8) * EPS * (1 + np.abs(best).max())
        close = (best[:-1] - best[1:])[:count] <= 2 * off
        stateful = self.c.attend == "resident" or self.c.fetch_cap_chunks is not None
        layer.order_sure &= not close.any()
        if stateful:
            layer.sure &= layer.order_sure  # which ones are fetched, and so what stays, hangs on the order
        elif count <= len(close):
            layer.close_call |= bool(close[count - 1])
        return [candidates[i] for i in order]


def bring(slots: list[Slot], chosen: list[int], step: int, cap: int | None, late_cap: int) -> tuple[int, int]:
    """Least recently used go, ties by slot; those of now, then the late ones, by id into slots in order. Returns
    hits and fetches."""
    slot_of = {slot.chunk: slot for slot in slots if slot.chunk >= 0}
    missing = [chunk for chunk in chosen if chunk not in slot_of]
    for chunk in chosen:
        if chunk in slot_of:
            slot_of[chunk].used = step
    cap = len(missing) if cap is None else cap
    now, late = sorted(missing[:cap]), sorted(missing[cap : cap + late_cap])
    oldest = sorted(range(len(slots)), key=lambda i: slots[i].used)[: len(now) + len(late)]
    for n, (chunk, i) in enumerate(zip(now + late, sorted(oldest), strict=True)):
        slots[i].used = step
        if n < len(now):
            slots[i].chunk = chunk
        else:
            slots[i].arriving = chunk
    return len(chosen) - len(missing), len(now) + len(late)
