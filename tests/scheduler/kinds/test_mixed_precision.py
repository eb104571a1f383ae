"""Mixed precision: autocast in every position, its cache of cast weights, gradient scaling, low precision, complex."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from graphs.errors import UnsupportedModelError
from tests.scheduler.kinds.comparing import (
    FLOOR,
    UNLIMITED,
    Wave,
    bounded,
    compare,
    data,
    fresh,
    layers,
    trained,
)

__all__ = ["fresh"]

X = data(12, 16)


def cast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def called_under_autocast(model):
    """A step whose forward alone is in the context, as is usual."""
    with cast():
        output = model(X)
    output.square().sum().backward()
    return output


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
    """A weight used several times: eager casts it once per region, so that its gradients meet in the low precision."""

    def __init__(self, use):
        super().__init__()
        self.inner, self.use = nn.Linear(16, 16), use

    def forward(self, x):
        return self.use(self.inner, x).float()


def in_one_region(layer, x):
    with cast():
        for _ in range(4):
            x = layer(x).sin().exp()
    return x


def in_two_regions(layer, x):
    return in_one_region(layer, in_one_region(layer, x).tanh().float())


def in_nested_regions(layer, x):
    with cast():
        h = layer(x).sin().exp()
        with cast(enabled=False):
            h = layer(h.float()).tanh().exp()
        with cast():
            h = layer(h).sin()
        return layer(h)


def in_both_precisions(layer, x):
    h = layer(x).tanh()
    with cast():
        h = layer(layer(h).sin()).sin()
    return layer(layer(h.float()).tanh())


def with_results_named(layer, x):
    with cast():
        h = layer(x).sin()
        linear = layer(h)
        linear_1 = layer(linear.tanh())
    return layer(linear_1.float())


def in_other_modules(layer, x):
    attention = torch.nn.functional.multi_head_attention_forward
    with cast():
        for _ in range(2):
            weight, bias = layer.weight.repeat(3, 1), layer.bias.repeat(3)
            rows = x.unsqueeze(1)
            x, _ = attention(rows, rows, rows, 16, 2, weight, bias, None, None, False, 0.0, layer.weight, layer.bias)
            x = torch.addmm(layer.bias, x.squeeze(1), layer.weight).sin()
    return x


def without_cache(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return layer(layer(x).sin()).tanh()


def cast_by_hand(layer, x):
    with cast():
        x = layer(x).sin()
        x = nn.functional.linear(x, layer.weight.to(torch.bfloat16)) @ layer.weight.bfloat16()
        return layer(x)


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
@pytest.mark.parametrize(
    "use",
    [
        in_one_region,
        in_two_regions,
        in_nested_regions,
        in_both_precisions,
        with_results_named,
        in_other_modules,
        without_cache,
        cast_by_hand,
    ],
)
def test_weight_used_several_times(use, fraction):
    compare(lambda: Shared(use), trained(X), fraction=fraction, recomputes=False)


def test_frozen_weight_used_several_times():
    def build():
        model = Shared(in_one_region)
        model.inner.weight.requires_grad_(False)
        return model

    compare(build, trained(X), recomputes=False)


def test_weight_used_several_times_under_autocast_around_the_module():
    compare(lambda: Shared(lambda layer, x: layer(layer(x).sin().exp())), called_under_autocast, recomputes=False)


@pytest.mark.parametrize("fraction", [FLOOR, UNLIMITED])
def test_autocast_around_the_module(fraction):
    compare(Cast, called_under_autocast, fraction=fraction, recomputes=False)


@pytest.mark.parametrize("inside", ["on", "off", "nested"])
def test_autocast_inside_the_module(inside):
    compare(lambda: Cast(inside), trained(X), recomputes=False)


def test_off_inside_of_a_context_around_the_module_stays_off_in_the_backward():
    compare(lambda: Shared(in_nested_regions), called_under_autocast, recomputes=False)
    compare(lambda: Cast("off"), called_under_autocast, recomputes=False)


def test_backward_inside_the_context_of_what_ran_outside_is_refused():
    for context, inside in ((cast, "off"), (contextlib.nullcontext, None)):
        model = bounded(Cast(inside))
        with context():
            output = model(X)
        with cast(), pytest.raises(UnsupportedModelError, match=r"mm.* of .*outside of the context"):
            output.square().sum().backward()
        with cast(enabled=False):
            model(X).square().sum().backward()


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
