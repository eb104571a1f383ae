import pytest
import torch

from graphs.kernels import as_executed, cpu_dropout, cpu_dropout_backward
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
    assert gradients[0].stride() == gradients[1].stride()
    assert torch.equal(bits(gradients[0]), bits(gradients[1]))


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
