"""Mixed precision: autocast in every position, its cache of cast weights, gradient scaling, low precision, complex."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.scheduler.kinds.comparing import (
    FLOOR,
    UNLIMITED,
    Wave,
    bounded,
    compare,
    data,
    fresh,
    layers,
    observe,
    trained,
)

__all__ = ["fresh"]

X = data(12, 16)


def cast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Cast(nn.Module):
    """Two layers, of which ``inside`` puts the second in a context of the forward's own, or both, one in another."""

    def __init__(self, inside=None):
        super().__init__()
        self.inner, self.outer, self.inside = nn.Linear(16, 16), nn.Linear(16, 16), inside

    def forward(self, x):
        if self.inside == "nested":
            with cast():
                h = self.inner(x).sin().exp()
                with cast(enabled=False):
                    return self.outer(h.float()).tanh().exp()
        h = self.inner(x).sin().exp()
        if self.inside is None:
            return self.outer(h).tanh().exp().float()
        with cast(self.inside == "on"):
            return self.outer(h.float()).tanh().exp().float()


class Shared(nn.Module):
    """A weight used twice: eager casts it once, so that its gradients meet in the low precision."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        with cast():
            return self.inner(self.inner(x).sin().exp()).tanh().exp().float()


def test_weight_used_twice_agrees_to_the_low_precision():
    torch.manual_seed(0)
    plain = Shared()
    torch.manual_seed(0)
    model = bounded(Shared())
    expected, actual = observe(plain, trained(X)), observe(model, trained(X))
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0.02, atol=0.02 * float(value.abs().max()), msg=name)


@pytest.mark.xfail(
    strict=True,
    reason="tracing turns the cache of cast weights off: both gradients are summed in the weight's precision",
)
def test_weight_used_twice_agrees_bit_for_bit():
    compare(Shared, trained(X), recomputes=False)


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_autocast_around_the_module(fraction):
    def step(model):
        with cast():
            output = model(X)
        output.square().sum().backward()
        return output

    compare(Cast, step, fraction=fraction, recomputes=False)


@pytest.mark.parametrize("inside", ["on", "off", "nested"])
def test_autocast_inside_the_module(inside):
    compare(lambda: Cast(inside), trained(X), recomputes=False)


def test_autocast_outside_and_off_inside():
    def step(model):
        with cast():
            return trained(X)(model)

    compare(lambda: Cast("off"), step, recomputes=False)


def test_backward_inside_the_context():
    def step(model):
        with cast():
            return trained(X)(model)

    compare(Cast, step, recomputes=False)


def test_full_precision_call_after_one_under_autocast():
    def step(model):
        with cast():
            low = model(X)
        low.float().square().sum().backward()
        high = trained(X)(model)
        with cast():
            again = trained(X)(model)
        return low, high, again

    model = compare(Cast, step, recomputes=False)
    assert model(X).dtype == torch.float32


def test_cache_of_cast_weights_is_not_stale_after_an_optimizer_step():
    def step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        results = []
        with cast():
            results += [trained(data(12, 16, seed=seed))(model) for seed in range(3)]
        optimizer.step()
        optimizer.zero_grad()
        with cast():
            results.append(trained(X)(model))
        return results

    compare(Cast, step, recomputes=False)


def test_gradient_scaler():
    def step(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scales = []
        for seed in range(3):
            optimizer.zero_grad()
            with cast():
                loss = model(data(12, 16, seed=seed)).float().square().mean()
            scaler.scale(loss * (float("inf") if seed == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in model.parameters()]

    compare(Cast, step, recomputes=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_precision(dtype):
    compare(lambda: layers(16, nn.Dropout(0.1)).to(dtype), trained(X.to(dtype)))


def test_weights_of_mixed_precision():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(16, 16).to(torch.bfloat16), nn.Linear(16, 16)

        def forward(self, x):
            return self.high(self.low(x.to(torch.bfloat16)).sin().exp().float()).tanh().exp()

    compare(Mixed, trained(X))


class Complex(nn.Module):
    """A spectral layer: real to complex and back."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.view_as_complex(data(9, 2, seed=4)))

    def forward(self, x):
        spectrum = torch.fft.rfft(self.inner(x).sin().exp()) * self.weight
        return torch.fft.irfft(spectrum * spectrum.abs(), n=16).tanh().exp()


def test_complex_numbers():
    compare(Complex, trained(X))


def test_low_precision_wave():
    compare(
        lambda: nn.Sequential(nn.Linear(16, 16), Wave(), nn.LayerNorm(16)).to(torch.bfloat16), trained(X.bfloat16())
    )
