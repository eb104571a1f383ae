"""Mixed-integer programs in arrays, solved by HiGHS through OR-Tools' MathOpt.

Models here have 10^5 rows; they are built as arrays and handed over as one protocol buffer, since adding rows one
by one through the modelling interface takes longer than solving them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import logging
from collections.abc import Iterable, Sequence

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

_log = logging.getLogger(__name__)

# HiGHS accepts points that break a row by this much (rows here are scaled to about 1) and bounds that are off by it.
FEASIBILITY_TOLERANCE = 1e-6


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

    def column(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """Add a column and return its index."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

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
    ) -> MilpResult:
        """Minimise. ``hint`` is a full assignment of the columns, or empty.

        Raises:
            RuntimeError: HiGHS failed for a reason other than infeasibility or a limit.

        """
        model = mathopt.Model.from_model_proto(self._proto())
        parameters = mathopt.SolveParameters(
            time_limit=dt.timedelta(seconds=max(time_limit_s, 0.01)),
            relative_gap_tolerance=relative_gap,
            absolute_gap_tolerance=absolute_gap,
            node_limit=node_limit,
            random_seed=0,
        )
        hints = []
        if len(hint):
            within = zip(hint, self._lower, self._upper, strict=True)  # HiGHS refuses hints beyond a column's bounds
            assignment = {model.get_variable(i): min(max(v, low), up) for i, (v, low, up) in enumerate(within)}
            hints.append(mathopt.SolutionHint(variable_values=assignment))
        model_parameters = mathopt.ModelSolveParameters(solution_hints=hints)
        try:
            result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=model_parameters)
        except AttributeError as error:  # how MathOpt 9.15 reports any error of the solver
            raise RuntimeError(f"HiGHS refused a model of {self.rows} rows and {self.columns} columns") from error
        reason = result.termination.reason
        bounds = result.termination.objective_bounds
        _log.debug("%d rows, %d columns: %s in %s", self.rows, self.columns, reason.name, result.solve_time())
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return MilpResult(MilpStatus.INFEASIBLE, (), float("inf"), float("inf"))
        if reason in (mathopt.TerminationReason.NUMERICAL_ERROR, mathopt.TerminationReason.OTHER_ERROR):
            raise RuntimeError(f"HiGHS failed: {result.termination.detail}")
        status = MilpStatus.SOLVED if reason is mathopt.TerminationReason.OPTIMAL else MilpStatus.LIMIT
        if not result.has_primal_feasible_solution():
            return MilpResult(status, (), float("inf"), bounds.dual_bound)
        named = result.variable_values()
        values = tuple(named[model.get_variable(i)] for i in range(self.columns))
        return MilpResult(status, values, result.objective_value(), bounds.dual_bound)

    def _proto(self) -> model_pb2.ModelProto:
        """The model as MathOpt's protocol buffer."""
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(self.columns))
        proto.variables.lower_bounds.extend(self._lower)
        proto.variables.upper_bounds.extend(self._upper)
        proto.variables.integers.extend(self._integer)
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
