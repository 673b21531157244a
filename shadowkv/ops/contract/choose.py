"""The contract of choosing: from logits to chunks, slots, and the lists for fetching and attention."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.contract.base import Op, Outputs, Traffic
from shadowkv.ops.contract.faults import LEFT_OUT, ONE_OFF
from shadowkv.ops.contract.rows import RowSpec, Sizes, make_rows
from shadowkv.ops.rows import Fact, LayerRows, Selection
from shadowkv.ops.select import EMPTY, OUTLIER, ResidentSet, top_chunks, update_resident
from shadowkv.ops.splits import choose_width

STATE = ("RESIDENT_IDS", "LAST_USED", "SLOT_OF_CHUNK", "COUNTERS")
UNSET = -7
"""Entries of the lists beyond their counts, which nobody reads."""
GRID = 16
"""Logits are multiples of 1/GRID, so that no sum is rounded and scores are the same in every order."""


@dataclass(frozen=True)
class ChooseCase:
    """``levels``: how many different logits there are; few make many ties. ``fresh``: nothing is resident yet."""

    rows: tuple[RowSpec, ...]
    kv_heads: int = 2
    group: int = 4
    attend_resident: bool = True
    levels: int = 400
    fresh: bool = False
    splits: int = 3
    spare_width: int = 0


@dataclass(frozen=True)
class ChooseInputs:
    """``tensors``: the rows' own, which their tables point into; of them the STATE is updated."""

    case: ChooseCase
    tensors: list[dict[str, Tensor]]
    rows: LayerRows
    logits_BKGC: Tensor
    parts_BKGZ2: Tensor
    keys_BKX: Tensor
    out: Selection


def _row(
    chunks: int, select: int, resident: int, cap: int = 1 << 30, late_cap: int = 0, outliers: int = 2, spare: int = 3
) -> RowSpec:
    return RowSpec(chunks, outliers, resident, 9, 16, select, cap, late_cap, spare)


PADDING = RowSpec(0, 0, 1, 0, 8)


class Choose(Op[ChooseCase, ChooseInputs]):
    """``ops.triton.choose``."""

    name = "choose_chunks"
    source = "arXiv 2410.21465, section 4; ops.select"
    exact = frozenset(
        ("attend", "attend_count", "fetch_chunk", "fetch_slot", "fetch_count", *(name.lower() for name in STATE))
    )

    def cases(self) -> list[ChooseCase]:
        exact_row = RowSpec(0, 0, 4, 12, 16)
        ragged = (_row(90, 8, 12, 3, 2), PADDING, _row(7, 5, 5), exact_row, _row(200, 31, 50, 4, 5), _row(30, 0, 6))
        return [
            ChooseCase((_row(50, 10, 10),), attend_resident=False),
            ChooseCase((_row(50, 10, 24),), group=1, splits=1),
            ChooseCase((_row(150, 20, 20, 4),), group=16, attend_resident=False, levels=100_000),
            ChooseCase((_row(150, 20, 64, 4, 8),), group=3),
            ChooseCase((_row(150, 20, 64, 0, 3),), kv_heads=3, levels=4),
            ChooseCase((_row(150, 20, 64, 0),), kv_heads=1),
            ChooseCase((_row(90, 30, 40, 5, 6),), levels=3, attend_resident=False),
            ChooseCase((_row(90, 30, 40, 5, 6), _row(40, 1, 1)), levels=1),
            ChooseCase((_row(64, 60, 61, outliers=4, spare=0),), levels=20),
            ChooseCase((_row(80, 33, 33),), fresh=True),
            ChooseCase((_row(80, 20, 33, 7, 6),), fresh=True),
            ChooseCase((_row(80, 20, 33, 7, 6),), fresh=True, attend_resident=False, levels=5),
            ChooseCase(ragged),
            ChooseCase(ragged, attend_resident=False, levels=10, spare_width=37),
            ChooseCase((_row(700, 100, 300, 9, 30),), kv_heads=1, levels=50),
        ]

    def bench_cases(self) -> list[ChooseCase]:
        shapes = ((1, 7_504), (8, 7_504), (8, 15_312), (50, 7_504), (50, 15_312), (1, 131_008))
        return [
            ChooseCase((_row(chunks, 256, resident, cap, late, 48),) * batch, 8, 4, resident > 256, 1 << 20, splits=16)
            for batch, chunks in shapes
            for resident, cap, late in ((256, 1 << 30, 0), (1024, 16, 48))
        ]

    def make(self, case: ChooseCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ChooseInputs:
        kv_heads, group = case.kv_heads, case.group
        tensors, rows = make_rows(list(case.rows), Sizes(kv_heads, group, 8, 1, 1), device, torch.float32, seed)
        gen = torch.Generator().manual_seed(seed + 1)
        batch, width = len(case.rows), max(row.chunks for row in case.rows) + case.spare_width
        logits = torch.full((batch, kv_heads, group, width), torch.nan, device=device)
        # The sums of two splits are 1 together, those of the others vanish beside them.
        total = torch.randint(4 * GRID, 6 * GRID, (batch, kv_heads, group), generator=gen) / GRID
        parts = torch.stack([total[..., None].repeat(1, 1, 1, case.splits), torch.ones(*total.shape, case.splits)], -1)
        parts[..., 1:, 0] -= 300
        parts[..., 2:, :] = torch.tensor([-torch.inf, 0.0])
        if case.splits > 1:
            parts[..., 0, 1], parts[..., -1, 0], parts[..., -1, 1] = 0.5, total, 0.5
        for row, spec in enumerate(case.rows):
            drawn = torch.randint(0, case.levels, (kv_heads, group, spec.chunks), generator=gen)
            logits[row, :, :, : spec.chunks] = ((drawn - case.levels // 2) / GRID).to(device)
            if case.fresh:
                tensors[row]["RESIDENT_IDS"].fill_(EMPTY)
                tensors[row]["LAST_USED"].fill_(EMPTY)
                tensors[row]["SLOT_OF_CHUNK"].clamp_max_(EMPTY)
            outlier_KC = tensors[row]["SLOT_OF_CHUNK"][:, : spec.chunks] == OUTLIER
            logits[row, :, :, : spec.chunks].masked_fill_(outlier_KC[:, None], -torch.inf)
        most = max(row.resident for row in case.rows)
        lists = (torch.full((batch, kv_heads, most), UNSET, dtype=torch.int32, device=device) for _ in range(3))
        attend, chunk, slot = lists
        out = Selection(attend, attend[..., 0].clone(), chunk, slot, attend.new_full((batch, kv_heads, 2), UNSET))
        keys = torch.full((batch, kv_heads, choose_width(width)), UNSET, dtype=torch.int32, device=device)
        return ChooseInputs(case, tensors, rows, logits, parts.to(device), keys, out)

    def run(self, inputs: ChooseInputs) -> Outputs:
        from shadowkv.ops.triton.choose import choose_chunks

        attend_resident = inputs.case.attend_resident
        choose_chunks(
            inputs.rows,
            inputs.logits_BKGC,
            inputs.parts_BKGZ2,
            inputs.keys_BKX,
            inputs.out,
            most=max(row.select for row in inputs.case.rows) or 1,
            attend_resident=attend_resident,
        )
        return self._outputs(inputs)

    def reference(self, inputs: ChooseInputs) -> Outputs:
        top_BKGX, sum_BKGX = inputs.parts_BKGZ2.unbind(-1)
        top_BKG1 = top_BKGX.amax(-1, keepdim=True)
        total_BKG1 = top_BKG1 + (sum_BKGX * torch.exp(top_BKGX - top_BKG1)).sum(-1, keepdim=True).log()
        scores_BKC = (inputs.logits_BKGC - total_BKG1).amax(2)
        for row, facts in enumerate(inputs.rows.facts_BI.tolist()):
            self._reference_row(inputs, row, facts, scores_BKC[row, :, : facts[Fact.CHUNKS]])
        return self._outputs(inputs)

    def faults(self, inputs: ChooseInputs) -> dict[str, Outputs]:
        beside, fewer = copy.deepcopy(inputs), copy.deepcopy(inputs)
        beside.logits_BKGC.copy_(inputs.logits_BKGC.roll(1, 3))
        select_B = fewer.rows.facts_BI[:, Fact.SELECT]
        select_B -= (select_B > 1).int()
        return {ONE_OFF: self.reference(beside), LEFT_OUT: self.reference(fewer)}

    def _reference_row(self, inputs: ChooseInputs, row: int, facts: list[int], scores_KC: Tensor) -> None:
        out, tensors = inputs.out, inputs.tensors[row]
        out.attend_count_BK[row], out.fetch_count_BK2[row] = 0, 0
        if not facts[Fact.SELECT] or not facts[Fact.CHUNKS]:
            return
        resident = ResidentSet(tensors["RESIDENT_IDS"], tensors["LAST_USED"], tensors["SLOT_OF_CHUNK"])
        there_KP = resident.resident_ids_KP >= 0
        chosen_KP = top_chunks(scores_KC, facts[Fact.SELECT])
        step, cap, late_cap = facts[Fact.STEP], facts[Fact.CAP], facts[Fact.LATE_CAP]
        now, late, hits = update_resident(resident, chosen_KP, step, cap, late_cap)
        if not inputs.case.attend_resident:
            there_KP = resident.last_used_KP == step
            there_KP[late.head_M, late.slot_M] = False
        there_KP[now.head_M, now.slot_M] = True
        for head, there_P in enumerate(there_KP):
            slots = there_P.nonzero().flatten()
            out.attend_BKP[row, head, : len(slots)], out.attend_count_BK[row, head] = slots.int(), len(slots)
            counts = [int((fetch.head_M == head).sum()) for fetch in (now, late)]
            chunk_M = torch.cat([fetch.chunk_M[fetch.head_M == head] for fetch in (now, late)])
            slot_M = torch.cat([fetch.slot_M[fetch.head_M == head] for fetch in (now, late)])
            out.fetch_chunk_BKP[row, head, : sum(counts)] = chunk_M.int()
            out.fetch_slot_BKP[row, head, : sum(counts)] = slot_M.int()
            out.fetch_count_BK2[row, head] = out.fetch_count_BK2.new_tensor(counts)
        fetched = now.head_M.numel() + late.head_M.numel()
        tensors["COUNTERS"] += torch.stack([hits, chosen_KP.numel() - hits, hits.new_tensor(fetched)])

    def _outputs(self, inputs: ChooseInputs) -> Outputs:
        """Everything that is written, unspecified entries made equal."""
        out = inputs.out
        place_P = torch.arange(out.attend_BKP.shape[2], device=out.attend_BKP.device)
        beyond_attend = place_P >= out.attend_count_BK[..., None]
        beyond_fetch = place_P >= out.fetch_count_BK2.sum(-1, keepdim=True)
        outputs = {
            "attend": out.attend_BKP.masked_fill(beyond_attend, UNSET),
            "attend_count": out.attend_count_BK,
            "fetch_chunk": out.fetch_chunk_BKP.masked_fill(beyond_fetch, UNSET),
            "fetch_slot": out.fetch_slot_BKP.masked_fill(beyond_fetch, UNSET),
            "fetch_count": out.fetch_count_BK2,
        }
        for name in STATE:
            outputs[name.lower()] = torch.cat([tensors[name].flatten() for tensors in inputs.tensors])
        return outputs

    def traffic(self, case: ChooseCase, dtype: torch.dtype) -> Traffic:
        heads = sum(
            case.kv_heads * (4 * case.group * row.chunks + 8 * row.resident + 4 * row.select) for row in case.rows
        )
        return Traffic(heads)
