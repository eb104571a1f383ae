"""What a user forbids a plan: by patterns, and by marks in the forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphs.constraints import Constraints
from graphs.links import Link
from scheduler import Infeasible, Plan, PlanMismatch, mark, minimum_budget, plan, schedule, unschedule
from scheduler.decisions import Action
from solvers.solution import Compute, Offload
from tests.capturing import capture_of


class Block(nn.Module):
    def __init__(self, width: int = 32, what: str | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.what = what

    def forward(self, x):
        wide = self.up(x)
        if self.what is not None:
            wide = mark(wide, self.what)
        return x + self.down(nn.functional.gelu(wide))


class Stack(nn.Module):
    def __init__(self, blocks: int = 4, marked: int = -1, what: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(what=what if i == marked else None) for i in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch():
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def least(**constraints):
    return minimum_budget(Stack(), (batch(),), **constraints)


def decisions_of(made: Plan, module: str):
    return [d for d in made.decisions if d.module_path.startswith(module) and d.storage in _forward(made)]


def _forward(made: Plan):
    return {s for op in made.graph.ops[: made.graph.forward_ops] for s in op.outputs}


@pytest.fixture(scope="module")
def tight():
    """A budget at which the plan without constraints recomputes something in every block but the last."""
    free = least()
    return free.bytes + (free.plan.keep_all_peak_bytes - free.bytes) // 3


def test_keep_by_module_and_by_op(tight):
    free = plan(Stack(), f"{tight}B", (batch(),))
    assert any(d.action is Action.RECOMPUTED for d in decisions_of(free, "blocks.1"))
    by_module = plan(Stack(), f"{tight}B", (batch(),), keep=["blocks.1"])
    assert not any(d.action is Action.RECOMPUTED for d in decisions_of(by_module, "blocks.1"))
    assert any("keep='blocks.1'" in d.reason for d in decisions_of(by_module, "blocks.1"))


def test_keep_by_op(tight):
    def runs_of_gelu(made):
        ran = [step.op for step in made.steps if isinstance(step, Compute)]
        return [ran.count(op.index) for op in made.graph.ops if op.target.startswith("aten.gelu.")]

    budget = least(keep=["aten.gelu"]).bytes
    assert budget > tight
    assert max(runs_of_gelu(plan(Stack(), f"{budget}B", (batch(),)))) == 2
    assert runs_of_gelu(plan(Stack(), f"{budget}B", (batch(),), keep=["aten.gelu"])) == [1] * 4


@pytest.mark.parametrize("what", ["keep", "never_recompute"])
def test_a_mark_keeps_one_tensor(tight, what):
    model = Stack(marked=1, what=what)
    made = plan(model, f"{tight}B", (batch(),))
    marked = [op for op in made.graph.ops if "mark" in op.reason]
    assert [op.module_path for op in marked] == ["blocks.1.up"]
    assert "test_constraints.py:" in marked[0].reason
    (decision,) = [d for d in made.decisions if d.storage in marked[0].outputs]
    assert decision.action is Action.KEPT
    assert not any("mark" in op.target for op in made.graph.ops)


def test_marks_change_no_number(tight):
    plain, marked = Stack(), Stack(marked=1, what="keep")
    results = []
    for model in (plain, schedule(marked, f"{tight}B", costs="roofline")):
        loss = model(batch())
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters()]))
    (loss, gradients), (marked_loss, marked_gradients) = results
    assert torch.equal(loss, marked_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, marked_gradients, strict=True))
    assert any(isinstance(s, Compute) for s in marked.plan.steps)
    unschedule(marked)
    assert torch.equal(marked(batch()), loss)


def test_a_mark_in_eager_mode_is_the_tensor_itself():
    x = torch.randn(3, requires_grad=True)
    assert mark(x, "keep") is x
    with pytest.raises(ValueError, match="give one of 'keep'"):
        mark(x, "kept")
    with pytest.raises(TypeError, match="takes a tensor"):
        mark(3, "keep")


class OddMarks(nn.Module):
    """Marks on a view, a parameter, an input, one of several results, and a value that is then written to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        mark(self.a.weight, "keep")
        mark(x, "never_offload")
        h = self.a(x) * 2
        mark(h.view(-1)[:3], "keep")
        h.add_(1)
        return self.b(mark(self.norm(h), "never_offload").exp()).sum()


def test_marks_on_views_parameters_and_written_values():
    x, model = torch.randn(4, 8), OddMarks()
    loss = model(x)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    capture = capture_of(model, x)
    once = [op.target for op in capture.graph.ops if "mark 'keep'" in op.reason]
    assert once == ["aten.mul.Tensor"]
    pinned = {capture.graph.ops[s.producer].target for s in capture.graph.storages if "mark" in s.pinned}
    assert pinned == {"aten.mul.Tensor", "aten.native_layer_norm.default"}
    schedule(model, "1GB", costs="roofline")
    again = model(x)
    again.backward()
    assert torch.equal(again, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_never_offload_and_keep_stay_on_the_device(tight):
    link = Link(1e12, 1e12, latency_ns=0)
    options = {"offload": "auto", "link": link, "host_budget_gb": 1}
    free = plan(Stack(), f"{tight}B", (batch(),), **options)

    def copied(made):
        moved = {step.storage for step in made.graph_steps if isinstance(step, Offload)}
        paths = {made.graph.storages[s].module_path for s in moved}
        return {path.split(".")[1] for path in paths if path}

    assert "1" in copied(free)
    for kind in ("never_offload", "keep"):
        bound = plan(Stack(), f"{tight}B", (batch(),), **options, **{kind: ["blocks.1"]})
        assert copied(bound)
        assert "1" not in copied(bound)
    backward = plan(Stack(), f"{tight}B", (batch(),), **options, never_offload=["blocks.1"]).graph
    inside = [op for op in backward.ops[backward.forward_ops :] if op.module_path.startswith("blocks.1")]
    made = [backward.storages[s] for op in inside for s in op.outputs]
    assert made
    assert all(storage.pinned for storage in made)
    marked = plan(Stack(marked=1, what="never_offload"), f"{tight}B", (batch(),), **options)
    names = {s.name for s in marked.graph.storages if s.pinned}
    moved = {marked.graph.storages[s.storage].name for s in marked.graph_steps if isinstance(s, Offload)}
    assert names
    assert moved
    assert not names & moved


def test_infeasible_names_the_constraint():
    free, kept = least(), least(keep=["blocks"])
    assert kept.bytes > free.bytes
    budget = f"{(free.bytes + kept.lower_bound_bytes) // 2}B"
    with pytest.raises(Infeasible, match=r"a plan without keep='blocks'") as caught:
        plan(Stack(), budget, (batch(),), keep=["blocks"], never_recompute=["aten.neg", "aten.mean"])
    assert caught.value.constraints == ("keep='blocks'",)


def test_infeasible_for_another_reason_says_so():
    with pytest.raises(Infeasible, match="do not decide it") as caught:
        plan(Stack(), "20kB", (batch(),), keep=["blocks.1"])
    assert caught.value.constraints == ()


def test_a_plan_carries_its_constraints(tmp_path, tight):
    made = plan(Stack(), f"{tight}B", (batch(),), keep=["blocks.1"])
    made.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.constraints == Constraints(keep=("blocks.1",))
    assert again == made
    model = schedule(Stack(), sample_args=(batch(),), plan=again)  # captured under the plan's constraints
    assert model.plan.graph.fingerprint == made.graph.fingerprint
    with pytest.raises(PlanMismatch, match="never run again"):
        schedule(Stack(), sample_args=(batch(),), plan=again, keep=["blocks.2"])


def test_a_pattern_that_matches_nothing_is_said(caplog):
    plan(Stack(), "1GB", (batch(),), keep=["blocks.11", "blocks.1"])
    assert "no op matches keep='blocks.11'" in caplog.text
    assert "keep='blocks.1'" not in caplog.text
    assert "Did you mean 'blocks.1'?" in caplog.text


@pytest.mark.parametrize("kind", ["keep", "never_recompute", "never_offload"])
def test_a_text_is_no_sequence_of_patterns(kind):
    with pytest.raises(TypeError, match=f"{kind} takes a sequence"):
        plan(Stack(), "1GB", (batch(),), **{kind: "blocks"})
