"""Plans as JSON: the form that :meth:`scheduler.plan.Plan.save` writes, described in ``plan.schema.json``."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from graphs.constraints import Constraints
from graphs.ir import Costs, TrainingGraph
from graphs.links import Link
from graphs.order import check_order
from scheduler.errors import PlanFormatError
from scheduler.export.files import write_whole
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status, Step
from solvers.validate import validate

if TYPE_CHECKING:
    from scheduler.plan import Plan

PlanT = TypeVar("PlanT", bound="Plan")

SCHEMA_VERSION: Final = 1
_FORMAT: Final = "checkpoint-scheduler plan"


def to_dict(plan: Plan) -> dict[str, Any]:
    """What :meth:`scheduler.plan.Plan.to_dict` returns."""
    solution = {f.name: getattr(plan.solution, f.name) for f in dataclasses.fields(Solution)}
    return {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "device": plan.device,
        "versions": dict(plan.versions),
        "assumptions": list(plan.assumptions),
        "budget_bytes": plan.budget_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "static": dict(plan.static),
        "link": None if plan.link is None else plan.link.as_dict(),
        "host_bytes": plan.host_bytes,
        "constraints": plan.constraints.to_dict(),
        "fingerprint": plan.graph.fingerprint,
        "solution": solution | {"status": plan.status.value, "steps": [_pack(step) for step in solution["steps"]]},
        "costs": {
            "device": plan.costs.device,
            "source": plan.costs.source,
            "time_ns": list(plan.costs.time_ns),
            "workspace_bytes": list(plan.costs.workspace_bytes),
        },
        "graph": plan.graph.to_dict(),
    }


def from_dict(cls: type[PlanT], data: Mapping[str, Any]) -> PlanT:
    """Inverse of :func:`to_dict`.

    Raises:
        PlanFormatError: not a plan, another schema version, a missing field, or contents that do not match.

    """
    if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
        raise PlanFormatError("not a plan saved by this package")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise PlanFormatError(
            f"the plan has schema_version {data.get('schema_version')!r} and this version of the package reads "
            f"{SCHEMA_VERSION}: plan again, or use the version that saved it"
        )
    try:
        plan = _from_fields(cls, data)
        validate(plan.problem, plan.solution)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PlanFormatError(f"the plan is damaged: {error!r}") from error
    if plan.graph.fingerprint != data["fingerprint"]:
        raise PlanFormatError("the plan is damaged: its graph does not have the fingerprint that was saved with it")
    return plan


def _from_fields(cls: type[PlanT], data: Mapping[str, Any]) -> PlanT:
    solution, costs = data["solution"], data["costs"]
    graph = TrainingGraph.from_dict(data["graph"])
    if graph.order:
        check_order(graph.captured, graph.order)
    plan = cls(
        graph=graph,
        costs=Costs(
            time_ns=tuple(costs["time_ns"]),
            workspace_bytes=tuple(costs["workspace_bytes"]),
            device=costs["device"],
            source=costs["source"],
            order=graph.order,
        ),
        solution=Solution(
            **solution
            | {"status": Status(solution["status"]), "steps": tuple(_unpack(step) for step in solution["steps"])}
        ),
        budget_bytes=data["budget_bytes"],
        static=data["static"],
        device=data["device"],
        versions=data["versions"],
        assumptions=tuple(data["assumptions"]),
        link=Link(**data["link"]) if data.get("link") else None,  # absent in plans of versions without
        host_bytes=data.get("host_bytes", 0),
        constraints=Constraints.from_dict(data.get("constraints", {})),
    )
    if data["measured_peak_bytes"] is not None:
        plan.record_measured_peak(data["measured_peak_bytes"])
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan; the file appears whole or not at all."""
    write_whole(path, json.dumps(to_dict(plan), separators=(",", ":")).encode())


def load(cls: type[PlanT], path: str | os.PathLike[str]) -> PlanT:
    """Read a plan that :func:`save` wrote. Raises :class:`PlanFormatError` or ``OSError``, naming the file."""
    raw = pathlib.Path(path).read_bytes()
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise PlanFormatError(f"{path} is not a saved plan: it is not JSON ({error})") from error
    try:
        return from_dict(cls, data)
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from error


def _pack(step: Step) -> list[str | int]:
    return [type(step).__name__.lower(), step.op if isinstance(step, Compute) else step.storage]


def _unpack(packed: list[Any]) -> Step:
    name, index = packed[0], int(packed[1])
    match name:
        case "compute":
            return Compute(index)
        case "free":
            return Free(index)
        case "offload":
            return Offload(index)
        case "prefetch":
            return Prefetch(index)
    raise ValueError(f"unknown step {name!r}")
