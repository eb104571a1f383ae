"""From a captured step to a validated plan: costs, problem, solver, independent replay."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import numbers
from collections.abc import Mapping, Sequence

import torch

from graphs.constraints import Constraints
from graphs.costs.devices import DeviceSpec, device_spec
from graphs.costs.link import measured_link
from graphs.costs.profiled import profiled
from graphs.costs.roofline import roofline
from graphs.ir import Costs, StorageKind, TrainingGraph
from graphs.joint import Capture
from graphs.links import Link
from scheduler.blame import blame
from scheduler.errors import Infeasible
from scheduler.memory import free_bytes
from scheduler.ordering import OrderedStep, Solver, solve_in_orders
from scheduler.plan import Plan
from scheduler.progress import quiet_progress
from scheduler.runtime.host_pool import Slot
from scheduler.runtime.transfers import CudaTransfers, ThreadTransfers, Transfers
from solvers.auto import AutoSolver
from solvers.bounds import floor_lower_bound
from solvers.problem import Problem
from solvers.solution import Solution
from solvers.store_all import keep_all_peak
from solvers.validate import validate

logger = logging.getLogger(__name__)

#: Share of the free memory that ``budget_gb=None`` leaves unused: fragmentation and library workspaces take some.
HEADROOM = 0.05

#: Share of the host's free memory that copies may take where ``host_budget_gb`` does not say.
HOST_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a step is planned.

    Attributes:
        budget_bytes: most bytes live at once, or ``None``: the device's free memory less :data:`HEADROOM`.
        unlimited: no budget at all, rather than the device's free memory.
        solver: ``"auto"`` (the portfolio) or an object with ``solve(problem)``.
        time_limit_s: bound on the solver's time, in seconds.
        gap: relative gap to the lower bound at which the solver may stop.
        costs: ``"profiled"`` (measured on the device), ``"roofline"`` (of ``device_spec``), or costs made elsewhere.
        device_spec: device of the roofline, by name or figures.
        constraints: what a plan must not do with some tensors.
        dynamic: ``"bucket"``: a schedule that is known serves another shape where it fits; ``None``: each is solved.
        allow_graph_breaks: capture in several pieces what is not one graph.
        offload: whether storages may be copied to the host: ``False``, ``"auto"`` (where that is faster, and the
            device has a link) or ``True`` (the same, and an error where there is no link).
        link: what copies them; ``None``: the device's, measured.
        host_bytes: the most bytes of copies; ``None``: :data:`HOST_SHARE` of the host's free memory.

    """

    budget_bytes: int | None = None
    unlimited: bool = False
    solver: str | Solver = "auto"
    time_limit_s: float = 60.0
    gap: float = 0.005
    costs: str | Costs = "profiled"
    device_spec: str | DeviceSpec | None = None
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    dynamic: str | None = None
    allow_graph_breaks: bool = False
    offload: bool | str = False
    link: Link | None = None
    host_bytes: int | None = None

    def check(self) -> None:
        """Refuse what cannot be meant, before anything is captured."""
        if self.solver != "auto" and not callable(getattr(self.solver, "solve", None)):
            raise ValueError(f"solver={self.solver!r}: give 'auto' or an object with solve(problem) -> Solution")
        if not isinstance(self.costs, Costs) and self.costs not in ("profiled", "roofline"):
            raise ValueError(f"costs={self.costs!r}: give 'profiled', 'roofline' or a graphs.ir.Costs")
        if self.dynamic not in (None, "bucket"):
            raise ValueError(f"dynamic={self.dynamic!r}: give None or 'bucket'")
        if self.allow_graph_breaks and self.dynamic is not None:
            raise ValueError("dynamic= and allow_graph_breaks=True do not go together: pieces are planned per shape")
        self._check_offload()
        if not (isinstance(self.time_limit_s, numbers.Real) and self.time_limit_s > 0):
            raise ValueError(f"time_limit_s={self.time_limit_s!r}: give a positive number of seconds")
        if not (isinstance(self.gap, numbers.Real) and self.gap >= 0):
            raise ValueError(f"gap={self.gap!r}: give a number of at least 0 (0.005 is half a per cent)")
        if isinstance(self.device_spec, str):
            device_spec(self.device_spec)

    def _check_offload(self) -> None:
        """Refuse options of the host tier that do not go together."""
        if self.offload not in (False, True, "auto"):
            raise ValueError(f"offload={self.offload!r}: give True, False or 'auto'")
        if self.offload and (self.allow_graph_breaks or self.dynamic is not None):
            raise ValueError("offload= goes neither with allow_graph_breaks=True nor with dynamic='bucket'")
        if not self.offload and (self.link is not None or self.host_bytes is not None):
            raise ValueError("link= and host_budget_gb= say how to copy to the host: give offload='auto' with them")


def make_plan(capture: Capture, static: Mapping[str, int], settings: Settings) -> Plan:
    """Plan a captured step, in the order of its capture or in another (see :mod:`scheduler.ordering`).

    Args:
        capture: the step.
        static: bytes resident throughout, by category.
        settings: budget, solver, costs.

    Raises:
        Infeasible: no plan was found within the budget.

    """
    step = OrderedStep(capture.graph, cost_model(capture, settings))
    problem = problem_of(*step, static)
    problem = problem.with_budget(budget_of(problem, capture, static, settings))
    problem = with_host_tier(problem, capture, settings)
    found = solve_in_orders(step, problem, functools.partial(solver_of, settings))
    solution, problem = found.solution, found.problem
    logger.info("%s: %s in %.2f s by %s", capture.graph.name, solution.status, solution.solve_seconds, solution.solver)
    if not solution.status.has_plan:
        raise infeasible(problem, solution, found.step.graph)
    validate(problem, solution)
    plan = plan_from(*found.step, solution, budget_bytes=problem.budget_bytes, static=static, settings=settings)
    return dataclasses.replace(plan, link=problem.link, host_bytes=problem.host_bytes)


def with_host_tier(problem: Problem, capture: Capture, settings: Settings) -> Problem:
    """The problem with the link and the host memory that the settings stand for.

    Raises:
        ValueError: offloading is asked for, and there is no link: the CPU's must be stated.

    """
    if not settings.offload:
        return problem
    link = settings.link
    if link is None and capture.device.type == "cuda" and torch.cuda.is_available():
        link = measured_link(capture.device)
    if link is None:
        if settings.offload is True:
            raise ValueError(f"offload=True on {capture.device}: state the link, such as link='25GB/s'")
        logger.warning(
            "offload='auto' on %s without a link: nothing is copied; state one, such as link='25GB/s'", capture.device
        )
        return problem
    host = settings.host_bytes
    if host is None:
        host = int(HOST_SHARE * free_bytes(torch.device("cpu")))
    return dataclasses.replace(problem.with_link(link, host), movable=Problem.movable_of(capture.graph))


def transfers_of(capture: Capture, plan: Plan, slots: Sequence[Slot]) -> Transfers:
    """What moves the storages of a plan: streams of a CUDA device, or threads at the plan's bandwidth on the CPU."""
    if capture.device.type == "cuda":
        return CudaTransfers(slots, capture.device)
    assert plan.link is not None
    return ThreadTransfers(slots, plan.link)


def problem_of(graph: TrainingGraph, costs: Costs, static: Mapping[str, int]) -> Problem:
    """The scheduling problem of a step, with a budget of 0."""
    return Problem.from_graph(graph, costs, 0, static_bytes=sum(static.values()))


def budget_of(problem: Problem, capture: Capture, static: Mapping[str, int], settings: Settings) -> int:
    """The budget that the settings stand for, in bytes."""
    if settings.unlimited:
        return keep_all_peak(problem)
    if settings.budget_bytes is not None:
        return settings.budget_bytes
    return sum(static.values()) + int(free_bytes(capture.device) * (1 - HEADROOM))


def plan_from(
    graph: TrainingGraph,
    costs: Costs,
    solution: Solution,
    *,
    budget_bytes: int,
    static: Mapping[str, int],
    settings: Settings,
    notes: tuple[str, ...] = (),
) -> Plan:
    """A plan with what it was made with; ``notes`` are further sentences on what its figures rest on."""
    return Plan(
        graph=graph,
        costs=costs,
        solution=solution,
        budget_bytes=None if settings.unlimited else budget_bytes,
        static=static,
        device=costs.device,
        versions={
            "torch": torch.__version__,
            "checkpoint-scheduler": importlib.metadata.version("checkpoint-scheduler"),
        },
        assumptions=(*_assumptions(graph), *costs.notes, *notes),
        constraints=settings.constraints,
    )


def cost_model(capture: Capture, settings: Settings) -> Costs:
    """Costs of each op in the order of the capture, measured or estimated as the settings say."""
    if isinstance(settings.costs, Costs):
        if len(settings.costs.time_ns) != len(capture.graph.ops):
            raise ValueError(f"costs of {len(settings.costs.time_ns)} ops for a step of {len(capture.graph.ops)} ops")
        return settings.costs.in_order(())
    if settings.costs == "profiled":
        with quiet_progress(f"timing the ops of {capture.graph.name} on {capture.device}") as show:
            costs = profiled(capture.nodes, capture.device, progress=show)
    else:
        costs = roofline(capture.nodes, settings.device_spec or "cpu")
    return _with_workspaces(capture, costs)


def _with_workspaces(capture: Capture, costs: Costs) -> Costs:
    """Count what no kernel allocates: sums of tangents, and the generator's state while a random op is replayed."""
    workspace = list(costs.workspace_bytes)
    workspace[capture.tangents_op] += capture.summed_bytes
    for op, recording in capture.rng_state_ops.items():
        state = capture.graph.ops[recording].outputs[0]
        workspace[op] += capture.graph.storages[state].bytes
    return dataclasses.replace(costs, workspace_bytes=tuple(workspace))


def solver_of(settings: Settings, share: float = 1.0) -> Solver:
    """The solver that the settings name; the portfolio has that share of the time limit."""
    if isinstance(settings.solver, str):
        return AutoSolver(time_limit_s=share * settings.time_limit_s, gap=settings.gap)
    return settings.solver


def infeasible(problem: Problem, solution: Solution, graph: TrainingGraph) -> Infeasible:
    """The error that says how much a step needs at least, which op binds, and which constraints of the user's do."""
    bound = floor_lower_bound(problem)
    blamed = blame(problem, graph)
    detail = "" if solution.floor_bytes is not None else solution.message
    return Infeasible(
        budget_bytes=problem.budget_bytes,
        static_bytes=problem.static_bytes,
        floor_bytes=solution.floor_bytes,
        floor_lower_bound_bytes=solution.floor_lower_bound_bytes or bound.bytes,
        floor_without_copies_bytes=solution.floor_without_copies_bytes,
        binding_op=problem.op_names[bound.op],
        binding_module=problem.op_modules[bound.op],
        detail=" ".join(part for part in (detail, blamed.sentence) if part),
        constraints=blamed.binding,
    )


def _assumptions(graph: TrainingGraph) -> tuple[str, ...]:
    """What a measurement must respect to find the predicted peak."""
    kinds = {s.kind for s in graph.storages if s.bytes}
    return ("outputs of the model are held until the step ends",) if StorageKind.OUTPUT in kinds else ()
