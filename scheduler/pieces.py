"""A step that is captured in several pieces, because the module's code breaks the graph, under one budget.

The pieces run forward in the order 1 … n and backward in the order n … 1. While piece i runs, in either half,

    live ≤ common + extra_i + peak_i + Σ_{j<i} (kept_j + extra_j) + Σ_{j>i} (left_j + extra_j)

where ``common`` is resident throughout (parameters, gradients, inputs, ...), ``peak`` the most that a piece holds of
its own, ``kept`` what it holds between its forward and its backward, ``left`` what remains of it after its backward
(its results and gradients), and ``extra`` the inputs that it got from code between the pieces. A path, that is a
sequence of pieces in one call, keeps the budget if this holds for each of its pieces. It is checked before each piece
runs. The sum is cautious: a gradient handed from one piece to another counts twice. What code between the pieces
allocates and does not hand on is not in it.

The pieces come to light one by one, while the first step runs. So each is planned at its floor first; when a call has
shown its path, the memory that is left is given to the pieces of it, those that recompute most first, and the next call
captures them anew with these plans. Each piece keeps the order of its capture (:mod:`scheduler.ordering` is for whole
steps).
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from graphs._torch import storage_identity
from graphs.joint import Capture
from scheduler.blame import blame_parts
from scheduler.errors import Infeasible
from scheduler.plan import Plan
from scheduler.planner import Settings, budget_of, cost_model, plan_from, problem_of, solver_of
from scheduler.undo import Before
from scheduler.units import format_bytes
from solvers.bounds import find_floor
from solvers.problem import Problem
from solvers.solution import Compute, Free, Solution
from solvers.store_all import StoreAllSolver
from solvers.validate import validate

logger = logging.getLogger(__name__)

#: Category of :attr:`scheduler.Plan.static` for what the other pieces of the step hold.
OTHER_PIECES: Final = "other pieces"

_CAUTIOUS: Final = "the graph breaks: what code between the pieces allocates and does not hand on is not counted"
_SHARES: Final = (1.0, 0.75, 0.5, 0.25)  # of the way from a piece's floor to what is left for it


@dataclasses.dataclass(eq=False)
class Piece:
    """One piece of a step.

    Attributes:
        plan: what it runs, with what the rest of the step holds meanwhile as static bytes.
        problem: its scheduling problem, without static bytes and without a budget.
        solution: the schedule of ``plan``, as an answer to ``problem``.
        extra: bytes of inputs that neither the module, nor its call, nor an earlier piece accounts for.

    """

    plan: Plan
    problem: Problem
    solution: Solution
    extra: int

    @property
    def peak(self) -> int:
        """Most bytes of its own that are live at once."""
        return self.solution.peak_bytes

    @property
    def kept(self) -> int:
        """Bytes of its own between its forward and its backward."""
        resident: set[int] = set()
        for step in self.solution.steps:
            if isinstance(step, Free):
                resident.discard(step.storage)
            elif step == Compute(self.problem.forward_ops):
                break
            elif isinstance(step, Compute):
                resident.update(self.problem.outputs[step.op])
        return sum(self.problem.storage_bytes[s] for s in resident)

    @property
    def left(self) -> int:
        """Bytes of its results and gradients, which stay when its backward has run."""
        return sum(self.problem.storage_bytes[s] for s in self.problem.live_at_end)

    def placed(self, common: Mapping[str, int], taken: int, budget: int) -> Plan:
        """Its plan where the rest of the step takes so many bytes meanwhile."""
        static = {**common, OTHER_PIECES: taken - sum(common.values())}
        solution = dataclasses.replace(self.solution, peak_bytes=self.peak + taken)
        plan = dataclasses.replace(self.plan, solution=solution, static=static)
        validate(self.problem.with_static(taken).with_budget(budget), solution)
        return plan


Path = tuple[Piece, ...]


class Pieces:
    """The pieces of one module's steps, and how they share its budget.

    Args:
        settings: how to plan.

    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.budget = 0
        self.common: Mapping[str, int] = {}
        self._known: dict[str, Piece] = {}
        self._checked: set[Path] = set()  # paths that keep the budget, and their beginnings
        self._whole: dict[Path, Plan] = {}  # of each complete path, the plan of the piece where most is needed
        self._last: Plan | None = None
        self._call = threading.local()

    def begin(self) -> None:
        """A call of the module starts."""
        self._call.path = ()
        self._call.results = []
        self._call.captured = False
        self._call.before = None

    def note(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Note what a refusal of a later piece is to put back, where no piece of the call has run yet."""
        if self.is_first():
            self._call.before = Before.record(modules, device)

    def undo(self) -> None:
        """The call is refused: put buffers and random streams back to where they were when it began."""
        before: Before | None = self._call.before
        if before is not None:
            before.restore()

    def plan(self, capture: Capture, common: Mapping[str, int], extra: int) -> Plan:
        """The plan of a piece that has just been captured.

        Args:
            capture: the piece.
            common: bytes that are resident throughout the step, by category.
            extra: bytes of further inputs of the piece.

        Raises:
            Infeasible: not even the floors of the pieces so far fit the budget together.

        """
        self._raise_common(common)
        known = self._known.get(capture.graph.fingerprint)
        if known is not None:
            known.extra = max(known.extra, extra)
            return known.plan
        costs = cost_model(capture, self.settings)
        problem = problem_of(capture.graph, costs, {})
        if not self._known:
            self.budget = budget_of(problem_of(capture.graph, costs, common), capture, common, self.settings)
        solution = find_floor(problem, time_limit_s=self.settings.time_limit_s).plan
        template = plan_from(
            capture.graph,
            costs,
            solution,
            budget_bytes=self.budget,
            static={},
            settings=self.settings,
            notes=(_CAUTIOUS,),
        )
        piece = Piece(template, problem, solution, extra)
        path = (*self._call.path, piece)
        self._check(path)
        piece.plan = piece.placed(self.common, self._taken(path)[-1], self.budget)
        self._known[capture.graph.fingerprint] = piece
        return piece.plan

    def around(self, compiled: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        """Wrap a compiled piece so that its place in the path is checked before it runs."""
        piece = self._known[plan.graph.fingerprint]
        is_new = True

        def run(*inputs: Any) -> Any:
            nonlocal is_new
            if is_new:
                is_new, self._call.captured = False, True
                gc.collect()  # the capture of a graph that breaks leaves cycles that hold tensors
            path = (*self._call.path, piece)
            self._check(path)
            self._call.path = path
            outputs = compiled(*inputs)
            self._call.results.extend(weakref.ref(o) for o in outputs if isinstance(o, torch.Tensor))
            return outputs

        return run

    def is_first(self) -> bool:
        """Whether no piece of the call has run yet."""
        return not self._call.path

    def results(self) -> set[int]:
        """Identities of the storages that earlier pieces of the call have returned and that still live."""
        alive = [result() for result in self._call.results]
        return {storage_identity(t) for t in alive if t is not None}

    def whole(self) -> Plan | None:
        """The plan of the piece at which the step that was called last needs most."""
        return self._last

    def end(self) -> bool:
        """A call of the module has ended; whether the next one should capture anew, for better plans."""
        path: Path = self._call.path
        self._call.before = None
        if self._call.captured:
            gc.collect()
        if not path:
            return False
        is_new = path not in self._whole
        if is_new:
            self._whole[path] = max(self._placed(path), key=lambda plan: plan.peak_bytes)
        self._last = self._whole[path]
        return is_new and self._share(path)

    def _raise_common(self, common: Mapping[str, int]) -> None:
        """Count the most that was ever resident throughout, of each category."""
        most = {name: max(size, self.common.get(name, 0)) for name, size in common.items()}
        if most != self.common:
            self.common = most
            self._checked.clear()
            self._whole.clear()

    def _check(self, path: Path) -> None:
        """Refuse a path that does not keep the budget."""
        if path in self._checked:
            return
        peak = self._peak(path)
        if peak > self.budget:
            parts = [(piece.problem, piece.plan.graph) for piece in path]
            blamed = blame_parts(parts, lambda problems: self._peak(self._at_floors(path, problems)) <= self.budget)
            detail = (
                f"Breaks divide the graph; the first {len(path)} pieces alone need {format_bytes(peak)}, each at the "
                "least memory for which a plan was found. Buffers and random streams are where they were."
            )
            raise Infeasible(
                budget_bytes=self.budget,
                static_bytes=sum(self.common.values()),
                detail=" ".join(part for part in (detail, blamed.sentence) if part),
                constraints=blamed.binding,
            )
        self._checked.add(path)

    def _at_floors(self, path: Path, problems: Sequence[Problem]) -> Path:
        """A path whose pieces solve other problems, those that changed at the least memory that they need."""
        changed = []
        for piece, problem in zip(path, problems, strict=True):
            if problem != piece.problem:
                solution = find_floor(problem, time_limit_s=self.settings.time_limit_s).plan
                piece = dataclasses.replace(piece, problem=problem, solution=solution)  # noqa: PLW2901
            changed.append(piece)
        return tuple(changed)

    def _taken(self, path: Path) -> list[int]:
        """What each piece of a path finds taken by the rest of the step, its own extra inputs included."""
        taken, before, after = [], sum(self.common.values()), sum(p.left + p.extra for p in path)
        for piece in path:
            after -= piece.left + piece.extra
            taken.append(before + after + piece.extra)
            before += piece.kept + piece.extra
        return taken

    def _peak(self, path: Path) -> int:
        return max(taken + piece.peak for taken, piece in zip(self._taken(path), path, strict=True))

    def _placed(self, path: Path) -> list[Plan]:
        return [p.placed(self.common, t, self.budget) for t, p in zip(self._taken(path), path, strict=True)]

    def _share(self, path: Path) -> bool:
        """Give what a path leaves of the budget to its pieces; whether any plan changed."""
        changed = False
        for piece in sorted(dict.fromkeys(path), key=lambda p: -p.plan.added_time_ns):
            taken = max(t for t, p in zip(self._taken(path), path, strict=True) if p is piece)
            changed |= self._improve(piece, self.budget - taken)
        if changed:
            self._whole.clear()
            self._whole[path] = max(self._placed(path), key=lambda plan: plan.peak_bytes)
        for plan, piece in zip(self._placed(path), path, strict=True):
            piece.plan = plan
        return changed

    def _improve(self, piece: Piece, limit: int) -> bool:
        """Find a faster schedule for a piece with which every known path keeps the budget: keeping all, or solved."""
        least = piece.peak
        solver = solver_of(self.settings)
        if piece.solution.step_time_ns <= piece.problem.keep_all_time_ns:
            return False
        if self._take(piece, StoreAllSolver().solve(piece.problem.with_budget(limit))):
            return True
        budgets = [least + int(share * (limit - least)) for share in _SHARES]
        return any(self._take(piece, solver.solve(piece.problem.with_budget(b))) for b in budgets)

    def _take(self, piece: Piece, solution: Solution) -> bool:
        before = piece.solution
        if not solution.status.has_plan or solution.step_time_ns >= before.step_time_ns:
            return False
        piece.solution = solution
        if any(self._peak(path) > self.budget for path in self._checked):
            piece.solution = before
            return False
        return True
