"""Mixed-integer programs in arrays, solved by HiGHS through OR-Tools' MathOpt.

Models here have 10^5 rows; they are built as arrays and handed over as one protocol buffer, since adding rows one
by one through the modelling interface takes longer than solving them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

_log = logging.getLogger(__name__)

# HiGHS accepts points that break a row by this much (rows here are scaled to about 1) and bounds that are off by it.
FEASIBILITY_TOLERANCE = 1e-6


class SolverFailedError(RuntimeError):
    """HiGHS failed for a reason other than infeasibility or a limit."""


class MilpStatus(enum.StrEnum):
    """How the solve of a mixed-integer program ended."""

    SOLVED = "solved"  # to the requested gap
    LIMIT = "limit"  # a limit was hit; there may or may not be a point
    INFEASIBLE = "infeasible"


@dataclasses.dataclass(frozen=True)
class MilpResult:
    """Outcome of one solve: ``values`` of the best point found (empty without one), its objective, the dual bound."""

    status: MilpStatus
    values: tuple[float, ...]
    objective: float
    bound: float


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """The program without integrality.

    Attributes:
        status: ``SOLVED``, ``LIMIT`` (the other fields are empty, the bound minus infinity) or ``INFEASIBLE``.
        values: an optimal point.
        bound: a lower bound on the objective of every point of the program. It is computed from the multipliers, for
            which it holds whatever they are, and so owes nothing to the solver's tolerances.
        reduced_costs: what the bound grows by, at least, when a column moves from the bound it is at to the other one.

    """

    status: MilpStatus
    values: NDArray[np.float64]
    bound: float
    reduced_costs: NDArray[np.float64]


class Milp:
    """A minimisation over columns with bounds, some integer, and rows ``Σ coefficient · column ≥ lower``."""

    def __init__(self) -> None:
        """Start without columns and rows."""
        self._cost: list[float] = []
        self._upper: list[float] = []
        self._lower: list[float] = []
        self._integer: list[bool] = []
        self._row_of: list[int] = []
        self._column_of: list[int] = []
        self._coefficient: list[float] = []
        self._row_lower: list[float] = []

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self._cost)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._row_lower)

    @property
    def integers(self) -> int:
        """Number of integer columns."""
        return sum(self._integer)

    def column(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """Add a column and return its index."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

    def add_cost(self, column: int, cost: float) -> None:
        """Raise the cost of a column."""
        self._cost[column] += cost

    def row(self, terms: Iterable[tuple[int, float]], lower: float) -> None:
        """Add the row ``Σ coefficient · column ≥ lower``; no column may appear twice."""
        index = len(self._row_lower)
        self._row_lower.append(lower)
        for column, coefficient in sorted(terms):
            self._row_of.append(index)
            self._column_of.append(column)
            self._coefficient.append(coefficient)

    def solve(
        self,
        *,
        relative_gap: float = 0.0,
        absolute_gap: float = 0.0,
        time_limit_s: float,
        node_limit: int | None = None,
        hint: Sequence[float] = (),
        fixed: Mapping[int, float] | None = None,
        target: float = -float("inf"),
    ) -> MilpResult:
        """Minimise, until a point of objective ``target`` or less is found.

        ``hint`` is a full assignment of the columns, or empty; ``fixed`` fixes some columns.

        Raises:
            SolverFailedError: HiGHS failed for a reason other than infeasibility or a limit.

        """
        model = mathopt.Model.from_model_proto(self._proto(fixed=fixed or {}))
        parameters = mathopt.SolveParameters(
            time_limit=dt.timedelta(seconds=max(time_limit_s, 0.01)),
            relative_gap_tolerance=relative_gap,
            absolute_gap_tolerance=absolute_gap,
            node_limit=node_limit,
            random_seed=0,
            highs=highs_pb2.HighsOptionsProto(double_options={"objective_target": target}),
        )
        hints = []
        if len(hint):
            within = zip(hint, *self._bounds(fixed or {}), strict=True)  # HiGHS refuses hints beyond a column's bounds
            assignment = {model.get_variable(i): min(max(v, low), up) for i, (v, low, up) in enumerate(within)}
            hints.append(mathopt.SolutionHint(variable_values=assignment))
        model_parameters = mathopt.ModelSolveParameters(solution_hints=hints)
        status, result = self._run(model, parameters, model_parameters)
        if status is MilpStatus.INFEASIBLE:
            return MilpResult(status, (), float("inf"), float("inf"))
        bounds = result.termination.objective_bounds
        if not result.has_primal_feasible_solution():
            return MilpResult(status, (), float("inf"), bounds.dual_bound)
        named = result.variable_values()
        values = tuple(named[model.get_variable(i)] for i in range(self.columns))
        return MilpResult(status, values, result.objective_value(), bounds.dual_bound)

    def relax(self, *, time_limit_s: float) -> Relaxation:
        """Minimise without integrality.

        Raises:
            SolverFailedError: HiGHS failed for a reason other than infeasibility or a limit.

        """
        model = mathopt.Model.from_model_proto(self._proto(relaxed=True))
        parameters = mathopt.SolveParameters(time_limit=dt.timedelta(seconds=max(time_limit_s, 0.01)), random_seed=0)
        status, result = self._run(model, parameters, mathopt.ModelSolveParameters())
        nothing = np.zeros(0)
        if status is not MilpStatus.SOLVED:
            unknown = -float("inf") if status is MilpStatus.LIMIT else float("inf")
            return Relaxation(status, nothing, unknown, nothing)
        named, multiplier_of = result.variable_values(), result.dual_values()
        values = np.array([named[model.get_variable(i)] for i in range(self.columns)])
        multipliers = np.array([multiplier_of[model.get_linear_constraint(i)] for i in range(self.rows)])
        bound, reduced = self._dual_bound(np.maximum(multipliers, 0.0))
        return Relaxation(status, values, bound, reduced)

    def _dual_bound(self, multipliers: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Lagrangian bound for multipliers ≥ 0 of the rows, and the reduced costs: weak duality."""
        weights = np.array(self._coefficient) * multipliers[np.array(self._row_of, dtype=np.int64)]
        columns = np.array(self._column_of, dtype=np.int64)
        reduced: NDArray[np.float64] = np.array(self._cost) - np.bincount(columns, weights, minlength=self.columns)
        least = np.minimum(reduced * np.array(self._lower), reduced * np.array(self._upper))
        return float(multipliers @ np.array(self._row_lower) + least.sum()), reduced

    def near(self, relaxation: Relaxation, tolerance: float, *, integers_only: bool = False) -> dict[int, float]:
        """Columns that are whole in a relaxation, and whose change costs more than ``tolerance`` there.

        No point with whole values that is within ``tolerance`` of the relaxation's bound has others in them.

        Args:
            relaxation: of this program.
            tolerance: negative for all that are whole.
            integers_only: whether only columns that have to be whole count.

        """
        values, reduced = relaxation.values, relaxation.reduced_costs
        whole = np.abs(values - np.rint(values)) < FEASIBILITY_TOLERANCE
        if integers_only:
            whole &= np.array(self._integer)
        fixed = np.flatnonzero(whole & (np.abs(reduced) > tolerance))
        return {int(i): float(np.rint(values[i])) for i in fixed}

    def _run(
        self, model: mathopt.Model, parameters: mathopt.SolveParameters, model_parameters: mathopt.ModelSolveParameters
    ) -> tuple[MilpStatus, mathopt.SolveResult]:
        """Run HiGHS; raise :class:`SolverFailedError` where it fails."""
        try:
            result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=model_parameters)
        except AttributeError as error:  # how MathOpt 9.15 reports any error of the solver
            raise SolverFailedError(f"HiGHS refused a model of {self.rows} rows and {self.columns} columns") from error
        reason = result.termination.reason
        _log.debug("%d rows, %d columns: %s in %s", self.rows, self.columns, reason.name, result.solve_time())
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return MilpStatus.INFEASIBLE, result
        if reason in (mathopt.TerminationReason.NUMERICAL_ERROR, mathopt.TerminationReason.OTHER_ERROR):
            raise SolverFailedError(f"HiGHS failed: {result.termination.detail}")
        return MilpStatus.SOLVED if reason is mathopt.TerminationReason.OPTIMAL else MilpStatus.LIMIT, result

    def _bounds(self, fixed: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """Lower and upper bounds of the columns, some of which are fixed."""
        lower, upper = list(self._lower), list(self._upper)
        for column, value in fixed.items():
            lower[column] = upper[column] = value
        return lower, upper

    def _proto(self, *, relaxed: bool = False, fixed: Mapping[int, float] | None = None) -> model_pb2.ModelProto:
        """The model as MathOpt's protocol buffer; ``relaxed`` without integrality, ``fixed`` with columns fixed."""
        lower, upper = self._bounds(fixed or {})
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(self.columns))
        proto.variables.lower_bounds.extend(lower)
        proto.variables.upper_bounds.extend(upper)
        proto.variables.integers.extend([False] * self.columns if relaxed else self._integer)
        costs = [(i, cost) for i, cost in enumerate(self._cost) if cost]
        proto.objective.linear_coefficients.ids.extend(i for i, _ in costs)
        proto.objective.linear_coefficients.values.extend(cost for _, cost in costs)
        proto.linear_constraints.ids.extend(range(self.rows))
        proto.linear_constraints.lower_bounds.extend(self._row_lower)
        proto.linear_constraints.upper_bounds.extend([float("inf")] * self.rows)
        proto.linear_constraint_matrix.row_ids.extend(self._row_of)
        proto.linear_constraint_matrix.column_ids.extend(self._column_of)
        proto.linear_constraint_matrix.coefficients.extend(self._coefficient)
        return proto
