"""Plans: their figures, decisions, immutability, saving and loading; errors and budgets."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from graphs.errors import CheckpointSchedulerError
from graphs.ir import StorageKind
from scheduler.decisions import Action, boundary_of
from scheduler.errors import BudgetError, Infeasible, PlanFormatError, PlanMismatch, parse_budget
from scheduler.plan import Plan
from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Compute, Free, Solution, Status
from tests.scheduler.toy import MB, STATIC, make_costs, make_graph, make_plan


def decision(plan, name):
    return next(d for d in plan.decisions if d.name == name)


# --- figures --------------------------------------------------------------------------------------------------------


def test_figures_of_a_plan_that_recomputes():
    plan = make_plan((0, 2), budget=300 * MB)
    ops = len(plan.graph.ops)
    assert plan.status is Status.FEASIBLE
    assert plan.static_bytes == 121 * MB
    assert plan.keep_all_time_ns == ops * 1_000_000
    assert plan.step_time_ns == (ops + 2) * 1_000_000
    assert plan.added_time_ns == 2_000_000
    assert plan.overhead == pytest.approx(2 / ops)
    assert plan.gap == pytest.approx(2 / ops)
    assert not plan.is_noop
    assert plan.peak_bytes < plan.keep_all_peak_bytes


def test_keep_all_plan_recomputes_nothing():
    plan = make_plan()
    assert plan.is_noop
    assert plan.overhead == plan.gap == 0
    assert plan.peak_bytes == plan.keep_all_peak_bytes
    assert {d.action for d in plan.decisions} == {Action.KEPT, Action.TEMPORARY}


def test_without_budget_the_problem_allows_exactly_keep_all():
    plan = make_plan()
    assert plan.budget_bytes is None
    assert plan.problem.budget_bytes == plan.keep_all_peak_bytes
    assert make_plan(budget=300 * MB).problem.budget_bytes == 300 * MB


def test_graph_steps_are_the_steps_in_the_graphs_numbers():
    plan = make_plan((1,))
    static = sum(s.kind.is_static for s in plan.graph.storages)  # they come first in the toy graph
    for ours, theirs in zip(plan.graph_steps, plan.steps, strict=True):
        assert ours == (Free(theirs.storage + static) if isinstance(theirs, Free) else theirs)


@pytest.mark.parametrize("recompute", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_samples_add_up_to_what_the_simulator_finds(recompute):
    plan = make_plan(recompute)
    replay = simulate(plan.problem, plan.steps)
    expected = [live for live, step in zip(replay.live_bytes, plan.steps, strict=True) if isinstance(step, Compute)]
    assert [s.total_bytes for s in plan.samples] == expected
    assert max(s.total_bytes for s in plan.samples) == plan.peak_bytes
    assert plan.samples[-1].end_ns == plan.step_time_ns
    assert sum(s.again for s in plan.samples) == len(recompute)


def test_samples_count_a_second_copy_of_a_resident_storage():
    graph = make_graph(1)
    costs = make_costs(graph)
    problem = Problem.from_graph(graph, costs, 10**9, static_bytes=0)
    order = [0, 1, 1, *range(2, len(graph.ops))]
    steps = tuple(step for step in with_frees(problem, order))
    first = steps.index(Free(1))
    doubled = (*steps[:first], *steps[first + 1 :])  # keep the first copy of storage 1 while it is made again
    replay = simulate(problem, doubled)
    solution = Solution(Status.FEASIBLE, doubled, replay.step_time_ns, replay.peak_bytes, 1, "by hand")
    plan = Plan(graph, costs, solution, 10**9, {}, "cpu", {})
    live = [b for b, step in zip(replay.live_bytes, doubled, strict=True) if isinstance(step, Compute)]
    assert [s.total_bytes for s in plan.samples] == live
    assert live[2] == 10 * MB + 2 * 10 * MB + 2 * MB  # the stream, two copies, workspace


# --- decisions ------------------------------------------------------------------------------------------------------


def test_decisions_cover_the_activations_in_order():
    plan = make_plan((0,))
    activations = [s.index for s in plan.graph.storages if s.kind is StorageKind.ACTIVATION]
    assert [d.storage for d in plan.decisions] == activations


def test_a_recomputed_activation():
    plan = make_plan((0, 2))
    found = decision(plan, "mm_2")
    assert found.action is Action.RECOMPUTED
    assert (found.bytes, found.module_path, found.times, found.added_ns) == (10 * MB, "h.2.linear", 1, 1_000_000)
    assert "10.00 MB" in found.reason
    assert "aten.mm.default again (once, 1.00 ms)" in found.reason
    assert {d.name for d in plan.decisions if d.action is Action.RECOMPUTED} == {"mm_0", "mm_2"}


def test_kept_and_temporary_activations():
    plan = make_plan((0,))
    assert decision(plan, "mm_1").action is Action.KEPT
    assert "the budget has room" in decision(plan, "mm_1").reason
    assert decision(plan, "gelu_1").action is Action.TEMPORARY
    assert decision(plan, "gelu_1").reason == "nothing in the backward reads it"
    assert decision(plan, "dgelu_1").action is Action.TEMPORARY
    assert decision(plan, "dgelu_1").reason == "it lives in the backward only"


def test_an_activation_that_may_not_be_recomputed_says_why():
    found = decision(make_plan(), "topk[1]")
    assert found.action is Action.KEPT
    assert found.reason == "aten.topk.default may not run again: equal values may be selected in another order"


def test_added_times_of_the_decisions_add_up():
    plan = make_plan((0, 1, 3))
    assert sum(d.added_ns for d in plan.decisions) == plan.added_time_ns == 3_000_000


def test_the_second_of_three_productions_is_counted():
    plan = make_plan()
    order = [step.op for step in plan.steps if isinstance(step, Compute)]
    by_name = {op.name: op.index for op in plan.graph.ops}
    again = [*order[: by_name["gelu_0"]], by_name["mm_0"], *order[by_name["gelu_0"] :]]
    again.insert(again.index(by_name["dgelu_0"]), by_name["mm_0"])
    steps = with_frees(plan.problem, again)
    replay = simulate(plan.problem, steps)
    solution = dataclasses.replace(
        plan.solution, steps=steps, step_time_ns=replay.step_time_ns, peak_bytes=replay.peak_bytes
    )
    found = decision(dataclasses.replace(plan, solution=solution), "mm_0")
    assert (found.times, found.added_ns) == (2, 2_000_000)
    assert "2 times" in found.reason


def test_boundary_is_after_the_frees_of_the_last_forward_op():
    plan = make_plan((0,))
    position = boundary_of(plan.graph, plan.graph_steps)
    before = [s.op for s in plan.steps[: position + 1] if isinstance(s, Compute)]
    assert before == list(range(plan.graph.forward_ops))
    assert plan.steps[position + 1] == Compute(plan.graph.forward_ops)
    assert plan.backward_start_ns == plan.graph.forward_ops * 1_000_000


# --- immutability ---------------------------------------------------------------------------------------------------


def test_a_plan_is_frozen_and_its_measurement_is_recorded_beside():
    plan, other = make_plan((0,)), make_plan((0,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.device = "cuda"
    assert plan.measured_peak_bytes is None
    plan.record_measured_peak(123)
    assert plan.measured_peak_bytes == 123
    assert plan == other
    assert hash(plan) == hash(other)
    assert plan != make_plan((1,))


def test_a_plan_takes_copies_of_the_mappings_it_is_given():
    static = dict(STATIC)
    plan = make_plan(static=static)
    static["parameters"] = 0
    assert plan.static_bytes == 121 * MB


def test_copies_are_equal_and_keep_their_own_measurement():
    plan = make_plan((0,))
    plan.record_measured_peak(5)
    copied = copy.deepcopy(plan)
    assert copied == plan
    assert copied.graph is plan.graph
    assert copied.measured_peak_bytes == 5
    copied.record_measured_peak(6)
    assert plan.measured_peak_bytes == 5


def test_repr_is_one_line():
    text = repr(make_plan((0,), budget=300 * MB))
    assert "\n" not in text
    assert "budget 300.0 MB" in text
    assert "29 ops" in text


def test_refuses_a_solution_without_steps_and_foreign_costs():
    plan = make_plan()
    none = Solution(Status.INFEASIBLE, (), 0, 0, 0, "by hand")
    with pytest.raises(ValueError, match="No schedule that this solver can express"):
        dataclasses.replace(plan, solution=none)
    with pytest.raises(ValueError, match="costs of 17 ops for a graph of 29"):
        dataclasses.replace(plan, costs=make_costs(make_graph(2)))


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 300 * MB])
def test_round_trip(tmp_path, budget):
    plan = make_plan((0, 2), budget=budget)
    plan.record_measured_peak(7)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.measured_peak_bytes == 7
    assert loaded.steps == plan.steps
    assert loaded.decisions == plan.decisions
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_saved_plan_can_be_read_by_whom_other_files_can(tmp_path):
    (tmp_path / "other").write_text("")
    make_plan().save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_failed_save_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    before = path.read_bytes()

    def fail(self, content):
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError("disk full")

    monkeypatch.setattr(pathlib.Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        make_plan((0,)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other"
    for content, message in [
        (b"\x80\x04binary", "not JSON"),
        (b"[1, 2]", "not a plan saved by this package"),
        (b'{"schema_version": 1}', "not a plan saved by this package"),
    ]:
        path.write_bytes(content)
        with pytest.raises(PlanFormatError, match=message) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "absent.json")


def test_other_versions_are_refused():
    with pytest.raises(PlanFormatError, match="schema_version 2 and this version of the package reads 1"):
        Plan.from_dict(make_plan().to_dict() | {"schema_version": 2})


def _without_costs(data):
    del data["costs"]


def _other_status(data):
    data["solution"]["status"] = "splendid"


def _unknown_step(data):
    data["solution"]["steps"][0] = ["offload", 0]


def _lost_step(data):
    data["solution"]["steps"].pop(0)


def _false_peak(data):
    data["solution"]["peak_bytes"] -= 1


def _changed_graph(data):
    data["graph"]["storages"][0][1] += 1


@pytest.mark.parametrize(
    "damage", [_without_costs, _other_status, _unknown_step, _lost_step, _false_peak, _changed_graph]
)
def test_damaged_plans_are_refused(damage):
    data = json.loads(json.dumps(make_plan((0,)).to_dict()))
    assert Plan.from_dict(data) == make_plan((0,))
    damage(data)
    with pytest.raises(PlanFormatError, match="the plan is damaged"):
        Plan.from_dict(data)


# --- the graph it fits ----------------------------------------------------------------------------------------------


def test_fits_an_equal_graph_under_other_names():
    graph = make_graph()
    renamed = dataclasses.replace(graph, ops=tuple(dataclasses.replace(o, name=f"x{o.index}") for o in graph.ops))
    assert make_plan().check_fits(renamed) is None
    assert make_plan().problem.op_names != tuple(o.name for o in renamed.ops)


def test_mismatch_says_what_differs():
    plan, graph = make_plan(), make_graph()
    op = dataclasses.replace(graph.ops[2], target="aten.relu.default")
    other_op = dataclasses.replace(graph, ops=(*graph.ops[:2], op, *graph.ops[3:]))
    never = dataclasses.replace(graph.ops[2], recomputable=False, reason="asked for")
    held = dataclasses.replace(graph, ops=(*graph.ops[:2], never, *graph.ops[3:]))
    for given, message in [
        (make_graph(activation=11 * MB), r"storage 5 was activation embed in wte of 10\.00 MB and is .* 11\.00 MB"),
        (other_op, r"op 2 was aten\.gelu\.default in h\.0\.act .* and is aten\.relu\.default"),
        (held, r"forward, never run again"),
        (dataclasses.replace(graph, ops=graph.ops[:-1], storages=graph.storages[:-1]), r"29 ops and this one has 28"),
    ]:
        with pytest.raises(PlanMismatch, match=message):
            plan.check_fits(given)


# --- budgets and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8, 8 * 10**9),
        (0.35, 350_000_000),
        (np.float32(0.5), 500_000_000),
        (np.int64(2), 2 * 10**9),
        (Fraction(1, 4), 250_000_000),
        ("7.5GiB", 7.5 * 2**30),
        ("800MB", 800_000_000),
        ("16 GB", 16 * 10**9),
        (" 1.gb ", 10**9),
        (".5 MiB", 2**19),
        ("512 kB", 512_000),
        ("3KiB", 3072),
        ("1TiB", 2**40),
        ("17b", 17),
    ],
)
def test_budgets(value, expected):
    assert parse_budget(value) == expected
    assert isinstance(parse_budget(value), int)


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), -float("inf"), 0, -1, -0.5, 1e-12, True, False, np.True_, 10**400, 1e308, 25e6),
        *(
            "",
            "8",
            "GB",
            "-1GB",
            "nanGB",
            "inf GB",
            "0 GB",
            "8 G",
            "8 Gbit",
            "1e3GB",
            "8GB 1MB",
            "0.1B",
            "9" * 400 + "GB",
        ),
        *(None, [8], b"8GB", 8j, Decimal(8), {"gb": 8}, object()),
    ],
)
def test_what_is_no_budget(value):
    with pytest.raises(BudgetError, match=r'budget_gb=8 or 0\.35.*"7\.5GiB", "800MB", "16 GB"'):
        parse_budget(value)


def test_infeasible_states_everything():
    error = Infeasible(
        budget_bytes=2 * 10**9,
        floor_bytes=3_100_400_000,
        floor_lower_bound_bytes=2_900_000_000,
        static_bytes=1_200_000_000,
        binding_op="mm_12",
        binding_module="transformer.h.3.mlp",
    )
    assert isinstance(error, ValueError)
    assert isinstance(error, CheckpointSchedulerError)
    assert error.floor_bytes == 3_100_400_000
    message = str(error)
    for part in (
        "No schedule can run this training step within the budget of 2.00 GB.",
        "found is 3.10 GB",
        "proven that none exists below 2.90 GB",
        "1.20 GB are static",
        "mm_12 in module 'transformer.h.3.mlp'",
        "budget_gb=3.11,",  # rounded up, so that it is enough
    ):
        assert part in message


def test_infeasible_claims_no_more_than_is_known():
    error = Infeasible(budget_bytes=3 * 10**9, floor_lower_bound_bytes=2_900_000_000, static_bytes=5)
    assert "No schedule was found that can run" in str(error)
    assert "least budget for which a plan exists was not determined" in str(error)
    assert "binds" not in str(error)
    assert "proven" not in str(Infeasible(budget_bytes=1, static_bytes=0))


def test_infeasible_survives_pickling():
    error = Infeasible(budget_bytes=1, static_bytes=2, floor_bytes=3, binding_op="mm")
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert str(copied) == str(error)
    assert copied.__dict__ == error.__dict__
