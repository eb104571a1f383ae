"""Explanations: every tensor of the module, the constraint that binds, and the price of memory."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler.decisions import Action
from scheduler.explain import explain, under
from tests.scheduler.cli.steps import keep_all_plan
from tests.scheduler.toy import MB, make_plan


@pytest.mark.parametrize(
    ("module", "path", "found"),
    [
        ("h.1.act", "h.1", True),
        ("h.1", "h.1", True),
        ("h.11", "h.1", False),
        ("h.1.act", "*.act", True),
        ("h.1.act.inner", "*.act", True),
        ("h.1.act", "", True),
        ("h", "h.1", False),
    ],
)
def test_under(module, path, found):
    assert under(module, path) is found


def test_tensors_of_a_module_and_what_binds():
    plan = make_plan({1, 2}, budget=205 * MB)
    found = explain(plan, "h.1", price=False)
    names = [t.decision.name for t in found.tensors]
    assert names == ["mm_1", "gelu_1", "add_1"]
    assert sum(found.total(a) for a in Action) == 30 * MB
    again = [t for t in explain(plan, "", price=False).tensors if t.decision.action is Action.RECOMPUTED]
    assert again
    for tensor in again:
        tightest = next(s for s in plan.samples if plan.graph.ops[s.op].name == tensor.tightest_op and not s.again)
        assert tensor.headroom_bytes is not None
        assert tensor.headroom_bytes >= plan.budget_bytes - plan.peak_bytes
        assert ("The budget binds" in tensor.binding) == (tensor.decision.bytes > tensor.headroom_bytes)
        assert tightest.total_bytes <= plan.peak_bytes
    text = str(found)
    assert "h.1:" in text
    assert "aten.mm.default in h.1.linear" in text


def test_what_binds_at_the_same_op_is_said_once():
    found = explain(make_plan({1, 2}, budget=205 * MB), "h.1", price=False)
    (one,) = (t for t in found.tensors if t.decision.action is Action.RECOMPUTED)
    one = dataclasses.replace(one, source="/some/where/library/file.py:7", binding="The budget binds: here.")
    other = dataclasses.replace(one, tightest_op="elsewhere")
    loose = dataclasses.replace(one, binding="By itself it would fit.")
    lines = str(dataclasses.replace(found, tensors=(one, one, other, one, loose, loose))).splitlines()
    binding = [line.strip() for line in lines if line.strip().startswith(("The budget", "By itself"))]
    assert binding == [
        "The budget binds: here.",
        "The budget binds there too.",
        *["The budget binds: here."] * 2,
        *["By itself it would fit."] * 2,
    ]
    assert "in h.1.linear, library/file.py:7), 10.00 MB:" in lines[1]


def test_price():
    plan = make_plan({1, 2}, budget=205 * MB)
    price = explain(plan, "h.1", time_limit_s=0.5).price
    assert price is not None
    assert price.delta_bytes == 20_500_000
    assert price.saved_ns == 2_000_000  # with 225.5 MB everything can be kept
    assert "would save" in price.sentence()
    assert explain(keep_all_plan(), "h.1").price is None


def test_without_a_budget_and_unknown_modules():
    plan = make_plan()
    assert all(t.binding == "" for t in explain(plan, "h.2").tensors)
    with pytest.raises(ValueError, match=r"Did you mean 'h\.1\.linear'\?"):
        explain(plan, "h.1.linaer")
