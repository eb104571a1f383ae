"""Threads: several that call one scheduled module, and several scheduled modules at once."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch._dynamo
from torch import nn

from scheduler import plan_of
from scheduler._torch import capture_config
from tests.scheduler.kinds.comparing import Wave, bounded, data, fresh, layers

__all__ = ["fresh"]


def in_threads(*jobs):
    """Run the jobs at once, each in a thread; their results, or the first error."""
    results = [None] * len(jobs)
    ready = threading.Barrier(len(jobs))

    def work(i):
        torch.set_num_threads(1)
        ready.wait()
        try:
            results[i] = jobs[i]()
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread of the test
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def same(expected, actual):
    return all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_one_module_in_several_threads():
    """Two threads of the same shape, two of others: the numbers are those of one after the other."""
    torch.manual_seed(0)
    plain = layers()
    model = bounded(copy.deepcopy(plain))
    inputs = [data(n, 16, seed=i) for i, n in enumerate((12, 12, 8, 20))]
    expected = [gradients(plain, x) for x in inputs]
    for _ in range(2):
        found = in_threads(*[lambda x=x: gradients(model, x) for x in inputs])
        assert all(same(a, b) for a, b in zip(expected, found, strict=True))
    assert len(set(model._compiled_call_impl.settings.solver.chosen)) == 3
    assert not plan_of(model).is_noop


def test_several_modules_in_several_threads():
    torch.manual_seed(0)
    plain = [layers(), nn.Sequential(nn.Linear(16, 8), Wave(), nn.LayerNorm(8), nn.Linear(8, 8)), layers(8)]
    models = [bounded(copy.deepcopy(m)) for m in plain]
    inputs = [data(12, 16), data(9, 16), data(7, 8)]
    expected = [gradients(m, x) for m, x in zip(plain, inputs, strict=True)]
    before = torch._dynamo.config.get_hash()

    def job(model, x):
        return lambda: [gradients(model, x) for _ in range(3)]

    found = in_threads(*[job(m, x) for m, x in zip(models, inputs, strict=True)])
    assert all(same(a, b) for a, runs in zip(expected, found, strict=True) for b in runs)
    assert all(plan_of(m) is not None for m in models)
    assert torch._dynamo.config.get_hash() == before


def test_a_layer_with_a_substitute():
    """Its forward is replaced while a call runs, whichever thread leaves first.

    Running statistics that several threads update at once can lose updates, as they can without a schedule.
    """
    plain = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None), Wave())
    model = bounded(copy.deepcopy(plain))
    expected = gradients(plain, data(12, 16))
    found = in_threads(*[lambda: [gradients(model, data(12, 16)) for _ in range(3)]] * 3)
    assert all(same(expected, b) for runs in found for b in runs)
    assert "forward" not in model[1].__dict__
    assert 3 <= model[1].num_batches_tracked <= 9


@pytest.mark.parametrize("first_out", [0, 1])
def test_settings_are_per_thread_and_restored(first_out):
    """Entered and left in interleaved order; a thread beside them sees none of it."""
    config = torch._dynamo.config
    before = config.recompile_limit
    entered, leave = threading.Barrier(3), [threading.Event(), threading.Event()]
    seen = []

    def work(i):
        with capture_config():
            entered.wait()
            leave[i].wait()
            seen.append(config.recompile_limit)
        seen.append(config.recompile_limit)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    assert config.recompile_limit == before
    for i in (first_out, 1 - first_out):
        leave[i].set()
        threads[i].join()
    assert seen == [256, before, 256, before]
    assert config.recompile_limit == before
