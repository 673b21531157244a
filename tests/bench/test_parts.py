"""Kernels by name, and busy times of what overlaps."""

import ast
import json
from pathlib import Path

import pytest

from shadowkv.bench.parts import PARTS, Busy, covered_us, known_part, part_of, read_trace, split_by_part
from tests.repo.tree import ROOT


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_score_kernel", "select"),
        ("_choose_kernel", "select"),
        ("_overwrite_logits", "select"),
        ("_rebuild_keys", "keys"),
        ("_fetch_values", "values"),
        ("_attend_run", "attention"),
        ("_merge_runs", "attention"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_128x64_64x9_1x2_h_bz_TNT", "linears"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "linears"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "linears"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "rest"),
        ("Memcpy HtoD (Pageable -> Device)", "rest"),
    ],
)
def test_parts_of_kernels(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
    assert part in PARTS


def launched() -> set[str]:
    """Every kernel of ours that a launcher launches: ``kernel[grid](...)``."""
    found = set()
    for path in (ROOT / "shadowkv" / "ops" / "triton").glob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8"))
        jitted = {node.name for node in body.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
        for node in ast.walk(body):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in jitted:
                found.add(node.value.id)
    return found


def test_the_table_knows_each_of_our_kernels() -> None:
    assert {kernel for kernel in launched() if known_part(kernel) is None} == set()


def test_overlapping_work_counts_once() -> None:
    stays = [Busy("a", 0, 10), Busy("b", 5, 12), Busy("c", 6, 7), Busy("d", 20, 21)]
    assert covered_us(stays) == 13
    assert covered_us([]) == 0


def test_busy_times_of_parts_may_add_up_to_more_than_the_step() -> None:
    stays = [Busy("_fetch_values", 0, 4000), Busy("_rebuild_keys", 1000, 2000), Busy("odd", 4000, 4500)]
    times = split_by_part(stays, steps=2)
    assert times is not None
    assert times.by_part_ms["values"] == 2.0
    assert times.by_part_ms["keys"] == 0.5
    assert times.by_part_ms["rest"] == 0.25
    assert times.busy_ms == 2.25
    assert (times.kernels, times.unmatched) == (1.5, ("odd",))
    assert split_by_part([], steps=2) is None


def test_a_trace_file(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "_score_kernel", "ts": 10.5, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 50},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 20, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(tmp_path / "t.json") == [Busy("_score_kernel", 10.5, 12.5), Busy("Memcpy HtoD", 20, 21)]
