"""Plans as the figures that ``--json`` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from scheduler.errors import Infeasible
from scheduler.plan import Plan
from scheduler.report.text import module_rows, peak_by_category


def plan_figures(plan: Plan) -> dict[str, Any]:
    """Headline figures of a plan and its table of modules. Sizes are bytes, times nanoseconds."""
    host = {"budget_bytes": plan.host_bytes} | vars(plan.host_use)
    return {
        "status": plan.status.value,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "peak_by_category": peak_by_category(plan),
        "measured_peak_bytes": plan.measured_peak_bytes,
        "keep_all_peak_bytes": plan.keep_all_peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "static": dict(plan.static),
        "step_time_ns": plan.step_time_ns,
        "keep_all_time_ns": plan.keep_all_time_ns,
        "overhead": plan.overhead,
        "lower_bound_ns": plan.lower_bound_ns,
        "gap": plan.gap,
        "link": None if plan.link is None else plan.link.as_dict(),
        "host": {name: figure for name, figure in host.items() if isinstance(figure, int)},
        "solver": plan.solution.solver,
        "solve_seconds": plan.solution.solve_seconds,
        "device": plan.device,
        "costs": plan.costs.source,
        "constraints": plan.constraints.to_dict(),
        "ops": len(plan.graph.ops),
        "fingerprint": plan.graph.fingerprint,
        "versions": dict(plan.versions),
        "assumptions": list(plan.assumptions),
        "modules": [dataclasses.asdict(row) for row in module_rows(plan)],
    }


def infeasible_figures(error: Infeasible) -> dict[str, Any]:
    """What is known where no plan was found."""
    return {
        "status": "infeasible",
        "budget_bytes": error.budget_bytes,
        "floor_bytes": error.floor_bytes,
        "floor_lower_bound_bytes": error.floor_lower_bound_bytes,
        "floor_without_copies_bytes": error.floor_without_copies_bytes,
        "static_bytes": error.static_bytes,
        "binding_op": error.binding_op,
        "binding_module": error.binding_module,
        "binding_constraints": list(error.constraints),
        "message": str(error),
    }
