import math

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from graphs.costs import DeviceSpec, device_spec, roofline
from graphs.costs.roofline import makes_view, op_bytes, op_flops, workspace_bytes
from tests.graphs.costs.nodes import call, fake

aten = torch.ops.aten
PLAIN = DeviceSpec("plain", {"float32": 1e12, "bfloat16": 4e12}, 1e11, 10**9, 100, "made up", 0.5, 0.5)


def time_ns(node, spec=PLAIN):
    return roofline([node], spec).time_ns[0]


def test_matrix_product_to_the_digit():
    node = call(aten.mm.default, fake(300, 400), fake(400, 500))
    assert op_flops(node) == 2 * 300 * 400 * 500
    assert op_bytes(node) == 4 * (300 * 400 + 400 * 500 + 300 * 500)
    assert time_ns(node) == math.ceil(2 * 300 * 400 * 500 / (1e12 * 0.5) * 1e9) + 100


def test_elementwise_is_bound_by_bytes():
    node = call(aten.add.Tensor, fake(1000, 1000), fake(1000, 1000))
    assert op_flops(node) == 0
    assert time_ns(node) == math.ceil(3 * 4_000_000 / (1e11 * 0.5) * 1e9) + 100


def test_dtype_decides_the_rate():
    def product(dtype):
        return call(aten.mm.default, fake(4096, 4096, dtype=dtype), fake(4096, 4096, dtype=dtype))

    flops = 2 * 4096**3
    assert time_ns(product(torch.bfloat16)) == math.ceil(flops / 2e12 * 1e9) + 100
    assert time_ns(product(torch.float32)) == math.ceil(flops / 0.5e12 * 1e9) + 100


def test_tensor_cores_serve_float32_only_where_the_user_allows_it(monkeypatch):
    node = call(aten.mm.default, fake(2048, 2048), fake(2048, 2048))
    strict = time_ns(node, "a100")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert time_ns(node, "a100") < strict / 4


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call(aten.add.Tensor, fake(8, 1000), fake(8, 1000, stride=(0, 1))), 4 * (8000 + 1000 + 8000)),
        (call(aten.mul.Tensor, *[fake(1000)] * 2), 4 * 2000),
        (call(aten.embedding.default, fake(50_000, 64), fake(10, dtype=torch.int64)), 2 * 4 * 640 + 80),
        (call(aten.gather.default, fake(100, 500), 1, fake(100, 1, dtype=torch.int64)), 2 * 400 + 800),
        (call(aten.copy_.default, fake(1000), fake(1000, dtype=torch.bfloat16)), 4000 + 2000),
        (call(aten.add_.Tensor, fake(1000), fake(1000)), 4000 * 3),
        (call(aten.fill_.Scalar, fake(1000), 0.0), 4000),
        (call(aten.zeros.default, [10, 10]), 400),
        (call(aten.empty.memory_format, [10, 10]), 0),
        (call(aten.cat.default, [fake(2, 3), fake(4, 3)]), 4 * 36),
        (call(aten.native_dropout.default, fake(1000), 0.5, True), 4000 + 4000 + 1000),
        (call(aten.add.Tensor, fake(0, 3), fake(0, 3)), 0),
    ],
    ids=lambda v: str(v.target) if isinstance(v, torch.fx.Node) else None,
)
def test_bytes_moved(node, expected):
    assert op_bytes(node) == expected


def test_convolution_and_attention_have_flops():
    convolution = call(
        aten.convolution.default, fake(2, 3, 16, 16), fake(8, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    assert op_flops(convolution) == 2 * (2 * 16 * 16) * 8 * 3 * 9
    q, k, v = (fake(2, 4, 128, 32) for _ in range(3))
    attention = call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    assert op_flops(attention) == 2 * (2 * 2 * 4 * 128 * 128 * 32)
    out, logsumexp = attention.meta["val"]
    arguments = (fake(2, 4, 128, 32), q, k, v, out, logsumexp, 0.0, True)
    backward = call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *arguments)
    assert op_flops(backward) == 5 * (2 * 2 * 4 * 128 * 128 * 32)


def test_grouped_queries_count_per_query_head():
    q, k, v = fake(2, 4, 128, 32), fake(2, 2, 128, 32), fake(2, 2, 128, 32)
    attention = call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    assert op_flops(attention) == 2 * (2 * 2 * 4 * 128 * 128 * 32)


def test_a_formula_that_fails_leaves_a_memory_bound_estimate(monkeypatch, caplog):
    def fail(*_, **__):
        raise AssertionError("unforeseen")

    monkeypatch.setitem(flop_registry, aten.mm, fail)
    node = call(aten.mm.default, fake(300, 400), fake(400, 500))
    assert time_ns(node) == math.ceil(op_bytes(node) / (1e11 * 0.5) * 1e9) + 100
    assert "aten.mm.default" in caplog.text
    assert "unforeseen" in caplog.text


def test_flash_backward_accumulates_in_float32_on_gpus_only():
    q, k, v = (fake(2, heads, 130, 40, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out, logsumexp = fake(2, 4, 130, 40, dtype=torch.bfloat16), fake(2, 4, 130)
    arguments = (out, q, k, v, out, logsumexp, 0.0, True)
    node = call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *arguments)
    accumulator = 2 * 4 * 256 * (64 + 1) * 4
    assert workspace_bytes(node, device_spec("h100")) == accumulator + 2 * (2 * 4 * 130 * 40 * 2)
    assert workspace_bytes(node, device_spec("cpu")) == 0


def test_views_and_ops_without_a_kernel_cost_nothing():
    x = fake(4, 6)
    nodes = [
        None,
        call(aten.t.default, x),
        call(aten.view.default, x, [24]),
        call(aten._unsafe_view.default, x, [24]),
        call(aten.split.Tensor, x, 2),
        call(aten.expand.default, fake(1, 6), [4, 6]),
    ]
    costs = roofline(nodes, "h100")
    assert costs.time_ns == costs.workspace_bytes == (0,) * 6
    assert (costs.device, costs.source) == ("h100-sxm", "roofline")
    assert not makes_view(aten.copy_.default)
    assert not makes_view(aten.clone.default)


def test_costs_come_in_op_order():
    small, large = (call(aten.exp.default, fake(n)) for n in (10, 10**6))
    costs = roofline([large, None, small, large], PLAIN)
    assert costs.time_ns == (time_ns(large), 0, time_ns(small), time_ns(large))
    assert costs.time_ns[0] > costs.time_ns[2] > 100
