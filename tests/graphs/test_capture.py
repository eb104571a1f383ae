"""Fake twins: nothing of the model is touched, copied or allocated."""

import copy

import torch
from torch import nn

from graphs._torch import FakeTensorMode
from graphs.capture import fake_inputs, fake_module, fake_step


def test_a_fake_module_has_the_names_shapes_and_flags_of_the_real_one():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    twin = fake_module(model, FakeTensorMode())
    for (name, real), (twin_name, fake) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert name == twin_name
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert type(twin) is type(model)


def test_tied_weights_stay_tied_and_gradients_are_left_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model(torch.ones(1, 4)).sum().backward()
    twin = fake_module(model, FakeTensorMode())
    assert twin[1].weight is twin[0].weight
    assert all(p.grad is None for p in twin.parameters())


def test_the_model_is_not_touched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with fake_step(model, (torch.ones(2, 4),), {}) as (twin, args, _):
        twin(*args)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_meta_models_and_nested_inputs():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    tensor = torch.empty(2, 4, device="meta")
    mode = FakeTensorMode()
    twin = fake_module(model, mode)
    args, kwargs = fake_inputs((tensor, {"again": [tensor, 3, None]}), {"flag": True}, mode)
    assert args[0] is args[1]["again"][0]
    assert args[1]["again"][1:] == [3, None]
    assert kwargs == {"flag": True}
    with mode:
        assert twin(args[0]).shape == (2, 4)
