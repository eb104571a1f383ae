"""State: buffers move once per call, and a recompute never reads a value that was written after the first execution."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from scheduler import CheckpointSchedulerError, schedule
from tests.scheduler.kinds.comparing import MIDDLE, Wave, bounded, compare, data, fresh, layers, observe, trained

__all__ = ["fresh"]

X = data(12, 16)


def several(*seeds):
    """A step of several forwards and backwards."""
    return lambda model: [trained(data(12, 16, seed=s))(model) for s in seeds]


@pytest.mark.parametrize("fraction", [0.0, MIDDLE])
@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
def test_batch_norm(momentum, fraction):
    def make():
        return layers(16, nn.BatchNorm1d(32, momentum=momentum), Wave(), nn.BatchNorm1d(32, affine=False))

    def step(model):
        results = several(0, 1)(model)
        with torch.no_grad():
            results.append(model(X))  # in train mode: the statistics move
        model.eval()
        results.append(model(X))
        model.train()
        return results, several(2)(model)

    if momentum is None:  # cumulative averages agree to the last rounding
        compare_rounding(make, several(0, 1))
    else:
        compare(make, step, fraction=fraction, recomputes=fraction == 0.0)


def compare_rounding(make, step):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = bounded(make())
    expected, actual = observe(plain, step), observe(model, step)
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None
        else:
            torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-6)


def test_other_normalisations_with_statistics():
    compare(
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.InstanceNorm1d(8, track_running_stats=True), Wave()),
        trained(data(4, 4, 32)),
    )


def test_spectral_norm():
    compare(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 32)), Wave(), nn.Linear(32, 16), Wave()),
        several(0, 1, 2),
        recomputes=False,
    )


def test_spectral_norm_as_a_hook():
    compare(
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 32)), Wave(), nn.Linear(32, 16), Wave()),
        several(0, 1, 2),
    )


def test_weight_norm():
    compare(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 32)), Wave(), nn.Linear(32, 16), Wave()),
        several(0, 1),
    )


class Codebook(nn.Module):
    """Vector quantisation with an exponential moving average of the codes: read, selected from, written."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 8)
        self.register_buffer("codes", data(6, 8, seed=9))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x):
        h = self.inner(x).sin().exp()
        nearest = torch.cdist(h.detach(), self.codes).argmin(-1)
        quantised = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 6).to(h.dtype)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(chosen.t() @ h / (chosen.sum(0).unsqueeze(1) + 1), alpha=0.1)
        return (h + (quantised - h).detach()).tanh().exp() + (h - quantised).square()


def test_codebook_of_moving_averages():
    compare(Codebook, several(0, 1, 2))


class Reassigned(nn.Module):
    """A buffer that is replaced rather than written."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        h = (self.inner(x) * self.scale).sin().exp()
        self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        return (h * self.scale).tanh().exp()


def test_buffer_that_is_reassigned():
    compare(Reassigned, several(0, 1, 2))


class Counter(nn.Module):
    """A counter in a tensor, read before and after it is moved; its value scales what is computed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        before = self.inner(x * self.count).sin().exp()
        self.count += 1
        return (before * self.count).tanh().exp()


class ThroughView(Counter):
    """Statistics that are read through a view and then written to through another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("statistics", torch.ones(16))

    def forward(self, x):
        h = self.inner(x).sin().exp()
        h = (h * self.statistics.view(1, 16).exp()).tanh().exp()
        with torch.no_grad():
            self.statistics[:8] += h.mean(0)[:8]
            self.statistics.view(2, 8)[1].mul_(0.5)
        return (h * self.statistics.view(1, 16).sin()).exp()


def test_buffer_read_and_written_through_views():
    compare(ThroughView, several(0, 1, 2))


def test_counter_in_a_buffer():
    compare(Counter, several(0, 1, 2))


class PlainCounter(nn.Module):
    """A Python number that the forward changes and reads."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (self.inner(x) * (1.0 + self.calls)).sin().exp()


def test_counter_that_is_a_python_number():
    model = compare(PlainCounter, several(0, 1, 2), recomputes=False)
    assert model.calls == 3


class Router(nn.Module):
    """Mixture of experts whose routing bias is updated after it was read (as in loss-free balancing)."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        _, chosen = (scores + self.bias).topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        with torch.no_grad():
            load = torch.zeros(4).index_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
            self.bias.add_(0.3 * (load.mean() - load).sign())
        return sum(weights[:, i : i + 1] * expert(x).sin().exp() for i, expert in enumerate(self.experts))


def test_routing_bias_updated_after_it_was_read():
    compare(Router, several(0, 1, 2))


class Scaled(nn.Module):
    """Delayed scaling as in FP8 training: the scale comes from a history of maxima, which moves once per forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("history", torch.full((4,), 2.0))

    def forward(self, x):
        h = self.inner(x).sin().exp()
        scale = 8.0 / self.history.max()
        rounded = h + ((h * scale).round() / scale - h).detach()
        with torch.no_grad():
            self.history.copy_(torch.roll(self.history, 1))
            self.history[0] = h.abs().max()
        return self.outer(rounded.tanh()).sin().exp() / scale


def test_scale_from_a_history_of_maxima():
    compare(Scaled, several(0, 1, 2))


def test_buffer_overwritten_outside_between_forward_and_backward():
    """Backward sees the buffer of the forward, or raises as eager does; never the new value in silence."""

    def step(model):
        output = model(X)
        model.count += 5
        try:
            output.square().sum().backward()
        except RuntimeError:
            return "raised"
        return output

    class Multiplied(Counter):
        def forward(self, x):
            return (self.inner(x) * self.count).sin().exp()

    compare(Multiplied, step, recomputes=False)


def test_batch_norm_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            return self.norm(self.norm(self.inner(x)).sin().exp()).tanh().exp()

    compare(Twice, several(0, 1))


@torch.library.custom_op("kinds::noisy_double", mutates_args=())
def noisy_double(x: torch.Tensor) -> torch.Tensor:
    """An opaque kernel whose result differs from call to call."""
    CALLS.append(1)
    return x * (2.0 + 0.001 * len(CALLS))


CALLS: list[int] = []
noisy_double.register_fake(lambda x: torch.empty_like(x))
noisy_double.register_autograd(lambda ctx, grad: grad * 2.0)


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.outer(torch.ops.kinds.noisy_double(self.inner(x).sin()).exp()).tanh().exp()


def test_custom_op_runs_once():
    """Not known to give the same result twice: it is kept."""

    def step(model):
        CALLS.clear()
        result = trained(X)(model)
        assert len(CALLS) == 1
        return result

    compare(Opaque, step)


class Selecting(nn.Module):
    """Selections among many equal values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        h = self.inner(x).sin().round(decimals=1)
        top, where = h.topk(5, -1)
        ordered, order = h.sort(-1)
        best = h.argmax(-1)
        return (
            (top.exp() * ordered[:, :5].cos()).tanh()
            + x.gather(1, where) * h.gather(1, order)[:, :5]
            + (best.unsqueeze(1) * h[:, :5]).sin()
        )


def test_selections_among_ties_are_kept():
    model = compare(Selecting, trained(X.requires_grad_(requires_grad=True)))
    graph = model.backward_graph.print_readable(print_output=False)
    assert not any(f"aten.{name}" in graph for name in ("topk", "sort", "argmax"))


def test_what_cannot_hold_is_refused():
    class Data(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return self.inner(x[x[:, 0] > 0]).sin().exp()

    with pytest.raises(CheckpointSchedulerError, match=r"data|graph"):
        compare(Data, trained(data(12, 16)))


class Checkpointed(nn.Module):
    """Its first layers under ``torch.utils.checkpoint``, or not."""

    def __init__(self, norm, *, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(16, 32), norm(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16))
        self.outer, self.checkpointed = nn.Linear(16, 1), checkpointed

    def forward(self, x):
        hidden = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.outer(hidden).mean()


def test_buffers_written_in_a_checkpoint_are_written_once_and_said_to_be(caplog):
    """The plan takes the checkpoint's place: the model trains as without it, where plain training writes twice."""
    plain = Checkpointed(nn.BatchNorm1d, checkpointed=False)
    scheduled = schedule(Checkpointed(nn.BatchNorm1d, checkpointed=True), "1GB")
    for seed in range(2):
        for model in (plain, scheduled):
            torch.manual_seed(seed)
            model(X).backward()
    for a, b in zip(plain.parameters(), scheduled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), scheduled.buffers(), strict=True):
        assert torch.equal(a, b)
    assert "torch.utils.checkpoint in inner.1" in caplog.text


def test_a_checkpoint_without_buffers_is_plain_training(caplog):
    plain = Checkpointed(nn.LayerNorm, checkpointed=True)
    scheduled = schedule(copy.deepcopy(plain), "1GB")
    states = []
    for model in (plain, scheduled):
        torch.manual_seed(1)
        model(X).backward()
        states.append(torch.get_rng_state())
    for a, b in zip(plain.parameters(), scheduled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(*states)
    assert "torch.utils.checkpoint" not in caplog.text
