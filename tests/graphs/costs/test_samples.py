import pytest
import torch

from graphs.costs.samples import CannotSampleError, Sampler
from tests.graphs.costs.nodes import call, fake

aten = torch.ops.aten
CPU = torch.device("cpu")


def sample(node):
    return Sampler(CPU, retarget=False).arguments(node)


def test_shapes_strides_and_dtypes_are_those_of_the_graph():
    node = call(aten.add.Tensor, fake(4, 5, stride=(1, 4)), fake(4, 5, dtype=torch.float64, stride=(0, 1)), alpha=3)
    (a, b), kwargs = sample(node)
    assert (a.shape, a.stride(), a.dtype) == ((4, 5), (1, 4), torch.float32)
    assert (b.shape, b.stride(), b.dtype) == ((4, 5), (0, 1), torch.float64)
    assert b.untyped_storage().nbytes() == 5 * 8  # no more than the op needs
    assert kwargs == {"alpha": 3}


def test_floats_are_probabilities_and_booleans_are_mixed():
    node = call(aten.where.self, fake(2000, 1000, dtype=torch.bool), fake(2000, 1000), fake(1, dtype=torch.bfloat16))
    (mask, values, _), _ = sample(node)
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert values[-1].unique().numel() > 900
    assert 0.45 < mask.float().mean() < 0.55


def test_the_same_node_is_the_same_tensor():
    x = fake(3)
    (a, b), _ = sample(call(aten.mul.Tensor, x, x))
    assert a is b


def indices(*size):
    return fake(*size, dtype=torch.int64)


@pytest.mark.parametrize(
    ("node", "position", "bound"),
    [
        (call(aten.embedding.default, fake(17, 4), indices(50, 8)), 1, 17),
        (call(aten.embedding_dense_backward.default, fake(50, 8, 4), indices(50, 8), 17, -1, False), 1, 17),
        (call(aten.gather.default, fake(3, 17), 1, indices(3, 200)), 2, 17),
        (call(aten.scatter.src, fake(17, 200), 0, indices(5, 200), fake(5, 200)), 2, 17),
        (call(aten.index_select.default, fake(3, 17), -1, indices(200)), 2, 17),
        (call(aten.nll_loss_forward.default, fake(200, 17), indices(200), None, 1, -100), 1, 17),
        (
            call(aten.nll_loss_backward.default, fake(), fake(200, 17), indices(200), None, 1, -100, fake()),
            2,
            17,
        ),
        (call(aten.index.Tensor, fake(3, 17), [None, indices(200)]), (1, 1), 17),
        (
            call(
                aten.max_pool2d_with_indices_backward.default,
                fake(2, 3, 8, 8),
                fake(2, 3, 16, 16),
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                False,
                indices(2, 3, 8, 8),
            ),
            7,
            256,
        ),
    ],
    ids=lambda v: str(v.target) if isinstance(v, torch.fx.Node) else None,
)
def test_indices_are_spread_over_the_valid_range_and_the_op_runs(node, position, bound):
    args, kwargs = sample(node)
    drawn = args[position[0]][position[1]] if isinstance(position, tuple) else args[position]
    assert drawn.min() >= 0
    assert bound // 2 < drawn.max() < bound
    node.target(*args, **kwargs)


def test_integers_that_index_nothing_are_zero_and_divisors_one():
    (a, b), _ = sample(call(aten.add.Tensor, indices(5), indices(5)))
    assert a.count_nonzero() == b.count_nonzero() == 0
    (_, divisor), _ = sample(call(aten.remainder.Tensor, indices(5), indices(5)))
    assert divisor.tolist() == [1] * 5


def test_eight_bit_and_complex_numbers():
    (a,), _ = sample(call(aten.clone.default, fake(100, dtype=torch.float8_e4m3fn)))
    (b,), _ = sample(call(aten.clone.default, fake(100, dtype=torch.complex64)))
    assert a.float().unique().numel() > 10
    assert b.real.unique().numel() > 90
    assert b.imag.unique().numel() > 90


def test_empty_tensors_and_scalars():
    (a, b), _ = sample(call(aten.add.Tensor, fake(0, 3), fake()))
    assert a.shape == (0, 3)
    assert b.shape == ()


def test_global_generator_is_not_used():
    before = torch.random.get_rng_state()
    sample(call(aten.embedding.default, fake(17, 4), indices(50, 8)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_is_not_known_is_refused_by_name():
    node = call(aten.exp.default, fake(3))
    del node.args[0].meta["val"]
    with pytest.raises(CannotSampleError, match="arg0"):
        sample(node)
