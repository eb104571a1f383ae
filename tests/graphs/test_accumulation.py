"""Sums of gradients are added in place, only where nobody else can see it."""

import copy

import torch
from torch import nn
from torch.nn import functional

from graphs.ir import Phase
from scheduler import measure_peak, schedule
from tests.capturing import capture_of


class Tied(nn.Module):
    """An embedding that is also the head: two gradients of its size are summed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(3000, 32)
        self.body = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = hidden + self.body(hidden)
        return functional.cross_entropy((hidden @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


def tokens():
    return torch.randint(0, 3000, (2, 8), generator=torch.Generator().manual_seed(0))


def test_the_sum_allocates_nothing_and_what_it_adds_to_runs_once():
    graph = capture_of(Tied(), tokens()).graph
    sums = [o for o in graph.ops if o.target == "aten.add_.Tensor"]
    assert sums
    for op in sums:
        assert op.phase is Phase.BACKWARD
        assert op.outputs == ()
        assert not op.recomputable
        assert any(not graph.ops[graph.storages[i].producer].recomputable for i in op.inputs)


def test_the_operand_made_last_takes_the_sum_and_only_that_is_pinned():
    graph = capture_of(Tied(), tokens()).graph
    chosen = 0
    for op in (o for o in graph.ops if o.target == "aten.add_.Tensor"):
        made = sorted((i for i in op.inputs if graph.storages[i].producer is not None), key=_producer_in(graph))
        assert graph.storages[made[-1]].pinned == "written to again after it is made"
        if len(made) == 2 and not graph.storages[made[0]].pinned:
            assert graph.ops[graph.storages[made[0]].producer].recomputable
            chosen += 1
    assert chosen


def _producer_in(graph):
    return lambda i: graph.storages[i].producer


def test_views_of_a_sum_are_no_ops():
    graph = capture_of(Tied(), tokens()).graph
    assert not [
        o.target for o in graph.ops if o.target in ("aten.view.default", "aten.t.default", "aten.expand.default")
    ]


def test_tied_gradients_have_the_bits_of_plain_training_and_less_memory():
    plain, x = Tied(), tokens()
    scheduled = schedule(copy.deepcopy(plain), 1, costs="roofline")
    peaks = [measure_peak(lambda m=m: m(x).backward(), resident=[m, x]).peak_bytes for m in (plain, scheduled)]
    for p, q in zip(plain.parameters(), scheduled.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert peaks[1] <= peaks[0] - 0.99 * plain.embedding.weight.nbytes  # an activation of 2 kB lives on
    assert abs(peaks[1] - scheduled.plan.peak_bytes) <= 0.01 * scheduled.plan.peak_bytes


def test_a_gradient_that_somebody_else_reads_is_left_alone():
    class Shared(nn.Module):
        """The gradient of ``a`` is also that of ``b``: it must survive the sum."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x):
            a = self.w * x
            b = a + x
            return (a * b).sum() + b.sum(), x

    plain, x = Shared(), torch.randn(64, requires_grad=True)
    scheduled = schedule(copy.deepcopy(plain), 1, costs="roofline")
    gradients = []
    for model in (plain, scheduled):
        x.grad = None
        model(x)[0].backward()
        gradients.append((model.w.grad, x.grad.clone()))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
