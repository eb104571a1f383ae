"""A plan: what to keep and what to recompute in one training step, what that costs, and how far from the least it is.

A :class:`Plan` holds the captured graph, the costs it was planned with and the solver's solution; everything a person
asks about is computed from those three. It holds no tensor and this module imports no torch, so that a plan can be made
on one machine, saved, looked at on a second and run on a third.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from graphs.ir import Costs, Op, Storage, TrainingGraph
from graphs.links import Link
from scheduler.decisions import Action, Decision, boundary_of, decide
from scheduler.errors import PlanFormatError, PlanMismatch
from scheduler.export.files import write_whole
from scheduler.report.host import HostUse, host_use
from scheduler.report.timeline import Category, Sample, timeline
from scheduler.units import format_bytes
from solvers.problem import Problem
from solvers.simulate import Simulation, simulate
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status, Step
from solvers.store_all import store_all_steps
from solvers.validate import validate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn

    from scheduler.explain import Explanation
    from scheduler.export.modules import Applied

__all__ = ["Action", "Category", "Decision", "Plan", "Sample"]

SCHEMA_VERSION: Final = 1
_FORMAT: Final = "checkpoint-scheduler plan"


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
        graph: the captured training step.
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
        """Predicted peak of the step that keeps everything, static bytes included."""
        return simulate(self.problem, store_all_steps(self.problem)).peak_bytes

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
        """No schedule that first executes the ops in this order is faster, however often it recomputes."""
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
        return problem.with_budget(simulate(problem, store_all_steps(problem)).peak_bytes)

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
        """Refuse to run on another graph than the one that was planned.

        Raises:
            PlanMismatch: the graphs' fingerprints differ. The message names the first difference.

        """
        if graph.fingerprint != self.graph.fingerprint:
            raise PlanMismatch(
                f"the plan was made for another training step: {_first_difference(self.graph, graph)}. "
                "Plan again, or run it with the model, batch shapes, dtypes and torch version it was made for."
            )

    def summary(self, width: int | None = None) -> str:
        """The plan as text: headline figures, then a table per module with repeated layers folded.

        Args:
            width: columns to fit; ``None`` for the terminal's, or 100 where there is none.

        """
        from scheduler.report.text import render_summary

        return render_summary(self, width)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw live bytes over the time of the step, and return the Axes.

        Args:
            ax: where to draw; ``None`` makes a figure of its own.

        Raises:
            ImportError: matplotlib is not installed; the message says how to install it.

        """
        from scheduler.report.plots import plot_plan

        return plot_plan(self, ax)

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
        """Plain JSON-ready form, with ``schema_version``."""
        solution = {f.name: getattr(self.solution, f.name) for f in dataclasses.fields(Solution)}
        return {
            "format": _FORMAT,
            "schema_version": SCHEMA_VERSION,
            "device": self.device,
            "versions": dict(self.versions),
            "assumptions": list(self.assumptions),
            "budget_bytes": self.budget_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "static": dict(self.static),
            "link": None if self.link is None else self.link.as_dict(),
            "host_bytes": self.host_bytes,
            "fingerprint": self.graph.fingerprint,
            "solution": solution | {"status": self.status.value, "steps": [_pack(step) for step in solution["steps"]]},
            "costs": {
                "device": self.costs.device,
                "source": self.costs.source,
                "time_ns": list(self.costs.time_ns),
                "workspace_bytes": list(self.costs.workspace_bytes),
            },
            "graph": self.graph.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`.

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
            plan = cls._from_fields(data)
            validate(plan.problem, plan.solution)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise PlanFormatError(f"the plan is damaged: {error!r}") from error
        if plan.graph.fingerprint != data["fingerprint"]:
            raise PlanFormatError("the plan is damaged: its graph does not have the fingerprint that was saved with it")
        return plan

    @classmethod
    def _from_fields(cls, data: Mapping[str, Any]) -> Self:
        solution, costs = data["solution"], data["costs"]
        plan = cls(
            graph=TrainingGraph.from_dict(data["graph"]),
            costs=Costs(
                time_ns=tuple(costs["time_ns"]),
                workspace_bytes=tuple(costs["workspace_bytes"]),
                device=costs["device"],
                source=costs["source"],
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
        )
        if data["measured_peak_bytes"] is not None:
            plan.record_measured_peak(data["measured_peak_bytes"])
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole or not at all; an earlier one is replaced."""
        write_whole(path, json.dumps(self.to_dict(), separators=(",", ":")).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanFormatError: the file is something else, damaged, or of another schema version.
            OSError: it cannot be read.

        """
        raw = pathlib.Path(path).read_bytes()
        try:
            data = json.loads(raw)
        except ValueError as error:
            raise PlanFormatError(f"{path} is not a saved plan: it is not JSON ({error})") from error
        try:
            return cls.from_dict(data)
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


def _first_difference(planned: TrainingGraph, given: TrainingGraph) -> str:
    """In words, the first thing in which two graphs of different fingerprint differ."""
    for old, new in zip(planned.ops, given.ops, strict=False):
        if (old.target, old.phase, old.recomputable) != (new.target, new.phase, new.recomputable):
            return f"op {old.index} was {_describe_op(old)} and is {_describe_op(new)}"
    if len(planned.ops) != len(given.ops):
        extra = (
            collections.Counter(o.target for o in given.ops) - collections.Counter(o.target for o in planned.ops)
        ) or (collections.Counter(o.target for o in planned.ops) - collections.Counter(o.target for o in given.ops))
        names = ", ".join(sorted(extra))
        return f"it had {len(planned.ops)} ops and this one has {len(given.ops)} (the difference: {names})"
    for before, after in zip(planned.storages, given.storages, strict=False):
        if (before.bytes, before.kind, before.producer) != (after.bytes, after.kind, after.producer):
            return f"storage {before.index} was {_describe_storage(before)} and is {_describe_storage(after)}"
    for old, new in zip(planned.ops, given.ops, strict=True):
        if (old.inputs, old.outputs) != (new.inputs, new.outputs):
            return f"op {old.index}, {_describe_op(old)}, reads or makes other storages"
    return f"it had {len(planned.storages)} storages and this one has {len(given.storages)}"


def _describe_op(op: Op) -> str:
    where = f" in {op.module_path}" if op.module_path else ""
    return f"{op.target}{where} ({op.phase}{'' if op.recomputable else ', never run again'})"


def _describe_storage(storage: Storage) -> str:
    where = f" in {storage.module_path}" if storage.module_path else ""
    return f"{storage.kind} {storage.name}{where} of {format_bytes(storage.bytes)}"
