"""Sixty steps of the soak: the losses of plain training, and nothing that grows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.soak import LENGTHS, Run, faults, train


@pytest.mark.slow
def test_sixty_steps():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    plain, bounded = train(60, scheduled=False), train(60, scheduled=True)
    assert faults(plain, bounded) == []
    assert len(LENGTHS) <= bounded.plans <= 2 * len(LENGTHS)  # with and without gradients of an earlier micro-batch


def test_faults_are_found():
    good = Run([1.0, 2.0, 3.0], [5, 5, 5], [100, 100, 100], 1)
    assert faults(good, good) == []
    bad = Run([1.0, 2.5, 3.0], [5, 6, 7], [100, 100, 10**9], 1)
    assert len(faults(good, bad)) == 3
