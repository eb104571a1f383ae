"""Every architecture of the zoo trains under its floor, a middle and an unlimited budget as it does plain."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.assessment import LEVELS, assess, budgets_of, refusal_of
from tests.zoo.registry import ZOO

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _parameters():
    """Every entry at every level. Most of the time goes into tracing: every run covers a few entries at the floor."""
    for name, entry in ZOO.items():
        for level in LEVELS:
            fast = entry.fast and level == "floor"
            if not entry.refused:
                yield pytest.param(name, level, id=f"{name}-{level}", marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "level"), list(_parameters()))
def test_trains_as_plain_within_the_budget(name, level):
    failures = assess(name, budgets_of(name)[level]).failures()
    assert not failures, "\n".join(failures[:10])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.refused])
def test_is_refused_with_its_reason(name):
    assert ZOO[name].refused in refusal_of(name)


def test_every_entry_differs_from_a_wrongly_trained_one():
    """The comparison can fail: another seed of dropout is noticed."""
    from tests.training import compare_training

    def reseeded(model, args, kwargs):
        def call(*args, **kwargs):
            torch.manual_seed(0)
            return model(*args, **kwargs)

        return call

    assert compare_training(ZOO["shared_blocks"].make, reseeded, steps=1)


def test_the_zoo_is_large_enough():
    assert len(ZOO) >= 50
    assert sum(entry.fast for entry in ZOO.values()) >= 4
