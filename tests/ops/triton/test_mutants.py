"""Kernels with one fault written into them: each is refused by its contract.

Where the interpreter would keep a narrow sum in float32 all the same, the fault is in ``Op.faults`` only.
"""

import importlib
import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shadowkv.ops.contract.all import OPS
from shadowkv.ops.contract.base import Op, excess

BY_NAME: dict[str, Op[Any, Any]] = {op.name: op for op in OPS}


@dataclass(frozen=True)
class Mutant:
    """A kernel in whose source some text is another wherever it stands. It reads none but its rows' memory."""

    op: str
    fault: str
    before: str
    after: str
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        return f"{self.op}: {self.fault}"


MUTANTS = [
    Mutant("score_landmarks", "leaves the last dimension out", "(o_d[None, :] < D)", "(o_d[None, :] < D - 1)"),
    Mutant(
        "score_landmarks", "leaves it out in float32", "(o_e[None, :] < D)", "(o_e[None, :] < D - 1)", torch.float32
    ),
    Mutant(
        "score_landmarks",
        "reads the chunk before",
        "(o_c.to(tl.int64)[:, None] * D",
        "(tl.maximum(o_c - 1, 0)[:, None] * D",
    ),
    Mutant(
        "score_landmarks", "sums in float16", "tl.dot(b_tile_CD, b_q_DG)", "tl.dot(b_tile_CD, b_q_DG, out_dtype=DTYPE)"
    ),
    Mutant(
        "score_landmarks", "forgets a sum's last maximum", "b_sum_CG * tl.exp(b_top_CG - b_base_CG) +", "b_sum_CG +"
    ),
    Mutant(
        "attention",
        "leaves the last token out",
        "end = tl.minimum(begin + run, total)",
        "end = begin + tl.minimum(run, total - begin - 1)",
    ),
    Mutant(
        "attention", "leaves the last chunk out", "chosen_end += count *", "chosen_end += tl.maximum(count - 1, 0) *"
    ),
    Mutant(
        "attention",
        "takes the chunk before",
        "outliers + b_pick * CHUNK_TOKENS",
        "outliers + tl.maximum(b_pick - 1, 0) * CHUNK_TOKENS",
    ),
    Mutant("rebuild_keys", "leaves the last direction out", "m_r = o_r < rank", "m_r = o_r < rank - 1"),
    Mutant("rebuild_keys", "turns for the chunk after", "position.to(tl.float32)", "(position + L).to(tl.float32)"),
    Mutant(
        "rebuild_keys",
        "sums in float16",
        'sum_a = tl.dot(coeff, basis_a, sum_a, input_precision="ieee")',
        "sum_a += tl.dot(coeff, basis_a, out_dtype=ELEMENT)",
    ),
    Mutant("join_context", "leaves the last pair out", "m_h = o_h < HALF", "m_h = o_h < HALF - 1"),
    Mutant(
        "join_context", "turns back from the chunk after", "position.to(tl.float32)", "(position + L).to(tl.float32)"
    ),
    Mutant("write_landmarks", "leaves the last token out", "(o_l < L)[None, :]", "(o_l < L - 1)[None, :]"),
    Mutant("write_landmarks", "takes the chunk after", "chunk * L + o_l)", "(chunk + 1) * L + o_l)"),
    Mutant(
        "add_norm",
        "leaves an element out of a sum",
        "tl.sum(b_x * b_x, 0)",
        "tl.sum(tl.where(o_m == 0, 0.0, b_x * b_x), 0)",
    ),
    Mutant("add_norm", "takes the weight beside", "p_weight + o_m,", "p_weight + (o_m + 1) % WIDTH,"),
    Mutant("gate", "leaves a term out", "1.0 + tl.exp(-b_x)", "tl.exp(-b_x)"),
    Mutant("gate", "takes the element before", "p_gate + width,", "p_gate + width - 1,"),
    Mutant("rope_append", "leaves a term out", "b_a * b_cos - b_b * b_sin", "b_a * b_cos"),
    Mutant("rope_append", "takes the angle beside", "angle_stride + o_h,", "angle_stride + (o_h + 1) % HALF,"),
    Mutant(
        "fetch_values",
        "takes the chunk before",
        "(head * capacity + chunk) * SIZE",
        "(head * capacity + tl.maximum(chunk - 1, 0)) * SIZE",
    ),
    Mutant("fetch_values", "leaves the last chunk out", "m_item = i_item < total", "m_item = i_item < total - PARTS"),
    Mutant(
        "choose_chunks",
        "chooses one chunk fewer",
        "count = fact(p_facts, i_row, SELECT)",
        "count = fact(p_facts, i_row, SELECT) - 1",
    ),
    Mutant("overwrite_logits", "takes the chunk beside", "place = (o_chunk +", "place = (o_chunk + 1 +"),
    Mutant(
        "overwrite_logits", "leaves the last chunk out", "m_chunk = o_chunk < chunks", "m_chunk = o_chunk < chunks - 1"
    ),
]


def mutated(name: str, before: str, after: str) -> ModuleType:
    """A module whose source is changed. Triton looks sources up by file, so the new one gets a file's name."""
    original = importlib.import_module(name)
    source = Path(str(original.__file__)).read_text()
    assert before in source
    file = f"<{name} with {after}>"
    changed = source.replace(before, after)
    linecache.cache[file] = (len(changed), None, changed.splitlines(keepends=True), file)
    module = ModuleType(name)
    exec(compile(changed, file, "exec"), module.__dict__)
    return module


KERNELS = {
    "score_landmarks": "score",
    "rebuild_keys": "keys",
    "join_context": "join",
    "write_landmarks": "join",
    "add_norm": "pointwise",
    "gate": "pointwise",
    "rope_append": "pointwise",
    "fetch_values": "values",
    "choose_chunks": "choose",
    "overwrite_logits": "sliding",
    "attention": "attention",
}


def test_every_kernel_has_mutants() -> None:
    assert {mutant.op for mutant in MUTANTS} == set(BY_NAME) == set(KERNELS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_refused(mutant: Mutant, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"shadowkv.ops.triton.{KERNELS[mutant.op]}"
    monkeypatch.setitem(sys.modules, name, mutated(name, mutant.before, mutant.after))
    op = BY_NAME[mutant.op]
    assert any(excess(op, case, device, mutant.dtype) for case in op.cases())
