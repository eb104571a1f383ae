"""The public functions: bound a module, undo it, plan without running."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from graphs.capture import fake_step
from graphs.constraints import Constraints
from graphs.costs.devices import DeviceSpec
from graphs.ir import Costs
from graphs.links import Link, parse_link
from scheduler.attach import Attachment, attachment_of, check_initialised, check_not_sharded
from scheduler.errors import parse_budget
from scheduler.loss import LOSS_ARGS
from scheduler.ordering import Solver
from scheduler.plan import Plan
from scheduler.planner import Settings
from scheduler.replan import MinimumBudget, least_budget

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def schedule(
    model: ModuleT,
    budget_gb: float | str | None = None,
    *,
    sample_args: Sequence[Any] = (),
    sample_kwargs: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    costs: str | Costs = "profiled",
    keep: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
    never_offload: Sequence[str] = (),
    dynamic: str | None = None,
    allow_graph_breaks: bool = False,
    offload: bool | str = False,
    link: str | Link | None = None,
    host_budget_gb: float | str | None = None,
    plan: Plan | None = None,
) -> ModuleT:
    """Bound the memory of a module's training step, in place.

    The module plans its step on the first call that wants gradients, with the batch of that call (or here, if samples
    are given), and again for each new input shape, mode or dtype. Calls under ``torch.no_grad()`` run the plain module.
    Where the plain step does not fit and another order of its ops takes less memory, the plan may run them in that one;
    values, random numbers and writes are the same.

    Args:
        model: any module that ``torch.compile`` captures as one graph.
        budget_gb: most bytes live at once during forward and backward, in GB (10^9 bytes) or as text (``"7.5GiB"``):
            parameters, buffers, existing gradients, optimizer state, inputs, activations, workspaces. ``None``: the
            device's free memory at planning time, less 5 %.
        sample_args: positional arguments of a step, to plan at once.
        sample_kwargs: keyword arguments of a step, to plan at once.
        optimizer: counted in the budget with its state, allocated already or not.
        loss_fn: puts a loss that is taken outside of the module inside the scheduled step, so that the budget holds for
            it as well, and what it needs (the logits of a large vocabulary) is kept or recomputed like the rest. The
            module is then called with the loss's further arguments, and the call returns the loss instead of the
            output: ``loss = model(x, loss_args=(target,))`` is ``loss_fn(model(x), target)`` of the plain module. To
            have more than the loss, return it from ``loss_fn``. A call that wants gradients and leaves ``loss_args``
            out raises; under ``torch.no_grad()``, ``model(x)`` returns the output and ``model(x, loss_args=...)`` the
            loss. After :func:`unschedule` the module takes no ``loss_args``.
        solver: ``"auto"``, or an object with ``solve(problem) -> Solution``.
        time_limit_s: bound on solving, in seconds.
        gap: relative gap to the proven lower bound at which solving may stop.
        costs: ``"profiled"``: each distinct op is timed once on the device, one at a time, and remembered on disk;
            ``"roofline"``: estimated; or a :class:`graphs.ir.Costs` of the same step.
        keep: patterns of op names (``"aten.mm"``) or module paths (``"encoder.*"``): what these ops make in the
            forward stays on the device from its production to its last use. :func:`scheduler.mark` says it of a tensor.
        never_recompute: patterns of ops that must run once; what they make may be copied to the host.
        never_offload: patterns of ops whose results must not be copied to the host; they may run again.
        dynamic: ``None``: each new input shape is captured and solved once, and remembered; a warning says so at the
            eighth. ``"bucket"``: a new shape is captured once, and a schedule that was found for another shape serves
            it where the ops are the same and a replay shows that it fits the budget: keeping everything first, then the
            fastest of those known. The solver runs only where none fits, as for a batch larger than any before: begin
            with the largest. A reused schedule may recompute more than that shape needs; its plan says by how much.
            With ``costs="profiled"`` such a plan takes op times and workspaces from a larger shape.
        allow_graph_breaks: capture a module whose code breaks the graph in several pieces (a branch on data, a call
            that cannot be traced), rather than refuse it. The pieces share the budget, and what the others hold counts
            while one runs. What code between the pieces allocates is counted only where it is handed on; the
            measurement of the first step says where that matters. The first step of a new sequence of pieces runs each
            at its least memory, the second captures them again with plans that use the budget. ``model.plan`` is that
            of the piece where the step needs most. Nothing is planned ahead: samples and ``plan`` are refused.
        offload: whether activations may be copied to host memory and back, beside computation: ``False``, ``"auto"``
            (where that lowers the step time, and the device has a link) or ``True`` (the same, and an error where no
            link is known). Goes neither with ``dynamic`` nor with ``allow_graph_breaks``.
        link: bandwidth each way (``"25GB/s"``), a name (``"pcie4-x16"``) or a :class:`graphs.links.Link`; ``None``:
            that of the device, measured once. On the CPU, threads copy at the stated bandwidth.
        host_budget_gb: most bytes of copies, as ``budget_gb``; ``None``: half of the host's free memory.
        plan: a saved plan to run instead of solving; its graph must be this step's, and where ``budget_gb`` is given
            too, its peak within that. Where no patterns are given here,
            those that it was made under hold. With ``dynamic="bucket"`` it is the first schedule that is known.

    Returns:
        ``model`` itself. ``model.plan``, ``model.forward_graph`` and ``model.backward_graph`` hold what was planned
        last (:func:`plan_of` where the class has attributes of these names). Scheduling again replaces the earlier
        schedule.

    Raises:
        BudgetError: the budget is not a positive amount of memory.
        Infeasible: no plan was found within the budget (here with samples, else from the first call).
        CaptureError: the step is not one graph (the message names the line), the module is sharded by FSDP, or it has
            lazy parameters that are not made yet.
        TypeError: ``model`` is no module, ``optimizer`` no optimizer, or samples are no tuple and dict.
        ValueError: ``model`` is a wrapper such as ``DistributedDataParallel``: give ``model.module``.

    """
    _check_module(model, "schedule")
    settings = Settings(
        budget_bytes=None if budget_gb is None else parse_budget(budget_gb),
        solver=solver,
        time_limit_s=time_limit_s,
        gap=gap,
        costs=costs,
        constraints=_constraints(keep, never_recompute, never_offload, plan),
        dynamic=dynamic,
        allow_graph_breaks=allow_graph_breaks,
        offload=offload,
        link=None if link is None else parse_link(link),
        host_bytes=None if host_budget_gb is None else parse_budget(host_budget_gb),
    )
    settings.check()
    _check_arguments("sample_args", sample_args, "sample_kwargs", sample_kwargs, optimizer)
    if allow_graph_breaks and (plan is not None or sample_args or sample_kwargs):
        raise ValueError(
            "with allow_graph_breaks=True pieces are planned while the step runs: give no samples and no plan"
        )
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan takes a Plan, and got {plan!r}; read a saved one with Plan.load(path)")
    attachment = Attachment(model, settings, optimizer=optimizer, loss_fn=_loss(loss_fn, model), given=plan)
    if sample_args or sample_kwargs:
        attachment.plan_for(tuple(sample_args), dict(sample_kwargs or {}))
    unschedule(model)
    attachment.install()
    return model


def unschedule(model: ModuleT) -> ModuleT:
    """Give a scheduled module back its plain call. A module that is not scheduled is returned as it is."""
    attachment = attachment_of(model)
    if attachment is not None:
        attachment.remove()
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a scheduled module made last, or ``None`` before its first.

    Raises:
        ValueError: the module is not scheduled.

    """
    return _attachment(model).plan


def graphs_of(model: nn.Module) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """The forward and backward graphs of the plan made last, or ``None`` before the first.

    Raises:
        ValueError: the module is not scheduled.

    """
    return _attachment(model).graphs


def plan(
    model: nn.Module,
    budget_gb: float | str | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | DeviceSpec | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    costs: str | Costs = "roofline",
    keep: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
    never_offload: Sequence[str] = (),
    offload: bool | str = False,
    link: str | Link | None = None,
    host_budget_gb: float | str | None = None,
) -> Plan:
    """Plan a training step without running it and without its memory: the model may lie on ``meta``.

    The step is traced on fake CPU tensors, so the plan of a CUDA step differs where torch picks other kernels there
    (attention above all): the plan says so.

    Args:
        model: any module; it is not touched.
        budget_gb: as in :func:`schedule`; ``None`` plans without a limit.
        args: positional arguments of a step: tensors on any device, ``meta`` included.
        kwargs: keyword arguments of a step.
        device: device of the roofline cost model: a name (``"h100-sxm"``) or a :class:`DeviceSpec`; ``None``: CPU.
        optimizer: counted in the budget with its state.
        loss_fn: as in :func:`schedule`; ``kwargs`` then hold ``loss_args``.
        solver: as in :func:`schedule`.
        time_limit_s: as in :func:`schedule`.
        gap: as in :func:`schedule`.
        costs: ``"roofline"``, ``"profiled"`` (on this machine's CPU) or costs of the same step.
        keep: as in :func:`schedule`.
        never_recompute: as in :func:`schedule`.
        never_offload: as in :func:`schedule`.
        offload: as in :func:`schedule`.
        link: as in :func:`schedule`, and always to be stated.
        host_budget_gb: as in :func:`schedule`.

    Raises:
        Infeasible, CaptureError, BudgetError: as :func:`schedule`.

    """
    _check_module(model, "plan")
    settings = Settings(
        budget_bytes=None if budget_gb is None else parse_budget(budget_gb),
        unlimited=budget_gb is None,
        solver=solver,
        time_limit_s=time_limit_s,
        gap=gap,
        costs=costs,
        device_spec=device,
        constraints=_constraints(keep, never_recompute, never_offload),
        offload=offload,
        link=None if link is None else parse_link(link),
        host_bytes=None if host_budget_gb is None else parse_budget(host_budget_gb),
    )
    settings.check()
    _check_arguments("args", args, "kwargs", kwargs, optimizer)
    loss_fn = _loss(loss_fn, model)
    parts = [part for part in (model, loss_fn) if isinstance(part, nn.Module)]
    fake = fake_step(nn.ModuleList(parts), args, kwargs or {})
    with torch.inference_mode(mode=False), fake as (twins, fake_args, fake_kwargs):
        fake_loss = twins[1] if len(twins) > 1 else loss_fn
        attachment = Attachment(twins[0], settings, optimizer=optimizer, loss_fn=fake_loss, only_plan=True)
        attachment.plan_for(fake_args, fake_kwargs)
    if attachment.plan is None:
        raise ValueError(
            f"{type(model).__name__}: nothing in this step requires grad, so that there is nothing to plan"
        )
    return attachment.plan


def minimum_budget(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | DeviceSpec | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    time_limit_s: float = 60.0,
    costs: str | Costs = "roofline",
    keep: Sequence[str] = (),
    never_recompute: Sequence[str] = (),
    never_offload: Sequence[str] = (),
    offload: bool | str = False,
    link: str | Link | None = None,
    host_budget_gb: float | str | None = None,
) -> MinimumBudget:
    """Find the least budget under which a training step can be scheduled, without running it (see :func:`plan`).

    >>> print(minimum_budget(model, (batch,)))        # doctest: +SKIP
    least budget ... GB (overhead ...%), proven to be at least ... GB, where ... in module ... binds; ...

    Args:
        model: any module; it is not touched.
        args: positional arguments of a step.
        kwargs: keyword arguments of a step.
        device: as in :func:`plan`.
        optimizer: counted with its state.
        loss_fn: as in :func:`plan`.
        time_limit_s: bound on the search, in seconds.
        costs: as in :func:`plan`.
        keep: as in :func:`schedule`.
        never_recompute: as in :func:`schedule`.
        never_offload: as in :func:`schedule`.
        offload: as in :func:`schedule`: the least budget with copies to the host.
        link: as in :func:`plan`.
        host_budget_gb: as in :func:`schedule`.

    Returns:
        The least budget for which a plan was found, with the plan, and a proven lower bound on it.

    Raises:
        CaptureError: as :func:`schedule`.

    """
    keep_all = plan(
        model,
        None,
        args,
        kwargs,
        device=device,
        optimizer=optimizer,
        loss_fn=loss_fn,
        costs=costs,
        keep=keep,
        never_recompute=never_recompute,
        never_offload=never_offload,
        offload=offload,
        link=link,
        host_budget_gb=host_budget_gb,
    )
    return least_budget(keep_all, time_limit_s=time_limit_s)


def _check_module(model: object, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}() takes a torch.nn.Module, and got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(  # noqa: TRY004 - the right type, and the wrong one of two modules
            f"{function}() takes the module that {type(model).__name__} wraps: give model.module; the wrapper stays"
        )
    check_not_sharded(model)
    check_initialised(model)


def _check_arguments(args_name: str, args: object, kwargs_name: str, kwargs: object, optimizer: object) -> None:
    if not isinstance(args, tuple | list):
        raise TypeError(f"{args_name} takes a tuple of the forward's arguments, as (batch,), and got {args!r:.200}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"{kwargs_name} takes a dict of the forward's keyword arguments, and got {kwargs!r:.200}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer takes a torch.optim.Optimizer, and got {optimizer!r:.200}")


def _loss(loss_fn: object, model: nn.Module) -> Callable[..., Any] | None:
    if loss_fn is None:
        return None
    if not callable(loss_fn):
        raise TypeError(f"loss_fn takes a function of the module's output, and got {loss_fn!r}")
    if LOSS_ARGS in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"the forward of {type(model).__name__} has a parameter {LOSS_ARGS!r}, by which a module scheduled with "
            "loss_fn takes the arguments of the loss: rename it"
        )
    return loss_fn


def _constraints(
    keep: Sequence[str], never_recompute: Sequence[str], never_offload: Sequence[str], given: Plan | None = None
) -> Constraints:
    """The user's constraints: those of a given plan where there are none here."""
    for kind, patterns in (("keep", keep), ("never_recompute", never_recompute), ("never_offload", never_offload)):
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise TypeError(f"{kind} takes a sequence of patterns, and got {patterns!r}")
    chosen = Constraints(keep=tuple(keep), never_recompute=tuple(never_recompute), never_offload=tuple(never_offload))
    return given.constraints if isinstance(given, Plan) and not chosen else chosen


def _attachment(model: nn.Module) -> Attachment:
    attachment = attachment_of(model)
    if attachment is None:
        raise ValueError(f"{type(model).__name__} is not scheduled: call schedule(model, budget_gb) first")
    return attachment
