"""Living with the module: state, copies, moves, averages, other modules and threads beside a scheduled one."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from scheduler import plan_of, schedule, unschedule
from tests.fuzz.budgets import Between
from tests.scheduler.kinds.comparing import UNLIMITED, Wave, bounded, compare, data, fresh, layers, trained

__all__ = ["fresh"]

X = data(12, 16)


def test_names_and_state():
    plain, model = layers(), bounded(layers())
    trained(X)(model)
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_load_state_dict_between_steps():
    state = {k: v + 0.1 for k, v in layers().state_dict().items()}

    def step(model):
        first = trained(X)(model)
        model.load_state_dict({k: v.clone() for k, v in state.items()})
        second = trained(X)(model)
        model.load_state_dict({k: v * 2 for k, v in state.items()}, assign=True)
        return first, second, trained(X)(model)

    compare(layers, step)


def test_swapped_weight_and_swapped_layer():
    def step(model):
        first = trained(X)(model)
        model[0].weight = nn.Parameter(data(32, 16, seed=3))
        second = trained(X)(model)
        model[2] = nn.Linear(32, 8)
        with torch.no_grad():
            for p in model[2].parameters():
                p.fill_(0.01)
        return first, second, trained(X)(model)

    compare(layers, step)


def test_weight_written_between_steps():
    def step(model):
        first = trained(X)(model)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        model[2].weight.data = model[2].weight.data + 1
        return first, trained(X)(model)

    compare(layers, step)


def test_the_copy_is_scheduled_too():
    model = bounded(layers(16, nn.Dropout(0.3)))
    trained(X)(model)
    model.zero_grad(set_to_none=True)
    twin = copy.deepcopy(model)
    plain = unschedule(copy.deepcopy(model))
    for m in (twin, plain):
        torch.manual_seed(1)
        trained(X)(m)
    assert plan_of(twin) is not None
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), twin.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_saved_whole_and_loaded():
    """A pickled module stays scheduled; the loaded one plans anew."""
    torch.manual_seed(0)
    model = schedule(layers(), "100TB", costs="roofline")
    trained(X)(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    model.zero_grad(set_to_none=True)
    loaded.zero_grad(set_to_none=True)
    trained(X)(model)
    trained(X)(loaded)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))
    assert plan_of(loaded) is not None


def test_moved_to_another_precision_after_planning():
    def step(model):
        first = trained(X)(model)
        model.zero_grad(set_to_none=True)
        model.to(torch.float64)
        return first, trained(X.double())(model)

    model = compare(layers, step)
    assert len(model._compiled_call_impl.settings.solver.chosen) == 2


def test_moved_to_another_device_and_back():
    def step(model):
        first = trained(X)(model)
        state = copy.deepcopy(model.state_dict())
        model.to("meta")
        model.to_empty(device="cpu")
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        return first, trained(X)(model)

    compare(layers, step)


def test_exponential_moving_average():
    def step(model):
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            optimizer.zero_grad()
            trained(data(12, 16, seed=i))(model)
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
        average.eval()
        with torch.no_grad():
            return average(X), [p.detach() for p in average.parameters()]

    compare(layers, step)


def test_train_and_eval():
    def step(model):
        results = []
        for mode in (True, False, True):
            model.train(mode)
            results.append(trained(X)(model))
        return results

    compare(lambda: layers(16, nn.Dropout(0.3), nn.BatchNorm1d(32), Wave()), step)


def test_two_scheduled_models_in_one_step():
    torch.manual_seed(0)
    plain = [layers(16, nn.Dropout(0.2)), nn.Sequential(nn.Linear(32, 16), Wave())]
    bounds = [bounded(copy.deepcopy(m)) for m in plain]
    for first, second in (plain, bounds):
        torch.manual_seed(2)
        output = second(first(X))
        output.square().sum().backward()
    for a, b in zip(plain, bounds, strict=True):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_submodule_only():
    def make():
        return nn.Sequential(nn.Linear(16, 16), layers(16, nn.Dropout(0.2)), nn.Linear(32, 4))

    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    bounded(model[1])
    for m in (plain, model):
        torch.manual_seed(2)
        trained(X)(m)
    assert plan_of(model[1]) is not None
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    with pytest.raises(ValueError, match="not scheduled"):
        plan_of(model)


def test_a_module_and_its_submodule():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), layers(16), nn.Linear(32, 4))
    model = copy.deepcopy(plain)
    bounded(model[1])
    bounded(model)
    for m in (plain, model):
        trained(X)(m)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_scheduling_twice_replaces():
    model = bounded(layers())
    trained(X)(model)
    first = plan_of(model)
    model.zero_grad(set_to_none=True)
    assert bounded(model, UNLIMITED) is model
    trained(X)(model)
    assert not first.is_noop
    assert plan_of(model).is_noop
    unschedule(model)
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("unscheduled", [False, True])
def test_a_module_that_nobody_holds_any_more_is_freed(unscheduled):
    model = layers(16, nn.Dropout(0.2))
    batch, optimizer = data(12, 16), torch.optim.SGD(model.parameters(), momentum=0.9)
    schedule(model, "100TB", solver=Between(), costs="roofline", optimizer=optimizer)
    model(batch).square().sum().backward()
    seen = [weakref.ref(x) for x in (model, batch, optimizer)]
    del batch
    gc.collect()
    assert seen[1]() is None  # the first batch, while the module lives
    if unscheduled:
        unschedule(model)
    del model, optimizer
    gc.collect()
    assert [x() for x in seen] == [None] * 3


def test_optimizer_is_counted_and_shared_between_plans():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule(model, "100TB", solver=Between(), costs="roofline", optimizer=optimizer)
    trained(X)(model)
    assert plan_of(model).static["optimizer"] >= 2 * sum(p.numel() * 4 for p in model.parameters())
