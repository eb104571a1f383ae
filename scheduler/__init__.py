"""Train any PyTorch module under a real peak-memory budget.

>>> from scheduler import schedule
>>> model = schedule(model, budget_gb=16)        # doctest: +SKIP
"""

from graphs.errors import CaptureError, CheckpointSchedulerError, UnsupportedModelError
from graphs.marks import mark
from scheduler.api import graphs_of, minimum_budget, plan, plan_of, schedule, unschedule
from scheduler.eager_offload import offload_activations
from scheduler.errors import BudgetError, Infeasible, PlanFormatError, PlanMismatch
from scheduler.memory import PeakMemory, measure_peak
from scheduler.plan import Plan
from scheduler.replan import MinimumBudget
from scheduler.watch import watch

__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckpointSchedulerError",
    "Infeasible",
    "MinimumBudget",
    "PeakMemory",
    "Plan",
    "PlanFormatError",
    "PlanMismatch",
    "UnsupportedModelError",
    "graphs_of",
    "mark",
    "measure_peak",
    "minimum_budget",
    "offload_activations",
    "plan",
    "plan_of",
    "schedule",
    "unschedule",
    "watch",
]
