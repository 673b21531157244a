"""What surrounds the timing of kernels: checks, shares, and inputs that are put back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from shadowkv.bench import checks
from shadowkv.bench.kernels import COLUMNS, Restorer, cells, copies_for, prepared, tensors_of, time_ops, timed
from shadowkv.bench.library import CASES
from shadowkv.bench.statistics import Spread
from shadowkv.bench.timing import require_gpu
from shadowkv.errors import ConfigError
from shadowkv.ops.contract.all import OPS
from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.bounds import Bounded
from tests.bench.fakes import H200

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Nested:
    first: Tensor
    rest: list[dict[str, Tensor]]


class Doubling(Op[float, Tensor]):
    """Right, wrong or raising, as its factor is 2, 3 or 0."""

    name = "doubling"
    source = "arithmetic"
    exact: ClassVar[frozenset[str]] = frozenset({"ids"})

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def cases(self) -> list[float]:
        return [1.0, 2.0]

    def bench_cases(self) -> list[float]:
        return [3.0]

    def make(self, case: float, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return torch.full((4,), case, dtype=dtype, device=device)

    def run(self, inputs: Tensor) -> Outputs:
        if not self.factor:
            raise RuntimeError("no such instruction")
        return {"out": self.factor * inputs, "ids": (self.factor * inputs).int()}

    def reference(self, inputs: Tensor) -> Outputs:
        return {"out": 2 * inputs, "ids": (2 * inputs).int()}

    def truth(self, inputs: Tensor) -> dict[str, Bounded]:
        return {"out": Bounded.exact(inputs) * 2.0}

    def faults(self, inputs: Tensor) -> dict[str, Outputs]:
        return {"triples": Doubling(3).run(inputs)}

    def traffic(self, case: float, dtype: torch.dtype) -> Traffic:
        return Traffic(32)


def test_a_right_kernel_passes() -> None:
    result = checks.check_op(Doubling(2), CPU, torch.float32)
    assert (result.cases, result.passed, result.worst, result.failures) == (2, 2, 0.0, [])
    assert checks.cells(result) == ["doubling", "float32", "2", "2", "0.00", "0.00"]


def test_a_wrong_kernel_says_where() -> None:
    result = checks.check_op(Doubling(3), CPU, torch.float32)
    assert (result.passed, result.worst) == (0, float("inf"))
    assert result.failures[0].startswith("1.0: out: error 1, allowed 2.38e-07, in element 0 of 4; ")
    assert "ids: 4 of 4 entries differ" in result.failures[0]
    assert result.to_dict()["worst"] is None


def test_a_kernel_that_raises_has_failed() -> None:
    result = checks.check_op(Doubling(0), CPU, torch.float32)
    assert not result.right
    assert result.failures == [f"{case}: RuntimeError: no such instruction" for case in (1.0, 2.0)]


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="set TRITON_INTERPRET=1"):
        checks.check_ops([], CPU, lambda *_: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert checks.check_ops([], CPU, lambda *_: None) == []
    assert torch.bfloat16 not in checks.dtypes_for(CPU)


def test_times_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="timed on a GPU only, and the device is cpu"):
        require_gpu(CPU)


def test_operations_by_name() -> None:
    ops = [Doubling(2)]
    assert checks.choose_ops(ops, None) == checks.choose_ops(ops, "doubling,doubling") == ops
    with pytest.raises(ConfigError, match="no operation 'x'; there are: doubling"):
        checks.choose_ops(ops, "x")


def test_cases_have_short_names() -> None:
    @dataclass(frozen=True)
    class Case:
        rows: tuple[Nested, ...]
        late: bool = False
        label: str = ""

    rows = (Nested(1, (2, 3)),) * 48  # type: ignore[arg-type]
    assert checks.case_name(Case(rows)) == "rows=48 x (first=1, rest=(2, 3))"
    assert checks.case_name(Case(rows[:1], late=True)) == "rows=1 x (first=1, rest=(2, 3)), late=True"
    assert checks.case_name(Case(rows, label="48 rows")) == "48 rows"
    assert checks.case_name(1.5) == "1.5"
    assert max(len(checks.case_name(case)) for op in OPS for case in op.bench_cases()) < 250


def test_all_contracts_are_found_once() -> None:
    names = [op.name for op in OPS]
    assert "overwrite_logits" in names
    assert len(set(names)) == len(names)


def test_what_a_run_changes_is_put_back() -> None:
    inputs = Nested(torch.ones(3), [{"x": torch.tensor([1.0, torch.nan]), "same": torch.full((2,), torch.nan)}])
    restore = Restorer(inputs, lambda: (inputs.first.add_(1), inputs.rest[0]["x"].zero_()), CPU)
    assert len(restore._kept) == 2  # NaN that stays is no change
    inputs.first.add_(5)
    restore()
    assert inputs.first.tolist() == [1, 1, 1]
    assert inputs.rest[0]["x"].isnan().tolist() == [False, True]


def test_only_the_kernel_is_timed_on_what_it_was_given() -> None:
    pytest.importorskip("triton")
    (op,) = [op for op in OPS if op.name == "choose_chunks"]
    inputs = op.make(op.cases()[0], CPU, torch.float32)
    before = [tensor.clone() for tensor in tensors_of(inputs)]
    launch, restore = prepared(op, inputs, CPU)
    assert restore._kept  # choosing moves chunks
    restore()
    for tensor, old in zip(tensors_of(inputs), before, strict=True):
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8))
    launch()
    assert any(not torch.equal(tensor, old) for tensor, old in restore._kept)


def test_tensors_are_found_once() -> None:
    one = torch.ones(2)
    assert tensors_of((one, [one], {"a": one}, Nested(one, []), 3)) == [one]


def test_small_kernels_are_timed_on_several_inputs() -> None:
    assert copies_for(Traffic(1), 1) == 8
    assert copies_for(Traffic(200 << 20), 200 << 20) == 2
    assert copies_for(Traffic(1), 2 << 30) == 2
    assert copies_for(Traffic(4 << 30), 1) == copies_for(Traffic(0, 4 << 30), 1) == copies_for(Traffic(1), 9 << 30) == 1


@pytest.mark.parametrize(
    ("traffic", "limit", "share"),
    [
        (Traffic(4_320_000_000, 0, 1), "HBM", 0.5),
        (Traffic(1, 50_000_000, 1), "bus", 0.5),
        (Traffic(1, 1, 1_616_000_000_000), "compute", 1.0),
    ],
)
def test_the_longest_bound_is_the_ceiling(traffic: Traffic, limit: str, share: float) -> None:
    row = timed("op", "case", torch.bfloat16, "shadowkv", Spread(2.0, 1.9, 2.1, 30), traffic, H200)
    assert row.limit == limit
    assert row.share == pytest.approx(share)
    assert len(cells(row)) == len(COLUMNS)
    assert row.to_dict()["share"] == row.share


def test_the_librarys_cases_are_named_as_ours() -> None:
    (ours,) = [op for op in OPS if op.name == "attention"]
    labels = {getattr(case, "label", "") for case in ours.bench_cases()}
    assert {case.label for case in CASES} <= labels
    assert CASES[0].traffic(torch.bfloat16).device_bytes == 32768 * 4096


class Watch:
    """Runs what it is given and says that it took 2 ms."""

    device = CPU

    def time(self, works: Sequence[Callable[[], object]], *, before: Callable[[], object]) -> Spread:
        before()
        for work in works:
            work()
        return Spread(2.0, 1.9, 2.1, len(works))


def test_only_right_kernels_are_timed() -> None:
    class Broken(Doubling):
        name = "broken"

        def bench_cases(self) -> list[float]:
            self.factor = 0
            return [3.0]

    watch: Any = Watch()
    result = time_ops([Doubling(3), Doubling(2), Broken(2)], torch.float32, watch, H200, lambda *_: None)
    assert [(row.op, row.case, row.spread.repetitions) for row in result.rows] == [("doubling", "3.0", 8)]
    assert [(checked.op, checked.passed) for checked in result.refused] == [("doubling", 0)]
    assert result.broken == ["broken, 3.0: no such instruction"]
