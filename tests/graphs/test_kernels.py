import copy

import pytest
import torch
from torch import nn

from graphs._torch import FakeTensorMode
from graphs.kernels import as_executed, cpu_dropout, cpu_dropout_backward
from scheduler import schedule
from tests.graphs.costs.nodes import call, fake

aten = torch.ops.aten


def layouts():
    x = torch.randn(6, 40)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = float("inf"), float("nan"), 0.0, -0.0
    return {
        "contiguous": x,
        "double": x.double(),
        "half": x.bfloat16(),
        "transposed": x.t(),
        "expanded": x[:1].expand(6, 40),
        "strided": x[:, ::2],
        "empty": x[:0],
        "scalar": x[1, 1],
    }


def bits(x):
    return x.contiguous().view(torch.int8 if x.dim() else x.dtype)


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
def test_dropout_is_the_operator_bit_for_bit(name, p):
    x = layouts()[name]
    torch.manual_seed(1)
    expected, mask = aten.native_dropout.default(x, p, True)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    found = cpu_dropout(x, p, True)
    assert torch.equal(torch.get_rng_state(), after)
    for a, b in ((expected, found[0]), (mask, found[1])):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(bits(a), bits(b))
    scale = 1 / (1 - p)
    gradients = [op(x, mask, scale) for op in (aten.native_dropout_backward.default, cpu_dropout_backward)]
    assert torch.equal(bits(gradients[0]), bits(gradients[1]))


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(8, 24, 32),
        torch.randn(8, 32, 24).transpose(1, 2),
        torch.randn(24, 8, 32).transpose(0, 1),
        torch.randn(1, 24, 32).expand(8, 24, 32),
        torch.randn(8, 24, 64)[..., ::2],
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5).transpose(1, 2),
        torch.randn(8, 32, 24).bfloat16().transpose(1, 2),
    ],
    ids=lambda g: f"{g.dtype} {tuple(g.shape)} {g.stride()}",
)
@pytest.mark.parametrize("like", ["contiguous", "gradient"])
def test_the_backward_of_dropout_has_the_layout_that_is_traced(gradient, like):
    mask = torch.rand(gradient.shape) > 0.3
    if like == "gradient":
        mask = torch.empty_like(gradient, dtype=torch.bool).copy_(mask)
    found = cpu_dropout_backward(gradient, mask, 1.25)
    with FakeTensorMode() as mode:
        traced = aten.native_dropout_backward.default(mode.from_tensor(gradient), mode.from_tensor(mask), 1.25)
    assert found.stride() == traced.stride()
    assert torch.equal(found, aten.native_dropout_backward.default(gradient, mask, 1.25))


def test_dropout_before_a_transposition_trains():
    """Its incoming gradient is transposed, and what comes before it looks at its own as a matrix."""

    class TextConvolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop, self.outer = nn.Linear(16, 16), nn.Dropout(0.1), nn.Conv1d(16, 8, 3)

        def forward(self, x):
            return self.outer(self.drop(self.inner(x)).transpose(1, 2)).relu().amax(-1)

    torch.manual_seed(0)
    plain = TextConvolution()
    x, found = torch.randn(4, 12, 16), []
    for model in (plain, schedule(copy.deepcopy(plain), "1GB")):
        torch.manual_seed(1)
        model(x).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_dropout_in_evaluation_drops_nothing():
    x = torch.randn(8)
    before = torch.get_rng_state()
    output, _ = cpu_dropout(x, 0.5, False)
    assert torch.equal(output, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_devices_and_ops_run_what_the_graph_says():
    node = call(aten.native_dropout.default, fake(4), 0.5, True)
    assert as_executed(node, (1, 2)) == (cpu_dropout, (1, 2))
    node.meta["val"] = torch.empty(4, device="meta")
    assert as_executed(node, (1, 2)) == (aten.native_dropout.default, (1, 2))
    product = call(aten.mm.default, fake(2, 2), fake(2, 2))
    assert as_executed(product, ()) == (aten.mm.default, ())
