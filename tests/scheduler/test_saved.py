"""Saved plans: the schema describes them, older ones are read, and they run elsewhere or say what differs."""

from __future__ import annotations

import copy
import dataclasses
import importlib.resources
import json

import pytest
import torch
from torch import nn

from scheduler import Plan, PlanFormatError, PlanMismatch, plan, schedule
from scheduler.saved import SCHEMA_VERSION
from solvers.solution import Offload
from tests.json_schema import violations
from tests.models import make_heads
from tests.scheduler.toy import MB, make_plan, make_plan_with_copies

SCHEMA = json.loads(importlib.resources.files("scheduler").joinpath("plan.schema.json").read_text(encoding="utf-8"))


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        return nn.functional.dropout(self.layers(self.norm(x)), 0.1).square().mean()


def batch(width: int = 16):
    return torch.randn(512, width, generator=torch.Generator().manual_seed(0))


def tight(model, x, share=0.8, **options):
    keep_all = plan(model, None, (x,))
    span = keep_all.keep_all_peak_bytes - keep_all.static_bytes
    return plan(model, f"{keep_all.static_bytes + int(share * span)}B", (x,), time_limit_s=1.0, **options)


def tight_heads():
    case = make_heads()
    (x,), _ = case.make_batch(0)
    made = tight(case.model, x)
    assert made.graph.order
    return made


def measured():
    made = make_plan({1, 2}, budget=215 * MB)
    made.record_measured_peak(made.peak_bytes + 1)
    return made


SAVED = {
    "by hand": measured,
    "without a budget": make_plan,
    "captured": lambda: tight(Net(), batch(), never_recompute=["aten.native_batch_norm"]),
    "with copies": make_plan_with_copies,
    "in another order": tight_heads,
}


@pytest.mark.parametrize("name", SAVED)
def test_every_saved_plan_is_as_the_schema_says(name, tmp_path):
    made = SAVED[name]()
    made.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_bytes())
    assert list(violations(data, SCHEMA)) == []
    described = SCHEMA["properties"]
    assert data.keys() == described.keys()  # nothing is written that the schema leaves out
    for part in ("solution", "costs", "graph"):
        assert data[part].keys() == described[part]["properties"].keys()
    assert described["schema_version"]["const"] == SCHEMA_VERSION
    assert Plan.load(tmp_path / "plan.json") == made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("budget_bytes",), "8GB"),
        (("schema_version",), 2),
        (("fingerprint",), "abc"),
        (("solution", "status"), "infeasible"),
        (("solution", "steps", 0), ["compute", -1]),
        (("solution", "steps", 0), ["compute"]),
        (("graph", "storages", 0, 2), "weight"),
        (("graph", "ops", 0, 6), "yes"),
        (("costs", "time_ns", 0), 1.5),
        (("constraints",), {"kept": ["a"]}),
        (("static",), None),
    ],
)
def test_the_schema_refuses(path, value):
    data = copy.deepcopy(make_plan({1}, budget=215 * MB).to_dict())
    data = json.loads(json.dumps(data))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert len(list(violations(data, SCHEMA))) == 1
    if path != ("constraints",):
        with pytest.raises(PlanFormatError):
            Plan.from_dict(data)


def test_fields_that_came_later_may_be_absent():
    made = make_plan({1}, budget=215 * MB)
    data = made.to_dict()
    for name in data.keys() - set(SCHEMA["required"]):
        del data[name]
    del data["graph"]["pinned"]
    assert list(violations(json.loads(json.dumps(data)), SCHEMA)) == []
    assert Plan.from_dict(data) == made


def test_a_plan_made_without_the_weights_runs_where_they_are(tmp_path):
    with torch.device("meta"):
        elsewhere, x = Net(), torch.empty(512, 16)
    tight(elsewhere, x).save(tmp_path / "plan.json")
    model = schedule(Net(), sample_args=(batch(),), plan=Plan.load(tmp_path / "plan.json"))
    assert not model.plan.is_noop
    model(batch()).backward()


def test_a_plan_of_another_step_says_what_differs(tmp_path):
    made = tight(Net(), batch())
    data = made.to_dict()
    data["versions"] = {"torch": "1.0", "no-such-package": "3"}
    older = Plan.from_dict(data)
    schedule(Net(), sample_args=(batch(),), plan=older)  # other versions alone are no reason to refuse
    with pytest.raises(PlanMismatch, match=r"storage 0 was input .* of 32.77 kB and is input .* of 65.54 kB") as caught:
        schedule(Net(32), sample_args=(batch(32),), plan=older)
    assert "It was made with torch 1.0 (here 2." in str(caught.value)
    assert "no-such-package 3 (here none)" in str(caught.value)
    with pytest.raises(PlanMismatch) as caught:
        schedule(Net(32), sample_args=(batch(32),), plan=made)
    assert "made with" not in str(caught.value)


def test_a_plan_above_the_budget_that_it_is_given_with_is_refused():
    made = tight(Net(), batch())
    budgets = {"enough": f"{made.peak_bytes}B", "too little": f"{made.peak_bytes - 1}B"}
    schedule(Net(), budgets["enough"], sample_args=(batch(),), plan=made)
    with pytest.raises(PlanMismatch, match="leave it out to run the plan as it is"):
        schedule(Net(), budgets["too little"], sample_args=(batch(),), plan=made)
    model = Net()
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)  # resident too, and not when the plan was made
    with pytest.raises(PlanMismatch, match="what is resident now"):
        schedule(model, budgets["enough"], sample_args=(batch(),), plan=made, optimizer=momentum)


def test_a_plan_with_copies_of_what_may_not_leave_is_refused():
    made = make_plan_with_copies()
    moved = next(s for s in made.graph_steps if isinstance(s, Offload)).storage
    made.check_fits(made.graph)
    storages = list(made.graph.storages)
    storages[moved] = dataclasses.replace(storages[moved], pinned="never_offload='h.0'")
    with pytest.raises(PlanMismatch, match=r"copies mm_0 to the host, which it may not: never_offload='h\.0'"):
        made.check_fits(dataclasses.replace(made.graph, storages=tuple(storages)))
