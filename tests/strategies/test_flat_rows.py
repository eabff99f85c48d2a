"""Parameters as rows: copied side by side, or changed where they are."""

from __future__ import annotations

import torch

from offbeat.strategies.worker.flat_rows import Rows


def test_large_tensors_are_changed_where_they_are_and_others_through_a_copy() -> None:
    large, small, turned = torch.rand(20_000), torch.rand(7), torch.rand(150, 140).t()
    waves, precise = torch.rand(20_000).to(torch.complex64), torch.rand(3, dtype=torch.float64)
    tensors = [small, large, turned, waves, precise]
    expected = [2 * tensor for tensor in tensors]
    rows = Rows([*tensors, large])
    with rows.in_place() as opened:
        for row in opened:
            for part in row:
                part.mul_(2)
        places = {part.data_ptr() for row in opened for part in row}
        assert {large.data_ptr(), turned.data_ptr()} < places
        assert not {small.data_ptr(), waves.data_ptr(), precise.data_ptr()} & places
        assert sorted(sum(part.numel() for part in row) for row in opened) == [3, 20_000, 41_007]
    for tensor, doubled in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, doubled)


def test_tensors_that_overlap_are_changed_once() -> None:
    whole = torch.rand(40_000)
    expected, rows = 2 * whole, Rows([whole, whole[10_000:]])
    with rows.in_place() as ((flat,),):
        flat.mul_(2)
    assert flat.numel() == 70_000
    assert torch.equal(whole, expected)
