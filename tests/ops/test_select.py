"""Scores and the best chunks against loops, and the resident set against a dict that finds victims one by one."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.select import EMPTY, OUTLIER, ResidentSet, chunk_scores, top_chunks, update_resident
from tests.ops.truth import assert_within, log_sum_exp


def naive_scores(logits_KGTC: Tensor, selectable_KC: Tensor) -> Bounded:
    """Head by head over the selectable chunks alone."""
    out = Bounded.full(tuple(selectable_KC.shape), -torch.inf, selectable_KC.device)
    for head, selectable in enumerate(selectable_KC):
        logits_GTC = Bounded.exact(logits_KGTC[head, :, :, selectable])
        shares_GTC = logits_GTC - log_sum_exp(logits_GTC, 2)
        out.put((head, selectable), log_sum_exp(shares_GTC, 1).amax(0)[0])
    return out


@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (1, 3), (4, 3)])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_scores(device, group, tokens, scale):
    logits = scale * torch.randn(3, group, tokens, 17, device=device)
    selectable = torch.rand(3, 17, device=device) < 0.7
    selectable[0] = True
    selectable[:, 5] = True
    assert_within(chunk_scores(logits, selectable), naive_scores(logits, selectable))


def test_scores_are_logarithms_of_summed_shares(device):
    """In float64, where 17 sums of shares below 1 lose next to nothing."""
    logits = torch.randn(2, 3, 4, 9, device=device, dtype=torch.float64)
    everything = torch.ones(2, 9, dtype=torch.bool, device=device)
    shares = torch.softmax(logits, -1).sum(2).amax(1)
    lost = (chunk_scores(logits, everything).exp() - shares).abs().max()
    assert lost <= 9 * 4 * 4 * torch.finfo(torch.float64).eps


def test_scores_too_small_for_a_share_keep_their_order(device):
    logits = torch.tensor([0.0, -300.0, -200.0, -400.0], device=device).reshape(1, 1, 1, 4)
    everything = torch.ones(1, 4, dtype=torch.bool, device=device)
    assert top_chunks(chunk_scores(logits, everything), 4).tolist() == [[0, 2, 1, 3]]


def test_chunks_that_are_not_selectable_take_no_share(device):
    logits = torch.randn(2, 2, 1, 9, device=device)
    selectable = torch.ones(2, 9, dtype=torch.bool, device=device)
    selectable[:, 3] = False
    before = chunk_scores(logits, selectable)
    for poison in (1e4, torch.inf, torch.nan):
        logits[..., 3] = poison
        assert torch.equal(chunk_scores(logits, selectable), before)


def test_nothing_selectable_and_no_chunks(device):
    none = torch.zeros(2, 5, dtype=torch.bool, device=device)
    assert (chunk_scores(torch.randn(2, 3, 1, 5, device=device), none) == -torch.inf).all()
    empty = chunk_scores(torch.empty(2, 3, 1, 0, device=device), none[:, :0])
    assert top_chunks(empty, 0).shape == (2, 0)


@pytest.mark.parametrize("count", [0, 1, 4, 12])
def test_best_first_with_ties_to_the_lower_chunk(device, count):
    scores = torch.randint(0, 4, (5, 12), device=device).float()
    scores[:, 7] = -torch.inf
    expected = [sorted(range(12), key=lambda c: (-row[c], c))[:count] for row in scores.tolist()]
    assert top_chunks(scores, count).tolist() == expected


@dataclass
class NaiveHead:
    """One KV head's resident set: chunk and time of last use by slot, finding one victim at a time."""

    slots: int
    chunk_in: dict[int, int] = field(default_factory=dict)
    used_at: dict[int, int] = field(default_factory=dict)

    def update(
        self, chosen: list[int], step: int, cap: int | None, late_cap: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
        slot_of = {chunk: slot for slot, chunk in self.chunk_in.items()}
        hits = [chunk for chunk in chosen if chunk in slot_of]
        for chunk in hits:
            self.used_at[slot_of[chunk]] = step
        misses = [c for c in chosen if c not in slot_of]
        now = sorted(misses[:cap])
        late = sorted(misses[len(now) : len(now) + late_cap])
        victims: list[int] = []
        for _ in now + late:
            free = [slot for slot in range(self.slots) if slot not in victims]
            victims.append(min(free, key=lambda slot: (self.used_at.get(slot, -1), slot)))
            assert self.chunk_in.get(victims[-1]) not in chosen
        fetched = list(zip(now + late, sorted(victims), strict=True))
        for chunk, slot in fetched:
            self.chunk_in[slot], self.used_at[slot] = chunk, step
        return fetched[: len(now)], fetched[len(now) :], len(hits)


def new_set(heads: int, slots: int, chunks: int, device: torch.device) -> ResidentSet:
    def empty(width: int) -> Tensor:
        return torch.full((heads, width), EMPTY, dtype=torch.int32, device=device)

    return ResidentSet(empty(slots), empty(slots), empty(chunks))


def check_consistent(resident: ResidentSet, outliers: list[set[int]]) -> None:
    """resident_ids and slot_of_chunk are inverse to each other, and outliers stay marked."""
    for head, marked in enumerate(outliers):
        ids, slots = resident.resident_ids_KP[head].tolist(), resident.slot_of_chunk_KC[head].tolist()
        for slot, chunk in enumerate(ids):
            assert chunk == EMPTY or slots[chunk] == slot
        for chunk, slot in enumerate(slots):
            if chunk in marked:
                assert slot == OUTLIER
            else:
                assert slot == EMPTY or ids[slot] == chunk


@st.composite
def histories(draw):
    heads, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    outliers = [draw(st.sets(st.integers(0, chunks - 1), max_size=min(2, chunks - 1))) for _ in range(heads)]
    outliers = [set(sorted(ids)[: min(map(len, outliers))]) for ids in outliers]
    selectable = chunks - len(outliers[0])
    budget = draw(st.integers(1, selectable))
    slots = draw(st.integers(budget, budget + 6))
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        count = draw(st.integers(0, min(budget, selectable)))
        chosen = [draw(st.permutations([c for c in range(chunks) if c not in ids])).copy()[:count] for ids in outliers]
        steps.append(
            (chosen, draw(st.none() | st.integers(0, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 9)) == 0)
        )
    return heads, chunks, outliers, slots, steps


@settings(deadline=None, max_examples=150, derandomize=True)
@given(histories())
def test_the_resident_set_is_least_recently_used(device, history):
    heads, chunks, outliers, slots, steps = history
    resident = new_set(heads, slots, chunks, device)
    for head, ids in enumerate(outliers):
        resident.slot_of_chunk_KC[head, list(ids)] = OUTLIER
    naive = [NaiveHead(slots) for _ in range(heads)]
    for step, (chosen, cap, late_cap, clear) in enumerate(steps, start=1):
        if clear:
            resident.clear()
            naive = [NaiveHead(slots) for _ in range(heads)]
        chosen_KP = torch.tensor(chosen, dtype=torch.int64, device=device).reshape(heads, -1)
        now, late, hits = update_resident(resident, chosen_KP, step, cap, late_cap)
        expected = [head.update(ids, step, cap, late_cap) for head, ids in zip(naive, chosen, strict=True)]
        assert int(hits) == sum(count for *_, count in expected)
        for part, fetch in enumerate((now, late)):
            got = list(zip(fetch.head_M.tolist(), fetch.chunk_M.tolist(), fetch.slot_M.tolist(), strict=True))
            assert got == [(h, chunk, slot) for h, parts in enumerate(expected) for chunk, slot in parts[part]]
        for head, ids in enumerate(resident.resident_ids_KP.tolist()):
            assert {s: c for s, c in enumerate(ids) if c != EMPTY} == naive[head].chunk_in
            stamped = {ids[s] for s, at in enumerate(resident.last_used_KP[head].tolist()) if at == step}
            assert stamped == set(chosen[head]) & set(ids)  # so a chosen chunk is never a victim
            if cap is None:
                assert stamped == set(chosen[head])
        check_consistent(resident, outliers)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.data())
def test_with_no_slot_to_spare_it_is_the_last_steps_selection(device, data):
    budget, chunks = data.draw(st.integers(1, 6)), 13
    resident = new_set(2, budget, chunks, device)
    last: list[set[int]] = [set(), set()]
    for step in range(1, 8):
        chosen = [data.draw(st.permutations(range(chunks)))[:budget] for _ in range(2)]
        *_, hits = update_resident(resident, torch.tensor(chosen, device=device), step, None)
        assert int(hits) == sum(len(before & set(ids)) for before, ids in zip(last, chosen, strict=True))
        last = [set(ids) for ids in chosen]
        assert [set(ids) for ids in resident.resident_ids_KP.tolist()] == last


def test_late_chunks_come_after_those_for_now(device):
    resident = new_set(1, 6, 9, device)
    update_resident(resident, torch.tensor([[8, 5]], device=device), 1, None)
    now, late, hits = update_resident(resident, torch.tensor([[7, 5, 6, 2, 0, 1]], device=device), 2, 2, 2)
    assert (int(hits), now.chunk_M.tolist(), late.chunk_M.tolist()) == (1, [6, 7], [0, 2])  # 1 is dropped
    assert (now.slot_M.tolist(), late.slot_M.tolist()) == ([2, 3], [4, 5])
    assert resident.resident_ids_KP.tolist() == [[5, 8, 6, 7, 0, 2]]
    assert resident.last_used_KP.tolist() == [[2, 1, 2, 2, 2, 2]]


def test_clearing_forgets_residents_and_keeps_outliers(device):
    resident = new_set(1, 2, 5, device)
    resident.slot_of_chunk_KC[0, 3] = OUTLIER
    update_resident(resident, torch.tensor([[4, 0]], device=device), 1, None)
    resident.clear()
    assert resident.resident_ids_KP.tolist() == resident.last_used_KP.tolist() == [[EMPTY, EMPTY]]
    assert resident.slot_of_chunk_KC.tolist() == [[EMPTY, EMPTY, EMPTY, OUTLIER, EMPTY]]


def test_updates_are_in_place_on_views_of_a_larger_memory(device):
    """The cache passes one layer's slices of a sequence's tensors."""
    memory = torch.full((3, 2, 8), EMPTY, dtype=torch.int32, device=device)
    resident = ResidentSet(memory[1, :, :2], memory[1, :, 2:4], memory[1, :, 4:])
    update_resident(resident, torch.tensor([[3, 1], [0, 2]], device=device), 7, None)
    assert memory[1].tolist() == [[1, 3, 7, 7, -1, 0, -1, 1], [0, 2, 7, 7, 0, -1, 1, -1]]
    assert (memory[[0, 2]] == EMPTY).all()
