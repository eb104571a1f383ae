"""The report: a plan as one self-contained page that needs no network.

This module gathers what the page shows as plain data; ``page.html`` beside it holds the markup, the style and the
script that draws. The data stand in the page as JSON, so that a page is a file one can keep, send and open anywhere.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
from typing import TYPE_CHECKING, Any, Final

from scheduler.decisions import Action, Decision
from scheduler.export.files import write_whole
from scheduler.report.plots import COLOURS
from scheduler.report.text import keep_all_peak_words, kept_by_plain_training, peak_by_category, peak_sample
from scheduler.report.timeline import Category
from scheduler.units import format_bytes, format_time
from solvers.solution import Compute, Free, Prefetch

if TYPE_CHECKING:
    from scheduler.plan import Plan

_PLACE: Final = "/*DATA*/null"
_ROOT: Final = "(model)"


def render_html(plan: Plan) -> str:
    """The page. Under 5 MB for a step of ten thousand executions."""
    template = importlib.resources.files("scheduler.report").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(plan), separators=(",", ":"), ensure_ascii=False)
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    before, found, after = template.partition(_PLACE)
    assert found
    return before + safe + after


def save_html(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write :func:`render_html` as a file; an earlier one is replaced."""
    write_whole(path, render_html(plan).encode())


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page shows. Sizes are bytes and times nanoseconds; executions are numbered as in ``plan.samples``."""
    samples = plan.samples
    peak = peak_sample(plan)
    used = [c for c in Category if any(s.live[c] for s in samples)]
    return {
        "title": plan.graph.name or "training step",
        "fits": plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes,
        "budget": plan.budget_bytes,
        "peak": plan.peak_bytes,
        "measured": plan.measured_peak_bytes,
        "static": plan.static_bytes,
        "peakAt": samples.index(peak) if peak is not None else 0,
        "backwardAt": plan.backward_start_ns,
        "end": plan.step_time_ns,
        "headline": _headline(plan),
        "parts": [[name, size] for name, size in peak_by_category(plan).items()],
        "categories": [{"name": c.value, "colour": COLOURS[c], "live": [s.live[c] for s in samples]} for c in used],
        "start": [s.start_ns for s in samples],
        "op": [s.op for s in samples],
        "again": [int(s.again) for s in samples],
        "ops": [[o.name, o.target, o.module_path or _ROOT, o.phase.value] for o in plan.graph.ops],
        "lives": _lives(plan),
        "modules": _modules(plan),
        "link": _link(plan),
        "about": _about(plan),
    }


def _headline(plan: Plan) -> list[list[str]]:
    rows = [
        ["budget", "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)],
        ["predicted peak", format_bytes(plan.peak_bytes)],
    ]
    if plan.measured_peak_bytes is not None:
        difference = plan.measured_peak_bytes / plan.peak_bytes - 1 if plan.peak_bytes else 0.0
        rows.append(["measured peak", f"{format_bytes(plan.measured_peak_bytes)} ({difference:+.2%})"])
    else:
        rows.append(["measured peak", "not run yet"])
    rows += [
        ["keep-all peak", keep_all_peak_words(plan)],
        ["step time", format_time(plan.step_time_ns)],
        ["added by the plan", f"{format_time(plan.added_time_ns)} ({plan.overhead:.2%})"],
        ["proven gap", f"{plan.gap:.2%}"],
    ]
    return rows + [list(row) for row in plan.host_use.rows(plan)]


def _about(plan: Plan) -> list[list[str]]:
    graph = plan.graph
    rows = [
        ["status", f"{plan.status.value}: {plan.status.sentence} {plan.status.remedy}".strip()],
        ["solver", f"{plan.solution.solver}, {plan.solution.solve_seconds:.2f} s"],
        [
            "lower bound",
            f"{format_time(plan.lower_bound_ns)}: no schedule that first runs the ops in this order is faster",
        ],
        ["device", f"{plan.device}, costs by {plan.costs.source}"],
        ["step", f"{len(graph.ops)} ops ({graph.forward_ops} forward), {len(graph.storages)} storages"],
        ["fingerprint", graph.fingerprint],
        ["versions", ", ".join(f"{name} {version}" for name, version in plan.versions.items())],
    ]
    rows += [["constraint", label] for label in plan.constraints.labels()]
    return rows + [["assumes", text] for text in plan.assumptions]


def _lives(plan: Plan) -> list[list[Any]]:
    """[name, module, bytes, what for, first execution, last execution] of each stay of a storage in memory."""
    actions = {d.storage: d.action.value for d in plan.decisions}
    storages, ops = plan.graph.storages, plan.graph.ops
    since: dict[int, int] = {}
    found: list[list[Any]] = []

    def end(storage: int, last: int) -> None:
        s = storages[storage]
        purpose = actions.get(storage, s.kind.value)
        found.append([s.name, s.module_path or _ROOT, s.bytes, purpose, since.pop(storage), last])

    execution = -1
    for step in plan.graph_steps:
        if isinstance(step, Compute):
            execution += 1
            for made in ops[step.op].outputs:
                if made in since:
                    end(made, execution)
                since[made] = execution
        elif isinstance(step, Prefetch):
            since[step.storage] = execution + 1
        elif isinstance(step, Free):
            end(step.storage, execution)
    for storage in list(since):
        end(storage, execution)
    return [life for life in found if life[2]]


def _link(plan: Plan) -> dict[str, Any] | None:
    """Copies as [start, end, outward or not, tensor, bytes] and stalls as [start, end]; ``None`` without copies."""
    if not plan.host_use.copies:
        return None
    storages = plan.graph.storages
    return {
        "copies": [
            [c.start_ns, c.end_ns, int(c.outward), storages[c.storage].name, storages[c.storage].bytes]
            for c in plan.host_use.copies
        ],
        "stalls": [[stall.start_ns, stall.end_ns] for stall in plan.host_use.stalls],
    }


@dataclasses.dataclass(slots=True)
class _Sums:
    kept: int = 0
    recomputed: int = 0
    offloaded: int = 0
    executions: int = 0
    added_ns: int = 0
    forward_ns: int = 0

    def add(self, decision: Decision) -> None:
        """Count the bytes of a decision; temporary ones count nowhere."""
        if decision.action is Action.KEPT:
            self.kept += decision.bytes
        elif decision.action is Action.RECOMPUTED:
            self.recomputed += decision.bytes
        elif decision.action is Action.OFFLOADED:
            self.offloaded += decision.bytes


def _modules(plan: Plan) -> list[list[Any]]:
    """[path, depth, kept, recomputed, executions again, ns added, ns of its ops once, offloaded], each with all below.

    In the order of first execution, parents before children, so that a tree can be read off the depths.
    """
    sums: dict[str, _Sums] = {"": _Sums()}
    for op in plan.graph.ops:
        for path in _ancestors(op.module_path):
            sums.setdefault(path, _Sums()).forward_ns += plan.costs.time_ns[op.index]
    for d in plan.decisions:
        if d.action is not Action.RECOMPUTED or kept_by_plain_training(plan.graph, d.storage):
            for path in _ancestors(d.module_path):
                sums.setdefault(path, _Sums()).add(d)
    for sample in plan.samples:
        if sample.again:
            for path in _ancestors(plan.graph.ops[sample.op].module_path):
                row = sums[path]
                row.executions += 1
                row.added_ns += sample.end_ns - sample.start_ns
    return _in_tree_order(sums)


def _in_tree_order(sums: dict[str, _Sums]) -> list[list[Any]]:
    children: dict[str, list[str]] = {}
    for path in sums:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    rows: list[list[Any]] = []
    pending = [("", 0)]
    while pending:
        path, depth = pending.pop()
        s = sums[path]
        rows.append([path or _ROOT, depth, s.kept, s.recomputed, s.executions, s.added_ns, s.forward_ns, s.offloaded])
        pending += [(child, depth + 1) for child in reversed(children.get(path, []))]
    return rows


def _ancestors(path: str) -> list[str]:
    """The root, and each part of a dotted path: ``a.b`` → ``""``, ``a``, ``a.b``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]
