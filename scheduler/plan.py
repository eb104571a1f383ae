"""A plan: what to keep and what to recompute in one training step, what that costs, and how far from the least it is.

A :class:`Plan` holds the captured graph, the costs it was planned with and the solver's solution; everything a person
asks about is computed from those three. It holds no tensor and this module imports no torch, so that a plan can be made
on one machine, saved, looked at on a second and run on a third.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from graphs.constraints import Constraints
from graphs.ir import Costs, TrainingGraph
from graphs.links import Link
from scheduler import saved
from scheduler.decisions import Action, Decision, boundary_of, decide
from scheduler.differences import changed_versions, first_difference
from scheduler.errors import PlanMismatch
from scheduler.ordering import OrderedStep
from scheduler.report.host import HostUse, host_use
from scheduler.report.timeline import Category, Sample, timeline
from scheduler.units import format_bytes
from solvers.problem import Problem
from solvers.simulate import Simulation, simulate
from solvers.solution import Compute, Free, Offload, Solution, Status, Step
from solvers.store_all import keep_all_peak

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn

    from scheduler.explain import Explanation
    from scheduler.export.modules import Applied
    from scheduler.replan import Sweep

__all__ = ["Action", "Category", "Decision", "Plan", "Sample"]


@dataclasses.dataclass(slots=True)
class _Measurement:
    """The one thing about a plan that is learned after it is made.

    ``settle``, where there is one, ends a measurement whose step has run; what is saved or copied leaves it out.
    """

    peak_bytes: int | None = None
    settle: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Measurement, (self.peak_bytes,)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The schedule of one training step.

    Immutable, and equal to another plan where every field is equal. The exception, on purpose, is
    :attr:`measured_peak_bytes`: it is learned when the plan first runs, recorded by :meth:`record_measured_peak`, and
    takes no part in equality. A copy of a plan shares the immutable parts and keeps a measurement of its own.

    Attributes:
        graph: the captured training step, its ops in the order in which the plan first executes them. That is the
            order of plain training, unless the budget is below the plain peak and another takes less memory:
            ``graph.order`` then says how the ops have moved.
        costs: time and workspace of each op, as the plan was made with.
        solution: what the solver returned. Its steps number storages as in :attr:`problem`, static ones left out;
            :attr:`graph_steps` are the same with the numbers of :attr:`graph`.
        budget_bytes: the most bytes that may be live, static ones included; ``None`` where there is no limit.
        static: bytes that are resident throughout, by what they are for: parameters, buffers, gradients, optimizer,
            inputs, other.
        device: what the plan is for.
        versions: versions of the packages it was made with.
        assumptions: what the figures rest on, a sentence each.
        link: what copies to the host and back; ``None`` where the plan was made without.
        host_bytes: the most bytes of copies on the host.
        constraints: the user's patterns that it was made under. Running the plan captures the step with the same.

    Raises:
        ValueError: the solution has no steps (its status says why), or the costs are not those of the graph.

    """

    graph: TrainingGraph
    costs: Costs
    solution: Solution
    budget_bytes: int | None
    static: Mapping[str, int]
    device: str
    versions: Mapping[str, str]
    assumptions: tuple[str, ...] = ()
    link: Link | None = None
    host_bytes: int = 0
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    _measurement: _Measurement = dataclasses.field(default_factory=_Measurement, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a solution without a plan and costs of another graph; take copies of the mappings."""
        if not self.solution.status.has_plan:
            raise ValueError(f"a plan needs steps, and the solver returned none: {self.solution.status.sentence}")
        if len(self.costs.time_ns) != len(self.graph.ops):
            raise ValueError(f"costs of {len(self.costs.time_ns)} ops for a graph of {len(self.graph.ops)}")
        object.__setattr__(self, "static", dict(self.static))
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "assumptions", tuple(self.assumptions))

    def __hash__(self) -> int:
        """Consistent with equality; the mappings are left out because dicts have no hash."""
        return hash((self.graph.fingerprint, self.solution.steps, self.budget_bytes, self.device))

    def __repr__(self) -> str:
        """One line with the figures, instead of thousands of ops."""
        budget = "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        return (
            f"<Plan of {len(self.graph.ops)} ops: {self.status}, budget {budget}, "
            f"peak {format_bytes(self.peak_bytes)}, overhead {self.overhead:.2%}, gap {self.gap:.2%}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share everything that cannot change; the copy's measurement is its own."""
        copy = dataclasses.replace(self)
        copy._measurement.peak_bytes = self._measurement.peak_bytes  # noqa: SLF001 - the same class
        memo[id(self)] = copy
        return copy

    @property
    def status(self) -> Status:
        """How the solve ended: ``OPTIMAL`` or ``FEASIBLE``."""
        return self.solution.status

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step, static bytes included."""
        return self.solution.peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of the first step that was measured, static bytes included; ``None`` before, or where none could be."""
        if self._measurement.settle is not None:
            self._measurement.settle()
        return self._measurement.peak_bytes

    def record_measured_peak(self, peak_bytes: int) -> None:
        """Note the peak of a run of this plan, in bytes, static ones included. A later record replaces an earlier."""
        self._measurement.peak_bytes = int(peak_bytes)

    def settle_measurement_with(self, settle: Callable[[], None] | None) -> None:
        """Have ``settle`` called before :attr:`measured_peak_bytes` is read, until it is replaced by ``None``."""
        self._measurement.settle = settle

    @property
    def static_bytes(self) -> int:
        """Bytes that are resident throughout and that no schedule can lower."""
        return sum(self.static.values())

    @property
    def step_time_ns(self) -> int:
        """Predicted time of forward and backward under the plan, the optimizer's step not included."""
        return self.solution.step_time_ns

    @property
    def keep_all_time_ns(self) -> int:
        """Predicted time of the step that computes every op once."""
        return sum(self.costs.time_ns)

    @functools.cached_property
    def keep_all_peak_bytes(self) -> int:
        """Predicted peak of the step that keeps everything, in the plan's order, static bytes included."""
        return keep_all_peak(self.problem)

    @functools.cached_property
    def plain_peak_bytes(self) -> int:
        """The same in the order of plain training: greater where the plan runs the ops in a better order."""
        return keep_all_peak(self.captured_problem)

    @functools.cached_property
    def captured_problem(self) -> Problem:
        """:attr:`problem` with the ops in the order of plain training."""
        return self.step.captured.problem_like(self.problem) if self.graph.order else self.problem

    @property
    def step(self) -> OrderedStep:
        """The training step and its costs, in the plan's order."""
        return OrderedStep(self.graph, self.costs)

    @property
    def added_time_ns(self) -> int:
        """Step time beyond that of the keep-all step."""
        return self.step_time_ns - self.keep_all_time_ns

    @property
    def overhead(self) -> float:
        """Added time / keep-all time."""
        return self.added_time_ns / self.keep_all_time_ns if self.keep_all_time_ns else 0.0

    @property
    def lower_bound_ns(self) -> int:
        """No schedule that first executes the ops in the plan's order is faster, however often it recomputes."""
        return self.solution.lower_bound_ns

    @property
    def gap(self) -> float:
        """(step time − lower bound) / lower bound."""
        return self.solution.gap

    @functools.cached_property
    def problem(self) -> Problem:
        """The scheduling problem that the solution answers. Without a budget: with one that keeping all just fits."""
        static = self.static_bytes
        problem = Problem.from_graph(self.graph, self.costs, self.budget_bytes or 0, static_bytes=static)
        movable = Problem.movable_of(self.graph)
        problem = dataclasses.replace(problem, link=self.link, host_bytes=self.host_bytes, movable=movable)
        if self.budget_bytes is not None:
            return problem
        return problem.with_budget(keep_all_peak(problem))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The schedule in execution order, its storages numbered as in :attr:`problem`."""
        return self.solution.steps

    @functools.cached_property
    def graph_steps(self) -> tuple[Step, ...]:
        """The schedule in execution order, its storages numbered as in :attr:`graph`."""
        number = Problem.graph_storages(self.graph)
        return tuple(
            step if isinstance(step, Compute) else dataclasses.replace(step, storage=number[step.storage])
            for step in self.steps
        )

    @functools.cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """What happens to each activation storage, and why."""
        return decide(self.graph, self.costs, self.graph_steps)

    @functools.cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Live bytes by category while each op runs, in execution order."""
        actions = {d.storage: d.action for d in self.decisions}
        starts, static = self.replay.start_ns, self.static_bytes
        return timeline(self.graph, self.costs, self.graph_steps, actions, static_bytes=static, start_ns=starts)

    @functools.cached_property
    def replay(self) -> Simulation:
        """The steps replayed: when each starts, stalls included, and what is live then."""
        return simulate(self.problem, self.steps)

    @functools.cached_property
    def host_use(self) -> HostUse:
        """Copies to the host and back, the time they take on the link, and the stalls that they cause."""
        return host_use(self)

    @property
    def backward_start_ns(self) -> int:
        """Predicted time from the start of the step to the start of its backward, recomputation included."""
        boundary = boundary_of(self.graph, self.graph_steps)
        return max((s.end_ns for s in self.samples if s.step <= boundary), default=0)

    @functools.cached_property
    def is_noop(self) -> bool:
        """Whether nothing is computed twice, nor copied to the host."""
        return all(isinstance(step, Free) for step in self.steps if not isinstance(step, Compute)) and sum(
            isinstance(step, Compute) for step in self.steps
        ) == len(self.graph.ops)

    def check_fits(self, graph: TrainingGraph) -> None:
        """Refuse to run on another graph than the one that was planned, in whatever order.

        Raises:
            PlanMismatch: the graphs' fingerprints differ. The message names the first difference.

        """
        graph, planned = graph.captured, self.graph.captured
        if graph.fingerprint != planned.fingerprint:
            changes = changed_versions(self.versions)
            made = f" It was made with {changes}." if changes else ""
            raise PlanMismatch(
                f"the plan was made for another training step: {first_difference(planned, graph)}. "
                "Plan again, or run it with the model, loss_fn, batch shapes, dtypes and torch version it was made for."
                f"{made}"
            )
        moved = {step.storage for step in self.graph_steps if isinstance(step, Offload)}
        for storage in graph.storages:
            if storage.pinned and storage.index in moved:
                raise PlanMismatch(f"the plan copies {storage.name} to the host, which it may not: {storage.pinned}")

    def summary(self, width: int | None = None) -> str:
        """The plan as text: headline figures, then a table per module with repeated layers folded.

        Args:
            width: columns to fit; ``None`` for the terminal's, or 100 where there is none.

        """
        from scheduler.report.text import render_summary

        return render_summary(self, width)

    def plot_memory(self, ax: Axes | None = None) -> Axes:
        """Draw live bytes over the time of the step, and return the Axes.

        Args:
            ax: where to draw; ``None`` makes a figure of its own.

        Raises:
            ImportError: matplotlib is not installed; the message says how to install it.

        """
        from scheduler.report.plots import plot_plan

        return plot_plan(self, ax)

    plot = plot_memory

    def plot_modules(self, ax: Axes | None = None) -> Axes:
        """Draw what each module keeps, recomputes and offloads, and the time that adds; as :meth:`plot_memory`."""
        from scheduler.report.module_plot import plot_modules

        return plot_modules(self, ax)

    def plot_sweep(self, ax: Axes | None = None, *, sweep: Sweep | None = None) -> Axes:
        """Draw the trade-off between memory and time of this plan's step; as :meth:`plot_memory`.

        Args:
            ax: where to draw.
            sweep: what to draw; ``None`` solves the step at 15 budgets first (see :func:`scheduler.replan.sweep`).

        """
        from scheduler.replan import sweep as sweep_plan
        from scheduler.report.sweep_plot import plot_sweep

        return plot_sweep(sweep or sweep_plan(self), ax)

    def explain(self, path: str, *, price: bool = True) -> Explanation:
        """What happens to each tensor of a module and why; see :func:`scheduler.explain.explain`."""
        from scheduler.explain import explain

        return explain(self, path, price=price)

    def to_sac_policy(self, module: str = "") -> Callable[[], tuple[Any, Any]]:
        """A ``context_fn`` for ``torch.utils.checkpoint``; see :func:`scheduler.export.sac.to_sac_policy`."""
        from scheduler.export.sac import to_sac_policy

        return to_sac_policy(self, module)

    def apply_modules(self, model: nn.Module) -> Applied:
        """Checkpoint whole modules of an eager model; see :func:`scheduler.export.modules.apply_modules`."""
        from scheduler.export.modules import apply_modules

        return apply_modules(self, model)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready form, with ``schema_version``; ``plan.schema.json`` of this package describes it."""
        return saved.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`.

        Raises:
            PlanFormatError: not a plan, another schema version, a missing field, or contents that do not match.

        """
        return saved.from_dict(cls, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole or not at all; an earlier one is replaced."""
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanFormatError: the file is something else, damaged, or of another schema version.
            OSError: it cannot be read.

        """
        return saved.load(cls, path)
