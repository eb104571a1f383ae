import dataclasses

import pytest

from solvers.brute_force import BruteForceSolver
from solvers.problem import Problem
from solvers.simulate import compute_order
from solvers.solution import Status
from solvers.store_all import StoreAllSolver
from solvers.strategies import (
    BlockCheckpoint,
    BlockSegments,
    EveryKthBlock,
    SelectiveAttention,
    SqrtSegments,
    attention_cores,
    blocks,
    checkpointed_order,
)
from solvers.validate import validate
from tests.problems import keep_all_peak, random_problem, training_chain

STRATEGIES = [
    BlockCheckpoint(),
    EveryKthBlock(),
    EveryKthBlock(k=3),
    BlockSegments(),
    BlockSegments(k=3),
    SqrtSegments(),
    SelectiveAttention(),
]
ROOMY = 10**6


def network(*ops: tuple[str, str, list[int]], backward: list[list[int]] = (), **changes) -> Problem:
    """Forward ops (module path, target, inputs by op) of one byte and 1 ns each, then backward ops by their inputs."""
    inputs = [sorted(i) for _, _, i in ops] + [sorted(i) for i in backward]
    problem = Problem.from_single_outputs([1] * len(inputs), [1] * len(inputs), inputs, ROOMY)
    named = dataclasses.replace(
        problem,
        forward_ops=len(ops),
        op_modules=tuple(path for path, _, _ in ops) + ("",) * len(backward),
        op_targets=tuple(target for _, target, _ in ops) + ("aten.mul.Tensor",) * len(backward),
    )
    return dataclasses.replace(named, **changes)


def layered(layers: int, *, budget: int = ROOMY) -> Problem:
    """``layers`` blocks of three ops in a row, and a backward that reads every activation, each last first."""
    parts = ("norm", "linear", "act")
    forward = [
        (f"net.layers.{i}.{part}", f"aten.{part}.default", [3 * i + j - 1] if i or j else [])
        for i in range(layers)
        for j, part in enumerate(parts)
    ]
    count = len(forward)
    backward = [sorted({count - 1 - i, count + i - 1}) for i in range(count)]
    return network(*forward, backward=backward).with_budget(budget)


def path_problem(*paths: str, targets: tuple[str, ...] = ()) -> Problem:
    """Forward ops in a row with the given module paths."""
    names = targets or tuple("aten.relu.default" for _ in paths)
    ops = [(path, target, [i - 1] if i else []) for i, (path, target) in enumerate(zip(paths, names, strict=True))]
    return network(*ops)


# Blocks


def test_blocks_are_the_numbered_children_with_all_below_them():
    found = blocks(layered(3))
    assert found == {"net.layers.0": (0, 1, 2), "net.layers.1": (3, 4, 5), "net.layers.2": (6, 7, 8)}


def test_ops_outside_of_blocks_are_in_none():
    problem = path_problem(
        "embed", "h.0.attn", "h.0.mlp.0", "h.0.mlp.1", "h.1.attn", "h.1.mlp.0", "h.1.mlp.1", "", "head"
    )
    assert blocks(problem) == {"h.0": (1, 2, 3), "h.1": (4, 5, 6)}


def test_stages_of_blocks_are_looked_into():
    paths = [f"stages.{s}.{b}.{part}" for s in range(2) for b in range(3) for part in ("conv", "norm")]
    assert list(blocks(path_problem(*paths))) == [f"stages.{s}.{b}" for s in range(2) for b in range(3)]


def test_a_block_that_holds_a_list_of_layers_is_a_block():
    paths = [f"layers.{i}.{part}" for i in range(2) for part in ("norm", "experts.0.up", "experts.1.up", "out")]
    assert list(blocks(path_problem(*paths))) == ["layers.0", "layers.1"]


def test_blocks_may_lie_in_several_containers():
    paths = ["down.0.conv", "down.1.conv", "middle.conv", "up.0.conv", "up.1.conv"]
    assert list(blocks(path_problem(*paths))) == ["down.0", "down.1", "up.0", "up.1"]


def test_children_that_have_little_in_common_are_no_blocks():
    targets = tuple(f"aten.{name}.default" for name in ("embedding", "norm", "linear", "norm", "linear", "softmax"))
    problem = path_problem("0.table", "1.0.a", "1.0.b", "1.1.a", "1.1.b", "2.act", targets=targets)
    assert blocks(problem) == {"1.0": (1, 2), "1.1": (3, 4)}


def test_single_layers_count_only_where_there_are_no_other_blocks():
    assert list(blocks(path_problem("net.0", "net.1", "net.2"))) == ["net.0", "net.1", "net.2"]
    mixed = path_problem("stem.0", "stem.1", "body.0.conv", "body.1.conv")
    assert list(blocks(mixed)) == ["body.0", "body.1"]


def test_without_blocks_every_forward_op_is_one():
    chain = training_chain(3)
    assert blocks(chain) == {"op 0": (0,), "op 1": (1,), "op 2": (2,)}
    assert list(blocks(path_problem("encoder", "decoder"))) == ["op 0 in encoder", "op 1 in decoder"]


def test_one_numbered_child_is_no_block():
    assert list(blocks(path_problem("only.0.a", "only.0.b")).values()) == [(0,), (1,)]


def test_backward_ops_are_in_no_block():
    problem = dataclasses.replace(layered(2), op_modules=layered(2).op_modules[:6] + ("net.layers.1",) * 6)
    assert all(op < 6 for ops in blocks(problem).values() for op in ops)


# What is recomputed, and when


def test_block_checkpoint_recomputes_each_block_right_before_its_backward():
    """Blocks (0 1 2) and (3 4 5); backward ops 6..11 read 5, 4, 3, 2, 1, 0. 5 and 2 leave their blocks: 2 is the
    input of the second block and stays; 5 is read by no other forward op, so that backward needs all of the block."""
    order = checkpointed_order(layered(2), BlockCheckpoint().segments(layered(2)))
    assert order == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 0, 1, 10, 11]


def test_a_segment_is_recomputed_only_as_far_as_backward_reads():
    ops = [("h.0.a", "x", []), ("h.0.b", "x", [0]), ("h.1.a", "x", [1]), ("h.1.b", "x", [2])]
    reads_first_of_each = network(*ops, backward=[[2], [0, 4]])
    order = checkpointed_order(reads_first_of_each, [(0, 1), (2, 3)])
    assert order == [0, 1, 2, 3, 2, 4, 0, 5]


def test_a_segment_that_backward_does_not_read_is_not_recomputed():
    ops = [("h.0.a", "x", []), ("h.0.b", "x", [0]), ("h.1.a", "x", [1])]
    problem = network(*ops, backward=[[2], [1, 3]])
    assert checkpointed_order(problem, [(0, 1)]) == [0, 1, 2, 3, 4]


def test_ops_that_must_not_be_recomputed_keep_their_outputs():
    problem = layered(2)
    pinned = dataclasses.replace(problem, recomputable=tuple(op not in (3, 0) for op in range(12)))
    solution = BlockCheckpoint().solve(pinned)
    assert compute_order(solution.steps) == (0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 1, 10, 11)
    validate(pinned, solution)


def test_what_lives_to_the_end_is_kept():
    problem = dataclasses.replace(layered(2), live_at_end=frozenset({5}))
    order = checkpointed_order(problem, BlockCheckpoint().segments(problem))
    assert order == [0, 1, 2, 3, 4, 5, 6, 3, 4, 7, 8, 9, 0, 1, 10, 11]


def test_segments_that_overlap_or_reach_into_backward_are_refused():
    with pytest.raises(ValueError, match="in two segments"):
        checkpointed_order(layered(2), [(0, 1), (1, 2)])
    with pytest.raises(ValueError, match="not in the forward"):
        checkpointed_order(layered(2), [(5, 6)])


def test_memory_is_that_of_the_strategy():
    """Store-all holds 12 activations and a gradient; per block 3 block inputs, a block and two gradients."""
    problem = layered(4)
    assert StoreAllSolver().solve(problem).peak_bytes == keep_all_peak(problem) == 13
    solution = BlockCheckpoint().solve(problem)
    validate(problem, solution)
    assert solution.peak_bytes == 3 + 3 + 1
    assert solution.step_time_ns == 24 + 3 * 2 + 3


# The strategies


def test_every_kth_block_begins_with_the_first():
    problem = layered(5)
    assert EveryKthBlock(k=2).segments(problem) == ((0, 1, 2), (6, 7, 8), (12, 13, 14))
    assert EveryKthBlock(k=1).segments(problem) == BlockCheckpoint().segments(problem)


def test_block_segments_join_consecutive_blocks():
    problem = layered(5)
    assert BlockSegments(k=2).segments(problem) == (tuple(range(6)), tuple(range(6, 12)), (12, 13, 14))
    assert BlockSegments(k=1).segments(problem) == BlockCheckpoint().segments(problem)
    assert BlockSegments(k=9).segments(problem) == (tuple(range(15)),)


@pytest.mark.parametrize(("layers", "segments"), [(2, 2), (4, 2), (9, 3), (10, 4), (16, 4), (17, 5)])
def test_sqrt_segments_are_about_as_many_as_blocks_in_each(layers, segments):
    assert len(SqrtSegments().segments(layered(layers))) == segments


def test_sqrt_segments_need_memory_like_the_root_of_the_layers():
    """Chen et al.: O(√n) memory for one more forward at most."""
    peaks = {n: SqrtSegments().solve(training_chain(n, budget_bytes=ROOMY)).peak_bytes for n in (16, 64, 256)}
    assert peaks[64] <= 2.2 * peaks[16]
    assert peaks[256] <= 2.2 * peaks[64]
    assert peaks[256] < keep_all_peak(training_chain(256)) / 6
    chain = training_chain(256, budget_bytes=ROOMY)
    assert SqrtSegments().solve(chain).step_time_ns <= chain.keep_all_time_ns + 256


@pytest.mark.parametrize("strategy", [EveryKthBlock, BlockSegments])
@pytest.mark.parametrize("k", [0, -1])
def test_a_k_below_one_is_refused(strategy, k):
    with pytest.raises(ValueError, match="at least 1"):
        strategy(k=k)


def attention(*, softmax: str = "aten._softmax.default", product: str = "aten.bmm.default") -> Problem:
    """One attention: 0 input, 1-3 projections, 4 scale, 5 scores, 6 mask, 7 add, 8 softmax, 9 dropout, 10 product with
    the values, 11 projection; backward reads as autograd does."""
    ops = [
        ("", "aten.embedding.default", []),
        ("h.0.attn", "aten.addmm.default", [0]),
        ("h.0.attn", "aten.addmm.default", [0]),
        ("h.0.attn", "aten.addmm.default", [0]),
        ("h.0.attn", "aten.mul.Scalar", [1]),
        ("h.0.attn", product, [4, 2]),
        ("h.0.attn", "aten.where.self", []),
        ("h.0.attn", "aten.add.Tensor", [5, 6]),
        ("h.0.attn", softmax, [7]),
        ("h.0.attn", "aten.native_dropout.default", [8]),
        ("h.0.attn", product, [9, 3]),
        ("h.0.attn", "aten.addmm.default", [10]),
    ]
    return network(*ops, backward=[[10, 11], [9, 3, 12], [8, 13], [4, 2, 14], [0, 15]])


@pytest.mark.parametrize("softmax", ["aten._softmax.default", "aten._safe_softmax.default"])
@pytest.mark.parametrize("product", ["aten.bmm.default", "aten.baddbmm.default"])
def test_the_core_of_attention_is_what_lies_between_the_two_products(softmax, product):
    problem = attention(softmax=softmax, product=product)
    assert attention_cores(problem) == ((5, 7, 8, 9, 10),)
    solution = SelectiveAttention().solve(problem)
    validate(problem, solution)
    assert compute_order(solution.steps) == (*range(12), 12, 5, 7, 8, 9, 13, 14, 15, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"softmax": "aten._log_softmax.default"},
        {"product": "aten.mul.Tensor"},
        {"product": "aten._scaled_dot_product_flash_attention.default"},
    ],
)
def test_other_softmaxes_and_fused_attention_are_left_alone(changes):
    problem = attention(**changes)
    solution = SelectiveAttention().solve(problem)
    assert attention_cores(problem) == ()
    assert solution.status is Status.OPTIMAL
    assert solution.step_time_ns == problem.keep_all_time_ns
    assert "0 segments" in solution.message


def test_without_targets_there_is_no_attention_to_see():
    assert attention_cores(dataclasses.replace(attention(), op_targets=())) == ()


def test_a_softmax_at_the_end_of_the_network_is_no_attention():
    ops = [("", "aten.bmm.default", []), ("", "aten._softmax.default", [0]), ("", "aten.sum.default", [1])]
    assert attention_cores(network(*ops, backward=[[1, 2]])) == ()


# Any strategy on any problem


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_plans_are_legal_and_figures_true_whatever_the_problem(strategy):
    for seed in range(60):
        problem = random_problem(seed).with_budget(ROOMY)
        solution = strategy.solve(problem)
        assert solution.status is (
            Status.OPTIMAL if solution.step_time_ns == problem.keep_all_time_ns else Status.FEASIBLE
        )
        assert solution.lower_bound_ns == problem.keep_all_time_ns
        assert solution.solver == strategy.name
        validate(problem, solution)
        best = BruteForceSolver().solve(problem.with_budget(solution.peak_bytes))
        assert best.step_time_ns <= solution.step_time_ns


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_the_budget_is_only_checked(strategy):
    problem = layered(9)
    peak = strategy.solve(problem).peak_bytes
    fits = strategy.solve(problem.with_budget(peak))
    assert fits.status.has_plan
    validate(problem.with_budget(peak), fits)
    misses = strategy.solve(problem.with_budget(peak - 1))
    assert misses.status is Status.INFEASIBLE
    assert not misses.steps
    assert misses.floor_bytes == peak
    assert f"peak {peak:,} bytes" in misses.message
    assert f"the budget is {peak - 1:,}" in misses.message


def test_strategies_recompute_something_here():
    """The problem above is one on which the strategies differ."""
    peaks = {repr(s): s.solve(layered(9)).peak_bytes for s in STRATEGIES[:-1]}
    assert len(set(peaks.values())) >= 4
    assert max(peaks.values()) < keep_all_peak(layered(9))
