"""Errors that a user of the scheduler meets, and the reading of budgets.

Every message says what happened, where (op and module) and what to do about it.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import Final

from graphs.errors import CheckpointSchedulerError
from scheduler.units import budget_that_covers, format_bytes

_BUDGET_UNITS: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BUDGET_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*")
_MOST_GB: Final = 1e6  # a plain number above it is bytes by mistake

_BUDGET_FORMS: Final = (
    "give a positive number of GB (10^9 bytes; budget_gb=8 or 0.35), "
    'or a text with its unit ("7.5GiB", "800MB", "16 GB")'
)


class BudgetError(CheckpointSchedulerError, ValueError):
    """A budget is not a positive amount of memory. The message names the accepted forms."""


class PlanMismatch(CheckpointSchedulerError, ValueError):  # noqa: N818 - reads as the condition it reports
    """A plan does not fit the graph, or the budget, that it is to run with. The message says what differs."""


class PlanFormatError(CheckpointSchedulerError, ValueError):
    """A file is not a saved plan, or one of another schema version. The message says which."""


class Infeasible(CheckpointSchedulerError, ValueError):  # noqa: N818 - reads as the condition it reports
    """No schedule was found within the budget.

    Attributes:
        budget_bytes: the budget that was asked for.
        floor_bytes: least budget for which a plan was found, or ``None`` where none was; with copies to the host where
            these are allowed.
        floor_without_copies_bytes: the same for plans that copy nothing, where copies are allowed.
        floor_lower_bound_bytes: proven: no schedule fits in less; ``None`` where not computed.
        static_bytes: part of any budget that no schedule can lower (parameters, gradients, optimizer state, inputs).
        binding_op: name of the op that needs the most; empty where unknown.
        binding_module: dotted path of its module; empty for the root or where unknown.
        constraints: those of the user's without which there is a plan within the budget, such as ``keep='*.mlp'``.

    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        static_bytes: int,
        floor_bytes: int | None = None,
        floor_lower_bound_bytes: int | None = None,
        floor_without_copies_bytes: int | None = None,
        binding_op: str = "",
        binding_module: str = "",
        detail: str = "",
        constraints: tuple[str, ...] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.floor_lower_bound_bytes = floor_lower_bound_bytes
        self.floor_without_copies_bytes = floor_without_copies_bytes
        self.static_bytes = static_bytes
        self.binding_op = binding_op
        self.binding_module = binding_module
        self.detail = detail
        self.constraints = tuple(constraints)
        super().__init__(self.message())

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the attributes, so that the error survives a trip between processes."""
        return (_rebuild_infeasible, (self.__dict__.copy(),))

    def message(self, option: str = "budget_gb=") -> str:
        """The whole message, for a caller who sets the budget by ``option``."""
        return " ".join(part for part in (*self._findings(), self.detail, self._remedy(option)) if part)

    def _findings(self) -> list[str]:
        bound, floor = self.floor_lower_bound_bytes, self.floor_bytes
        verdict = "can" if bound is not None and self.budget_bytes < bound else "was found that can"
        parts = [
            f"No schedule {verdict} run this training step within the budget of {format_bytes(self.budget_bytes)}."
        ]
        if floor is not None:
            alone = self.floor_without_copies_bytes
            copies = "" if alone is None else f" with copies to the host, and {format_bytes(alone)} without"
            parts.append(f"The least budget for which a plan was found is {format_bytes(floor)}{copies}.")
        else:
            parts.append("The least budget for which a plan exists was not determined.")
        if bound is not None:
            parts.append(f"It is proven that none exists below {format_bytes(bound)}.")
        parts.append(
            f"{format_bytes(self.static_bytes)} are static: parameters, buffers, existing gradients, optimizer state "
            "and inputs, which no schedule can lower."
        )
        if self.binding_op:
            where = f" in module {self.binding_module!r}" if self.binding_module else ""
            parts.append(f"The op that binds is {self.binding_op}{where}.")
        return parts

    def _remedy(self, option: str) -> str:
        least = self.floor_bytes
        raised = "Raise the budget" if least is None else f"Raise the budget to {option}{budget_that_covers(least)}"
        return f"{raised}, use a smaller batch or shorter sequences, or lower what is static."


def _rebuild_infeasible(attributes: dict[str, object]) -> Infeasible:
    """Inverse of :meth:`Infeasible.__reduce__`."""
    return Infeasible(**attributes)  # type: ignore[arg-type]  # the attributes of another Infeasible


def parse_budget(value: object) -> int:
    """Bytes of a memory budget, as given by a user.

    Args:
        value: a number of GB (10^9 bytes), or a text with its unit: B, kB, MB, GB, TB (powers of 1000) or KiB, MiB,
            GiB, TiB (powers of 1024), in any case. ``None`` is the caller's to handle.

    Returns:
        The budget in bytes, at least 1.

    Raises:
        BudgetError: NaN, infinite, zero, negative, a bool, a text without a known unit, or any other type.

    """
    if isinstance(value, str):
        return _parse_budget_text(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BudgetError(f"{value!r} ({type(value).__name__}) is not a memory budget: {_BUDGET_FORMS}")
    try:
        figure = float(value)
    except OverflowError:
        figure = math.inf
    if _MOST_GB < figure < math.inf:
        raise BudgetError(f"a budget of {value!r} is {figure:.3g} GB, more than any device has: {_BUDGET_FORMS}")
    return _checked_bytes(value, figure, 10**9)


def _parse_budget_text(text: str) -> int:
    match = _BUDGET_TEXT.fullmatch(text)
    if match is None:
        raise BudgetError(f"{text!r} is not a memory budget: {_BUDGET_FORMS}")
    unit = _BUDGET_UNITS.get(match[2].lower())
    if unit is None:
        raise BudgetError(f"{text!r} has the unknown unit {match[2]!r}: {_BUDGET_FORMS}")
    return _checked_bytes(text, float(match[1]), unit)


def _checked_bytes(value: object, figure: float, unit: int) -> int:
    product = figure * unit
    if not math.isfinite(product):
        raise BudgetError(f"a budget of {value!r} is not finite: {_BUDGET_FORMS}")
    size = round(product)
    if size <= 0:
        raise BudgetError(f"a budget of {value!r} is not a positive amount of memory: {_BUDGET_FORMS}")
    return size
