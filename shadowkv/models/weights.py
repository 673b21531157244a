"""Streams a checkpoint into the fused layout: every tensor is accounted for, and none exists twice in full."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.errors import CheckpointError
from shadowkv.models.checkpoint import TensorSource
from shadowkv.models.families import Names
from shadowkv.models.lora import LoraAdapter, LowRankUpdate
from shadowkv.models.spec import ModelSpec

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and the bytes there are."""

_STEP_ELEMENTS = 1 << 24
"""A tensor is read in steps of at most so many elements (64 MiB of float32), so that a dequantised
embedding of gigabytes never lies in host memory."""


@dataclass(frozen=True)
class Piece:
    """Where one tensor of a checkpoint goes: rows of one of the package's own tensors."""

    target: str
    first_row: int
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    """Not 0: rows are stored for interleaved RoPE, for this many heads, and are put back into halves."""


def load_weights(
    spec: ModelSpec,
    source: TensorSource,
    names: Names,
    *,
    device: torch.device,
    dtype: torch.dtype,
    permuted: bool = False,
    adapter: LoraAdapter | None = None,
    adapter_names: Names | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Every tensor of ``spec.weight_shapes()``, on the device.

    Args:
        names: what this source calls its tensors.
        permuted: rows of q and k are stored for interleaved RoPE (llama in GGUF).
        adapter_names: what the adapter calls the base model's modules.

    Raises:
        CheckpointError: a tensor is missing, unknown or has the wrong shape, or an update of the adapter
            belongs to no weight; names it.
    """
    pieces = pieces_of(spec, names, permuted=permuted)
    _check_names(pieces, source, names, spec)
    updates = _place_updates(spec, adapter, adapter_names or names) if adapter is not None else {}
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in spec.weight_shapes().items()}
    done, total = 0, spec.weight_bytes(dtype)
    for name, piece in pieces.items():
        module = updates.get((piece.target, piece.first_row))
        update = adapter.update(module) if adapter is not None and module is not None else None
        if update is not None and (update.b.shape[0], update.a.shape[1]) != piece.shape:
            raise CheckpointError(
                f"the adapter's update of {module} is [{update.b.shape[0]}, {update.a.shape[1]}], "
                f"the weight {name} is {list(piece.shape)}"
            )
        rows = piece.shape[0]
        target = tensors[piece.target][piece.first_row : piece.first_row + rows]
        _copy(source, name, piece, target, update)
        done += target.numel() * target.itemsize
        if progress is not None:
            progress(done, total)
    assert done == total, "the pieces do not cover the weights"
    return tensors


def pieces_of(spec: ModelSpec, names: Names, *, permuted: bool) -> dict[str, Piece]:
    """Every tensor that a checkpoint of this model holds, by the checkpoint's name."""
    pieces = {
        f"{names.embed}.weight": Piece("embed", 0, (spec.vocab, spec.hidden)),
        f"{names.norm}.weight": Piece("norm", 0, (spec.hidden,)),
    }
    if not spec.tied_embeddings:
        pieces[f"{names.head}.weight"] = Piece("head", 0, (spec.vocab, spec.hidden))
    shapes = spec.weight_shapes()
    for i in range(spec.layers):
        for part, module in names.layer.items():
            stem, own = names.prefix.format(i=i) + module, f"layers.{i}.{part}"
            if part in _linear(spec):
                pieces |= {stem + suffix: piece for suffix, piece in _linear_pieces(spec, i, part, permuted)}
            elif own in shapes:  # a norm, unless the model has none of the kind
                pieces[f"{stem}.weight"] = Piece(own, 0, shapes[own])
    return pieces


def _linear(spec: ModelSpec) -> dict[str, tuple[str, int, int, int, bool]]:
    """Projections by part: target, first row, rows, columns, and whether there is a bias."""
    q, kv = spec.q_rows, spec.kv_rows
    return {
        "qkv": ("qkv", 0, q + 2 * kv, spec.hidden, spec.qkv_bias),
        "q": ("qkv", 0, q, spec.hidden, spec.qkv_bias),
        "k": ("qkv", q, kv, spec.hidden, spec.qkv_bias),
        "v": ("qkv", q + kv, kv, spec.hidden, spec.qkv_bias),
        "o": ("o", 0, spec.hidden, q, spec.o_bias),
        "gate_up": ("gate_up", 0, 2 * spec.ffn, spec.hidden, spec.mlp_bias),
        "gate": ("gate_up", 0, spec.ffn, spec.hidden, spec.mlp_bias),
        "up": ("gate_up", spec.ffn, spec.ffn, spec.hidden, spec.mlp_bias),
        "down": ("down", 0, spec.hidden, spec.ffn, spec.mlp_bias),
    }


def _linear_pieces(spec: ModelSpec, layer: int, part: str, permuted: bool) -> Iterator[tuple[str, Piece]]:
    target, first, rows, columns, has_bias = _linear(spec)[part]
    heads = {"q": spec.heads, "k": spec.kv_heads}.get(part, 0) if permuted else 0
    yield ".weight", Piece(f"layers.{layer}.{target}", first, (rows, columns), heads)
    if has_bias:
        yield ".bias", Piece(f"layers.{layer}.{target}_bias", first, (rows,), heads)


def _check_names(pieces: dict[str, Piece], source: TensorSource, names: Names, spec: ModelSpec) -> None:
    shapes = source.shapes
    for name, piece in pieces.items():
        if name not in shapes:
            raise CheckpointError(f"the tensor {name} {list(piece.shape)} of this {spec.architecture} model is missing")
        if tuple(shapes[name]) != piece.shape:
            raise CheckpointError(f"the tensor {name} is {list(shapes[name])}; its config asks for {list(piece.shape)}")
    ignored = re.compile("|".join(names.ignored) or "(?!)")
    for name in sorted(shapes.keys() - pieces.keys()):
        # A tied model's head is the embedding; files may hold it once more.
        if not ignored.fullmatch(name) and not (spec.tied_embeddings and name == f"{names.head}.weight"):
            raise CheckpointError(
                f"the tensor {name} {list(shapes[name])} has no place in this {spec.architecture} model as its config "
                "describes it"
            )


def _place_updates(spec: ModelSpec, adapter: LoraAdapter, names: Names) -> dict[tuple[str, int], str]:
    """Modules that the adapter updates, by the target rows they belong to."""
    pieces = pieces_of(spec, names, permuted=False)
    places: dict[tuple[str, int], str] = {}
    for module in adapter.modules:
        piece = pieces.get(f"{module}.weight")
        if piece is None or len(piece.shape) != 2 or piece.target == "embed":
            raise CheckpointError(
                f"the adapter {adapter.directory} updates {module}, which is no projection of this "
                f"{spec.architecture} model"
            )
        places[piece.target, piece.first_row] = module
    return places


def _copy(source: TensorSource, name: str, piece: Piece, target: Tensor, update: LowRankUpdate | None) -> None:
    rows = piece.shape[0]
    columns = piece.shape[1] if len(piece.shape) == 2 else 1
    # Putting rows back needs a head's rows together; q and k are small.
    step = rows if piece.interleaved_heads else max(1, _STEP_ELEMENTS // columns)
    a = update.a.to(target.device, torch.float32) if update is not None else None
    for first in range(0, rows, step):
        part = source.read(name, first, min(step, rows - first))
        if piece.interleaved_heads:
            part = _halves(part, piece.interleaved_heads)
        into = target[first : first + step]
        if update is None or a is None:
            into.copy_(part)
        else:
            # In float32 from the stored numbers, and rounded once.
            wide = part.to(target.device, torch.float32, copy=True)
            b = update.b[first : first + step].to(target.device, torch.float32)
            into.copy_(wide.addmm_(b, a, alpha=update.scale))


def _halves(stored: Tensor, heads: int) -> Tensor:
    """Rows of neighbouring pairs to rows of halves, per head: the inverse of llama.cpp's permutation."""
    pairs = stored.reshape(heads, -1, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
