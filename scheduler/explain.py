"""Why a plan does what it does with the tensors of one module.

Three questions are answered from the plan itself. *What happens* to a tensor is its decision. *Which constraint binds*
is read off the timeline: while a dropped tensor is away, the budget has some least headroom, at some op; keeping the
tensor would add its bytes there. *What another GB would buy* is the shadow price of memory, found by solving the same
step again with a little more and a little less.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import TYPE_CHECKING, Final

from scheduler.decisions import Action, Decision
from scheduler.errors import Infeasible
from scheduler.naming import did_you_mean, module_paths
from scheduler.units import format_bytes, format_time
from solvers.solution import Compute, Free, Prefetch

if TYPE_CHECKING:
    from scheduler.plan import Plan

_GB: Final = 10**9
_BINDS: Final = "The budget binds"
_AWAY: Final = (Action.RECOMPUTED, Action.OFFLOADED)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorExplanation:
    """One tensor of the module.

    Attributes:
        decision: what the plan does with it, and what that costs.
        target: the op that makes it, for example ``aten.mm.default``.
        source: ``file:line`` of that op in the user's code, where known.
        binding: which constraint binds, in words; empty where none does.
        tightest_op: name of the op at which memory is shortest while the tensor is away; empty unless it is away.
        headroom_bytes: budget less live bytes there; ``None`` unless it is away.
        copies: when it is copied to the host and back, and what waits for that; empty unless offloaded.

    """

    decision: Decision
    target: str
    source: str
    binding: str
    tightest_op: str = ""
    headroom_bytes: int | None = None
    copies: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ShadowPrice:
    """What a little more memory would save, and a little less would cost.

    Attributes:
        delta_bytes: how much more and less was tried.
        saved_ns: step time saved with so much more.
        added_ns: step time added with so much less; ``None`` where no plan was found.

    """

    delta_bytes: int
    saved_ns: int
    added_ns: int | None

    def sentence(self) -> str:
        """For a person."""
        size = format_bytes(self.delta_bytes)
        more = f"Another {size} would save {format_time(self.saved_ns)} of the step"
        less = (
            "no plan was found with so much less"
            if self.added_ns is None
            else (f"so much less would add {format_time(self.added_ns)}")
        )
        return f"{more}; {less}."


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :meth:`scheduler.plan.Plan.explain` returns; ``print`` it, or read the fields.

    Attributes:
        path: what was asked for.
        tensors: the activations made in the forward of the modules under that path, in order.
        peak: where the step's peak is, in words.
        price: ``None`` without a budget, or where it was not asked for.

    """

    path: str
    tensors: tuple[TensorExplanation, ...]
    peak: str
    price: ShadowPrice | None

    def total(self, action: Action) -> int:
        """Bytes of the tensors with which the plan does this."""
        return sum(t.decision.bytes for t in self.tensors if t.decision.action is action)

    def __str__(self) -> str:
        """As text: totals, one paragraph per kept or recomputed tensor, the peak, the price of memory."""
        totals = ", ".join(f"{format_bytes(self.total(a))} {a.value}" for a in Action if self.total(a))
        lines = [f"{self.path or '(model)'}: {totals or 'no activations'}"]
        before = ""
        for t in self.tensors:
            d = t.decision
            if d.action is Action.TEMPORARY:
                continue
            where = f", {'/'.join(t.source.split('/')[-2:])}" if t.source else ""
            lines.append(f"  {d.name} ({t.target} in {d.module_path or '(model)'}{where}), {format_bytes(d.bytes)}:")
            lines.append(f"    {d.action.value}: {d.reason}.")
            binds_at = t.tightest_op if t.binding.startswith(_BINDS) else ""
            binding = f"{_BINDS} there too." if binds_at and binds_at == before else t.binding
            lines += [f"    {sentence}" for sentence in (t.copies, binding) if sentence]
            before = binds_at
        temporary = sum(t.decision.action is Action.TEMPORARY for t in self.tensors)
        if temporary:
            lines.append(f"  {temporary} more are temporary: gone before the backward.")
        lines.append(self.peak)
        if self.price is not None:
            lines.append(self.price.sentence())
        return "\n".join(lines)


def explain(
    plan: Plan, path: str, *, price: bool = True, delta_bytes: int | None = None, time_limit_s: float = 20.0
) -> Explanation:
    """What happens to each tensor of a module, and why.

    Args:
        plan: the plan.
        path: dotted module path (everything below it counts too), or a pattern such as ``*.mlp``; ``""`` for all.
        price: whether to solve again for the shadow price of memory.
        delta_bytes: how much more and less to try; by default 1 GB, or a tenth of a budget below 10 GB.
        time_limit_s: bound on each of the two solves, in seconds.

    Raises:
        ValueError: no module of the step has this path. The message suggests the nearest.

    """
    chosen = decisions_of(plan, path)
    away = _absences(plan, {d.storage for d in chosen if d.action in _AWAY})
    tensors = tuple(
        dataclasses.replace(_explained(plan, d, away.get(d.storage, [])), copies=_copies_of(plan, d)) for d in chosen
    )
    bought = shadow_price(plan, delta_bytes, time_limit_s=time_limit_s) if price else None
    return Explanation(path, tensors, _peak_sentence(plan), bought)


def decisions_of(plan: Plan, path: str) -> list[Decision]:
    """What the plan does with each activation made in the forward of a module, or of those that match a pattern.

    Raises:
        ValueError: no module of the step has this path. The message suggests the nearest.

    """
    chosen = [d for d in plan.decisions if _in_forward(plan, d) and under(d.module_path, path)]
    if not chosen and not any(under(op.module_path, path) for op in plan.graph.ops):
        raise ValueError(_unknown(plan, path))
    return chosen


def under(module_path: str, path: str) -> bool:
    """Whether a module is the one named, below it, or matched by it (or below a match) as a pattern."""
    if not path or module_path == path or module_path.startswith(f"{path}."):
        return True
    return fnmatch.fnmatchcase(module_path, path) or fnmatch.fnmatchcase(module_path, f"{path}.*")


def shadow_price(plan: Plan, delta_bytes: int | None = None, *, time_limit_s: float = 20.0) -> ShadowPrice | None:
    """Solve the plan's step with a little more and a little less memory; ``None`` for a plan without a budget."""
    from scheduler.replan import replan

    if plan.budget_bytes is None:
        return None
    delta = delta_bytes or min(_GB, max(plan.budget_bytes // 10, 1))
    more = replan(plan, plan.budget_bytes + delta, time_limit_s=time_limit_s)
    added: int | None = None
    if plan.budget_bytes > delta:
        try:
            less = replan(plan, plan.budget_bytes - delta, time_limit_s=time_limit_s)
            added = max(0, less.step_time_ns - plan.step_time_ns)
        except Infeasible:
            added = None
    return ShadowPrice(delta, max(0, plan.step_time_ns - more.step_time_ns), added)


def _in_forward(plan: Plan, decision: Decision) -> bool:
    producer = plan.graph.storages[decision.storage].producer
    return producer is not None and producer < plan.graph.forward_ops


def _absences(plan: Plan, storages: set[int]) -> dict[int, list[tuple[int, int]]]:
    """For each storage the stretches of steps in which it is away: from a free to its production or fetch."""
    away: dict[int, list[tuple[int, int]]] = {}
    freed: dict[int, int] = {}
    for position, step in enumerate(plan.graph_steps):
        if isinstance(step, Free) and step.storage in storages:
            freed[step.storage] = position
        elif isinstance(step, Compute | Prefetch):
            for made in plan.graph.ops[step.op].outputs if isinstance(step, Compute) else (step.storage,):
                if made in freed:
                    away.setdefault(made, []).append((freed.pop(made), position))
    return away


def _explained(plan: Plan, decision: Decision, away: list[tuple[int, int]]) -> TensorExplanation:
    op = plan.graph.ops[plan.graph.storages[decision.storage].producer or 0]
    if decision.action not in _AWAY or not away or plan.budget_bytes is None:
        return TensorExplanation(decision, op.target, op.source, "")
    samples = [s for s in plan.samples if any(start < s.step < end for start, end in away)]
    tightest = max(samples, key=lambda s: s.total_bytes, default=None)
    if tightest is None:
        return TensorExplanation(decision, op.target, op.source, "")
    headroom = plan.budget_bytes - tightest.total_bytes
    at = plan.graph.ops[tightest.op]
    place = f"{at.name} of {at.module_path or '(model)'} ({at.phase})"
    size = format_bytes(decision.bytes)
    if decision.bytes > headroom:
        binding = (
            f"{_BINDS}: while {place} runs, {format_bytes(headroom)} of it are free, and keeping this would "
            f"take {size}."
        )
    else:
        binding = (
            f"By itself it would fit ({format_bytes(headroom)} are free at the tightest moment, {place}), but not with "
            f"the others kept: the plan is within {plan.gap:.2%} of the fastest."
        )
    return TensorExplanation(decision, op.target, op.source, binding, at.name, headroom)


def _copies_of(plan: Plan, decision: Decision) -> str:
    """When a tensor is copied, for a person; empty where it is not."""
    copies = [copy for copy in plan.host_use.copies if copy.storage == decision.storage]
    if not copies:
        return ""
    when = "; ".join(
        f"{'to the host' if copy.outward else 'back'} from {format_time(copy.start_ns)} to {format_time(copy.end_ns)}"
        for copy in copies
    )
    late = sum(
        stall.end_ns - stall.start_ns
        for stall in plan.host_use.stalls
        if any(copy.end_ns == stall.end_ns for copy in copies)
    )
    waits = f"computation waits {format_time(late)} for it" if late else "computation does not wait for it"
    return f"On the link {when} of the step; {waits}."


def _peak_sentence(plan: Plan) -> str:
    from scheduler.report.text import peak_sample

    peak = peak_sample(plan)
    if peak is None:
        return "The step has no ops."
    op = plan.graph.ops[peak.op]
    again = " (run again)" if peak.again else ""
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    return (
        f"The peak of the step, {format_bytes(peak.total_bytes)}{budget}, is while {op.name}{again} of "
        f"{op.module_path or '(model)'} runs, in the {op.phase}."
    )


def _unknown(plan: Plan, path: str) -> str:
    known = module_paths(plan.graph)
    hint = did_you_mean(plan.graph, path)
    return f"no module {path!r} in this step.{hint} Its modules have paths such as {', '.join(known[:3])}"
