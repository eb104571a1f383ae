import torch
from torch import fx

from graphs._torch import packet_name
from graphs.costs import op_signature
from graphs.costs.signature import target_name
from tests.graphs.costs.nodes import call, fake

aten = torch.ops.aten


def test_says_op_shapes_strides_dtypes_and_devices():
    node = call(aten.mm.default, fake(4, 5), fake(5, 6, dtype=torch.float32, stride=(1, 5)))
    assert op_signature(node) == "aten.mm.default(float32[4,5;5,1]@cpu, float32[5,6;1,5]@cpu)"


def test_equal_calls_have_equal_keys_whatever_their_nodes_are_called():
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    first.meta["val"], second.meta["val"] = fake(3, 4), fake(3, 4)
    a = graph.call_function(aten.sum.dim_IntList, (first, [0], True))
    b = graph.call_function(aten.sum.dim_IntList, (second, [0], True))
    c = graph.call_function(aten.sum.dim_IntList, (second, [1], True))
    assert op_signature(a) == op_signature(b)
    assert op_signature(a) != op_signature(c)


def test_storage_offset_is_left_out():
    whole = fake(10, 4)
    assert op_signature(call(aten.exp.default, whole[2:6])) == op_signature(call(aten.exp.default, whole[4:8]))


def test_every_difference_that_chooses_a_kernel_changes_the_key():
    base = call(aten.add.Tensor, fake(4, 5), fake(4, 5))
    others = [
        call(aten.add.Tensor, fake(4, 6), fake(4, 6)),
        call(aten.add.Tensor, fake(4, 5), fake(1, 5)),
        call(aten.add.Tensor, fake(4, 5), fake(4, 5, stride=(1, 4))),
        call(aten.add.Tensor, fake(4, 5), fake(4, 5, dtype=torch.bfloat16)),
        call(aten.add.Tensor, fake(4, 5), fake(4, 5), alpha=2),
        call(aten.sub.Tensor, fake(4, 5), fake(4, 5)),
    ]
    assert len({op_signature(node) for node in (base, *others)}) == 7


def test_a_tensor_passed_twice_differs_from_two_tensors():
    x = fake(4, 5)
    assert op_signature(call(aten.mul.Tensor, x, x)) == "aten.mul.Tensor(float32[4,5;5,1]@cpu, #0)"
    assert op_signature(call(aten.mul.Tensor, x, fake(4, 5))) == (
        "aten.mul.Tensor(float32[4,5;5,1]@cpu, float32[4,5;5,1]@cpu)"
    )


def test_nested_lists_missing_values_and_keywords():
    cat = call(aten.cat.default, [fake(2, 3), fake(1, 3)], 0)
    assert op_signature(cat) == "aten.cat.default([float32[2,3;3,1]@cpu, float32[1,3;3,1]@cpu], 0)"
    index = call(aten.index.Tensor, fake(4, 5), [None, fake(2, dtype=torch.int64)])
    assert op_signature(index) == "aten.index.Tensor(float32[4,5;5,1]@cpu, [None, int64[2;1]@cpu])"
    full = call(aten.full.default, [2, 3], 1.5, dtype=torch.float32, device=torch.device("cpu"))
    assert op_signature(full) == "aten.full.default([2, 3], 1.5, device=device(cpu), dtype=torch.float32)"


def test_names_of_targets():
    assert target_name(aten.mm.default) == "aten.mm.default"
    assert packet_name(aten.mm.default) == "aten.mm"
    assert target_name(getattr) == "builtins.getattr"
    assert packet_name(getattr) == ""
