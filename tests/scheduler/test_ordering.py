"""Steps planned in another order of their ops: real training, reports, saved plans, and where the order stays."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

from graphs.errors import GraphFormatError
from graphs.links import parse_link
from graphs.order import capture_in_order, check_order
from scheduler import Plan, PlanMismatch, measure_peak, minimum_budget, plan, plan_of, schedule
from scheduler.cli.compare import differing
from scheduler.cli.figures import plan_figures
from scheduler.errors import PlanFormatError
from scheduler.export.modules import module_plan
from scheduler.export.sac import saved_occurrences
from scheduler.ordering import LEAST_SHARE
from scheduler.replan import in_lower_order_of, least_budget, replan, sweep
from scheduler.report.html import render_html
from solvers.simulate import simulate
from solvers.solution import Compute, Free, Offload, Prefetch
from solvers.store_all import store_all_steps
from solvers.validate import validate
from tests.capturing import capture_of
from tests.models import Case, make_heads, make_mlp
from tests.orders import random_order
from tests.planning import TIME_LIMIT_S, ScheduledRun, assert_peak, exactly, run_under
from tests.scheduler.kinds.comparing import fresh
from tests.training import TrainingOptions, differences, train

__all__ = ["fresh"]


@functools.cache
def planned(budget: str | None = None) -> Plan:
    """A plan of the heads under a budget, or keep-all."""
    case = make_heads()
    return plan(case.model, budget, *case.make_batch(0), time_limit_s=TIME_LIMIT_S)


@functools.cache
def peaks() -> tuple[int, int]:
    """Keep-all peaks of the heads in the better and in the plain order."""
    keep_all = planned()
    return in_lower_order_of(keep_all).keep_all_peak_bytes, keep_all.keep_all_peak_bytes


def between(share: float = 0.5) -> str:
    """A budget between the two peaks."""
    low, high = peaks()
    return exactly(low + round(share * (high - low)))


@functools.cache
def below_both() -> int:
    """A budget below both peaks, in bytes."""
    return (least_budget(planned(), time_limit_s=2).bytes + peaks()[0]) // 2


@functools.cache
def run(budget: str) -> ScheduledRun:
    return run_under(make_heads, budget)


def test_a_better_order_takes_much_less():
    low, high = peaks()
    assert low < 0.6 * high
    assert planned().graph.order == ()


@pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_between_the_peaks_the_order_alone_meets_the_budget(share):
    seen = run(between(share))
    assert seen.differences == []
    assert seen.plan.graph.order
    assert seen.plan.is_noop
    assert seen.plan.overhead == seen.plan.gap == 0.0
    assert seen.plan.keep_all_peak_bytes == pytest.approx(peaks()[0], rel=0.01)
    assert seen.plan.plain_peak_bytes == pytest.approx(peaks()[1], rel=0.01)
    for measured in seen.peaks:
        assert_peak(measured, seen.plan)


def test_below_both_peaks_it_recomputes_too():
    seen = run(exactly(below_both()))
    assert seen.differences == []
    assert seen.plan.graph.order
    assert not seen.plan.is_noop
    for measured in seen.peaks:
        assert_peak(measured, seen.plan)


def test_where_the_plain_step_fits_nothing_moves():
    made = planned(exactly(peaks()[1]))
    assert made.is_noop
    assert made.graph.order == ()
    assert made.plain_peak_bytes == made.keep_all_peak_bytes == peaks()[1]


def test_one_byte_less_than_the_plain_peak_moves_ops():
    made = planned(exactly(peaks()[1] - 1))
    assert made.is_noop
    assert sorted(made.graph.order) == list(range(len(made.graph.ops)))
    assert made.graph.captured.fingerprint == planned().graph.fingerprint != made.graph.fingerprint
    figures = simulate(made.captured_problem, store_all_steps(made.captured_problem))
    assert figures.peak_bytes == made.plain_peak_bytes == peaks()[1]


def test_a_step_without_a_better_order_keeps_its_own():
    case = make_mlp()
    args, kwargs = case.make_batch(0)
    keep_all = plan(case.model, None, args, kwargs)
    assert in_lower_order_of(keep_all) is keep_all
    made = plan(case.model, exactly(keep_all.keep_all_peak_bytes - 1), args, kwargs)
    assert made.graph.order == ()
    assert made.plain_peak_bytes == made.keep_all_peak_bytes
    assert "order of" not in made.summary(200).split("step time")[0]


# --- what runs ------------------------------------------------------------------------------------------------------


class Effects(nn.Module):
    """Draws, buffers, in-place ops on activations and inputs of several readers, sums of gradients, a custom op."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        first = self.dropout(self.norm(a)).relu_()
        self.count[:2] += 1
        noise = torch.rand_like(b) + torch.randn(64)
        b = b * noise
        seen = self.count.clone()
        b.mul_(3).add_(seen.sum())
        self.count.mul_(1.5)
        second = self.norm(b + a)
        tops = second.topk(4, dim=1).values
        y = self.c(first * second) + self.c(first) + self.c(self.dropout(second)) + tops.sum() * self.count.sum()
        return y, a.exp().sum()


def make_effects() -> Case:
    torch.manual_seed(0)
    model = Effects()

    def make_batch(seed):
        return (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)),), {}

    return Case(model, make_batch, lambda outputs: outputs[0].square().sum() + outputs[1])


def in_order(keep_all: Plan, order: tuple[int, ...]) -> Plan:
    """The keep-all plan in an order."""
    step = keep_all.step.in_order(order)
    problem = step.problem_like(keep_all.problem)
    steps = store_all_steps(problem)
    solution = dataclasses.replace(
        keep_all.solution, steps=steps, peak_bytes=simulate(problem, steps).peak_bytes, lower_bound_ns=0
    )
    return dataclasses.replace(keep_all, graph=step.graph, costs=step.costs, solution=solution)


@pytest.mark.parametrize(("make", "seed"), [(make_heads, 0), *((make_effects, seed) for seed in range(2))])
def test_every_legal_order_gives_the_numbers_of_plain_training(make, seed):
    case = make()
    keep_all = plan(case.model, None, *case.make_batch(0))
    order = random_order(keep_all.graph, seed)
    assert sum(a != b for a, b in enumerate(order)) > len(order) / 4
    given = in_order(keep_all, order)
    assert max(peaks_of_training(make, given)) <= given.peak_bytes * 1.01


def peaks_of_training(make, given: Plan) -> list[int]:
    """Train under a given plan, and plainly with the same numbers; measured peaks of the steps under the plan."""
    measured = []

    def wrap(model, args, kwargs):
        return schedule(model, plan=given)

    def run_step(step, resident):
        measured.append(measure_peak(step, resident=resident).peak_bytes)

    options = TrainingOptions()
    assert differences(train(make, None, options), train(make, wrap, options, run_step=run_step)) == []
    return measured


@pytest.mark.slow
def test_copies_to_the_host_in_another_order():
    made = dataclasses.replace(planned(between()), link=parse_link("1GB/s"), host_bytes=10**9)
    problem, steps = made.problem, list(made.steps)
    boundary = problem.forward_ops
    moved = max(
        (s for s in problem.movable if problem.readers[s][-1] >= boundary), key=lambda s: (problem.storage_bytes[s], -s)
    )
    early = [op for op in problem.readers[moved] if op < boundary]
    late = [op for op in problem.readers[moved] if op >= boundary]
    steps.insert(steps.index(Compute(late[0])), Prefetch(moved))
    after = steps.index(Compute(early[-1] if early else problem.producer[moved])) + 1
    steps[after:after] = [Offload(moved), Free(moved)]
    figures = simulate(problem, steps)
    solution = dataclasses.replace(
        made.solution, steps=tuple(steps), peak_bytes=figures.peak_bytes, step_time_ns=figures.step_time_ns
    )
    validate(problem, solution)
    peaks_measured = peaks_of_training(make_heads, dataclasses.replace(made, solution=solution))
    assert peaks_measured[-1] == pytest.approx(figures.peak_bytes, rel=0.01)  # the first one makes the host's buffers


@pytest.mark.slow
def test_accumulation_and_a_budget_between_the_peaks():
    seen = run_under(make_heads, between(), options=TrainingOptions(accumulate=2))
    assert seen.differences == []


# --- saved and given ------------------------------------------------------------------------------------------------


def test_a_saved_plan_runs_in_its_order(tmp_path):
    made = planned(between())
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.costs.order == loaded.graph.order == made.graph.order
    case = make_heads()
    args, kwargs = case.make_batch(0)
    model = schedule(case.model, plan=loaded, sample_args=args, sample_kwargs=kwargs)
    assert plan_of(model).graph.order == made.graph.order
    other = make_heads(wide=128)
    with pytest.raises(PlanMismatch, match="another training step"):
        schedule(other.model, plan=loaded, sample_args=other.make_batch(0)[0])


def test_an_order_that_breaks_an_edge_is_refused():
    data = planned(between()).to_dict()
    order = data["graph"]["order"]
    for damaged in (order[:-1], [order[0], *order[:-1]], list(range(len(order)))[::-1]):
        with pytest.raises(PlanFormatError, match="damaged"):
            Plan.from_dict(data | {"graph": data["graph"] | {"order": damaged}})


def test_draws_and_writes_keep_their_places():
    capture = capture_of(make_effects().model, *make_effects().make_batch(0)[0])
    graph = capture.graph
    plain = tuple(range(len(graph.ops)))
    check_order(graph, plain)
    assert capture_in_order(capture, ()) is capture
    assert capture_in_order(capture, plain).nodes == capture.nodes
    fixed = [op.index for op in graph.ops if not op.recomputable or op.index in capture.rng_state_ops]
    assert len(fixed) > 10
    for first, second in itertools.pairwise(fixed):
        if second == first + 1:
            with pytest.raises(GraphFormatError, match="does not come after"):
                capture_in_order(capture, [*plain[:first], second, first, *plain[second + 1 :]])
    with pytest.raises(GraphFormatError, match="permutation"):
        capture_in_order(capture, plain[1:])


def test_costs_of_a_plan_in_another_order_serve_the_step():
    made = planned(between())
    case = make_heads()
    args, kwargs = case.make_batch(0)
    again = plan(case.model, between(), args, kwargs, costs=made.costs)
    assert again.costs.time_ns == made.costs.time_ns
    assert plan(case.model, None, args, kwargs, costs=made.costs).costs == planned().costs


def test_buckets_take_the_order_over():
    def heads(length):
        return make_heads(time=length).make_batch(length)[0]

    torch.manual_seed(0)
    case = make_heads()
    torch.manual_seed(0)
    plain = make_heads().model
    model = schedule(case.model, between(0.3), dynamic="bucket", costs="roofline", time_limit_s=TIME_LIMIT_S)
    orders = []
    for length in (32, 28):
        results = []
        for module in (model, plain):
            module.zero_grad()
            torch.manual_seed(length)
            loss = case.loss_of(module(*heads(length)))
            loss.backward()
            results.append((loss.detach(), [p.grad.clone() for p in module.parameters()]))
        assert torch.equal(results[0][0], results[1][0])
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
        orders.append(plan_of(model).graph.order)
        assert plan_of(model).is_noop
    assert orders[0] == orders[1] != ()


@pytest.mark.slow
def test_pieces_keep_the_plain_order():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = make_heads().model

        def forward(self, x):
            y = self.heads(x)
            torch._dynamo.graph_break()
            return y.square().mean()

    (x,), _ = make_heads().make_batch(0)
    model = schedule(
        Broken(), exactly(peaks()[1] - 1), allow_graph_breaks=True, costs="roofline", time_limit_s=TIME_LIMIT_S
    )
    twin = Broken()
    for module in (model, twin):
        torch.manual_seed(0)
        module(x).backward()
    assert plan_of(model).graph.order == ()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


# --- other budgets, and what is said --------------------------------------------------------------------------------


def test_other_budgets_of_a_plan():
    kept, moved = planned(), planned(between())
    low, high = peaks()
    for start in (kept, moved):
        assert replan(start, high).graph.order == ()
        assert replan(start, low).graph.order == moved.graph.order
        assert replan(start, low).overhead == 0.0
    found = sweep(kept, count=3, time_limit_s=TIME_LIMIT_S)
    assert found.plan.keep_all_peak_bytes == low
    assert found.points[-1].budget_bytes == low
    assert found.points[-1].overhead == 0.0


def test_the_least_budget_is_that_of_the_better_order():
    case = make_heads()
    found = minimum_budget(case.model, *case.make_batch(0), time_limit_s=2)
    assert found.lower_bound_bytes <= found.bytes < peaks()[0]
    model = schedule(case.model, plan=found.plan)
    (x,), _ = case.make_batch(0)
    peak = measure_peak(lambda: case.loss_of(model(x)).backward(), resident=(model, x)).peak_bytes
    assert peak <= found.bytes * 1.01


def test_plans_report_both_peaks(tmp_path):
    made = planned(between())
    text = " ".join(made.summary(200).split())
    assert "in that of plain training" in text
    assert plan_figures(made)["plain_peak_bytes"] == peaks()[1] > plan_figures(made)["keep_all_peak_bytes"]
    assert "in that of plain training" in render_html(made)
    assert "in that of plain training" not in planned().summary(200)
    assert "heads" not in made.explain("", price=False).peak


def test_tensors_are_the_same_ones_in_either_order():
    kept, moved = planned(), planned(between())
    assert [d.name for d in kept.decisions] == [d.name for d in moved.decisions]
    assert differing(kept, moved) == {}
    assert saved_occurrences(kept) == saved_occurrences(moved)
    assert module_plan(dataclasses.replace(moved, budget_bytes=peaks()[1])) == module_plan(
        dataclasses.replace(kept, budget_bytes=peaks()[1])
    )


def test_least_share_is_a_share():
    assert 0 < LEAST_SHARE < 0.1
