"""The torch.compile backend: plan a Dynamo graph's training step, and return the function that runs the plan."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from graphs._torch import autocast_depth
from graphs.casts import cast_regions, changed_by_autocast, share_casts
from graphs.constraints import KINDS, Constraints
from graphs.errors import UnsupportedModelError
from graphs.ir import StorageKind
from graphs.joint import Capture, capture_from_joint
from graphs.mutations import written_in_checkpoints
from graphs.order import capture_in_order
from scheduler import _torch
from scheduler.errors import PlanMismatch, parse_budget
from scheduler.first_step import FirstStep
from scheduler.lower import Lowered, lower
from scheduler.memory import bytes_of, tensors_in
from scheduler.naming import did_you_mean
from scheduler.outputs import (
    Reach,
    StepContext,
    attach_secondary,
    detach_outputs,
    held_gradients,
    secondary_outputs,
    summed_bytes,
)
from scheduler.pieces import Pieces
from scheduler.plan import Plan
from scheduler.planner import Settings, transfers_of
from scheduler.remembered import RememberedPlans
from scheduler.runtime.host_pool import HostMemoryError
from scheduler.static import static_memory
from scheduler.units import budget_that_covers, format_bytes
from solvers.solution import Compute

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A planned step, as the backend made it; the capture is in the plan's order."""

    plan: Plan
    capture: Capture
    lowered: Lowered


class Backend:
    """Plans each training graph that Dynamo captures for one module.

    Args:
        module: the module, for what it holds in memory and for module paths; ``None`` if unknown.
        settings: how to plan.
        optimizer: whose state counts as resident.
        loss_fn: the external loss in the graph; a module counts with its parameters and buffers.
        call_inputs: gives what the module was called with; the graph's inputs leave out what the step does not read.
        given: a plan to run instead of solving.
        remembered: plans made earlier, which may serve again.
        pieces: the pieces of the step and their plans, where its graph may break.
        on_planned: called with each plan as soon as it is made; what it raises ends the compilation.
        on_scheduled: called with each step that has been planned and lowered, before it first runs.
        every_output: differentiate every output, rather than those that no scalar output is computed from.
        on_secondary_gradient: called when an output that was not differentiated receives a gradient all the same.

    """

    def __init__(
        self,
        *,
        module: nn.Module | None,
        settings: Settings,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        call_inputs: Callable[[], Any] = lambda: (),
        given: Plan | None = None,
        remembered: RememberedPlans | None = None,
        pieces: Pieces | None = None,
        on_planned: Callable[[Plan], None] | None = None,
        on_scheduled: Callable[[Scheduled], None] | None = None,
        every_output: bool = False,
        on_secondary_gradient: Callable[[], None] | None = None,
    ) -> None:
        self._module = _weak(module)  # compiled code outlives what it was compiled for
        self.settings = settings
        self._optimizer = _weak(optimizer)
        self._loss = _weak(loss_fn if isinstance(loss_fn, nn.Module) else None)
        self.call_inputs = call_inputs
        self.given = given
        self.remembered = remembered or RememberedPlans()
        self.pieces = pieces
        self.on_planned = on_planned
        self.on_scheduled = on_scheduled
        self.every_output = every_output
        self.on_secondary_gradient = on_secondary_gradient

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return self._module()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose state counts, while it lives."""
        return self._optimizer()

    @property
    def parts(self) -> nn.ModuleList:
        """The modules that take part in the step: the scheduled one, and a loss that is a module."""
        return nn.ModuleList([m for m in (self.module, self._loss()) if isinstance(m, nn.Module)])

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        if self.pieces is not None:
            self.pieces.note(self.parts, device_of(example_inputs))
        secondary = () if self.every_output or self.pieces is not None else secondary_outputs(gm)
        compilation = _Compilation(self, gm, example_inputs, secondary)
        detached = detach_outputs(gm, secondary)
        compiled = _torch.compile_joint(
            detached,
            example_inputs,
            compilation.partition,
            skip_backward=compilation.skip_backward,
            begin_backward=compilation.begin_backward,
            finish_backward=compilation.finish_backward,
        )
        compilation.example_inputs = ()  # real tensors, the batch among them
        if detached is not gm:
            forget_traced_values(detached)
        scheduled, reach = compilation.scheduled, compilation.reach
        if scheduled is None or reach is None:  # nothing here is differentiated
            return compiled
        if self.on_scheduled is not None:
            self.on_scheduled(scheduled)
        if secondary or reach.is_partial_possible:
            compiled = self._with_outputs_attached(gm, compiled, secondary, scheduled.capture, reach)
        compiled = self._with_first_step_measured(compiled, scheduled, compilation)
        return compiled if self.pieces is None else self.pieces.around(compiled, scheduled.plan)

    def _with_first_step_measured(
        self, compiled: Callable[..., Any], scheduled: Scheduled, compilation: _Compilation
    ) -> Callable[..., Any]:
        """Wrap a compiled step so that the peak of its first run is held against the plan's."""
        capture, pieces = scheduled.capture, self.pieces
        if pieces is not None and not pieces.is_first():
            return compiled  # the step is measured from its first piece on
        measured = FirstStep(scheduled.plan, capture.device, capture.graph.name, self.remembered.warned)
        if pieces is not None:
            measured.whole = lambda: pieces.whole() or scheduled.plan
        compilation.first_step = measured

        def run(*inputs: Any) -> Any:
            if measured.is_done:
                return compiled(*inputs)
            resident = (self.parts, self.optimizer, inputs, self.call_inputs())
            return measured.run(compiled, inputs, resident)

        return run

    def _with_outputs_attached(
        self,
        gm: fx.GraphModule,
        compiled: Callable[..., Any],
        secondary: Sequence[int],
        capture: Capture,
        reach: Reach,
    ) -> Callable[..., Any]:
        """Wrap a compiled step so that its secondary outputs and partial backwards behave as in plain training."""
        device, overwritten = capture.device, capture.overwritten_inputs

        def run(*inputs: Any) -> Any:
            context = StepContext.record(inputs, overwritten, device) if secondary else None
            outputs = compiled(*inputs)
            if secondary or reach.is_partial_possible:
                reach.apply_to(outputs)
            if context is None or not torch.is_grad_enabled():
                return outputs

            def replay(gradients: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
                if self.on_secondary_gradient is not None:
                    self.on_secondary_gradient()
                return context.gradients(gm, device, gradients)

            return attach_secondary(outputs, secondary, inputs, replay)

        return run


class _Compilation:
    """State of one compilation: AOTAutograd calls :meth:`partition` once, if the graph is differentiated."""

    def __init__(
        self, backend: Backend, gm: fx.GraphModule, example_inputs: Sequence[Any], secondary: Sequence[int]
    ) -> None:
        self.backend = backend
        self.gm = gm
        self.example_inputs = example_inputs
        self.secondary = secondary
        self.device = device_of(example_inputs)
        self.cast_regions = cast_regions(gm)
        self.under_autocast = torch.is_autocast_enabled(self.device.type)  # then AOTAutograd turns it off in backward
        self.scheduled: Scheduled | None = None
        self.reach: Reach | None = None
        self.first_step: FirstStep | None = None

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        backend = self.backend
        device = self.device
        share_casts(joint, num_fwd_outputs, self.cast_regions)
        self.reach = Reach.of(joint, num_fwd_outputs)
        capture = capture_from_joint(
            joint,
            num_forward_outputs=num_fwd_outputs,
            input_kinds=input_kinds(joint, self.example_inputs, backend.parts),
            device=device,
            module_names=[name for name, _ in backend.module.named_modules()] if backend.module is not None else (),
            constraints=backend.settings.constraints,
            held_gradients=held_gradients(self.gm, joint, self.secondary, device),
            name=type(backend.module).__name__ if backend.module is not None else "graph",
        )
        capture = dataclasses.replace(capture, summed_bytes=summed_bytes(self.gm, joint, self.secondary, device))
        del joint_inputs
        if capture.unused_constraints and backend.pieces is None:
            for pattern in capture.unused_constraints:
                hint = did_you_mean(capture.graph, pattern.partition("=")[2].strip("'\""))
                logger.warning("%s: no op matches %s.%s", capture.graph.name, pattern, hint)
        written = written_in_checkpoints(joint)
        if written:
            names = [capture.graph.ops[i].module_path for i, n in enumerate(capture.nodes) if n in written]
            logger.warning(
                "%s: the plan takes the place of torch.utils.checkpoint in %s, and buffers there are updated once per "
                "step, as without the checkpoint; where it runs a forward again, plain training updates them twice",
                *(capture.graph.name, ", ".join(sorted(set(names))) or "the model"),
            )
        plan = backend.given
        if plan is None:
            plan = self._plan(capture, device)
        else:
            plan.check_fits(capture.graph)
            self._check_budget(plan, capture, device)
        if backend.on_planned is not None:
            backend.on_planned(plan)
        try:
            self.scheduled = _scheduled(plan, capture)
        except HostMemoryError as error:
            if backend.given is not None:
                raise
            logger.warning("%s; planning again without a host tier", error)
            backend.remembered.forget(plan)
            backend.settings = dataclasses.replace(backend.settings, offload=False, link=None, host_bytes=None)
            plan = self._plan(capture, device)
            if backend.on_planned is not None:
                backend.on_planned(plan)
            self.scheduled = _scheduled(plan, capture)
        return self.scheduled.lowered.forward, self.scheduled.lowered.backward

    def _plan(self, capture: Capture, device: torch.device) -> Plan:
        """Plan a capture, as the whole step or as a piece of one."""
        backend = self.backend
        if backend.pieces is not None:
            common = static_memory(backend.parts, backend.call_inputs(), backend.optimizer, device)
            seen = backend.pieces.results()
            bytes_of(tensors_in(backend.parts, backend.optimizer, backend.call_inputs()), device, seen)
            return backend.pieces.plan(capture, common, bytes_of(tensors_in(self.example_inputs), device, seen))
        return backend.remembered.plan(capture, self._static(capture, device), backend.settings)

    def _static(self, capture: Capture, device: torch.device) -> dict[str, int]:
        """Bytes resident throughout the step, by category."""
        backend = self.backend
        inputs = (self.example_inputs, backend.call_inputs())
        static = static_memory(backend.parts, inputs, backend.optimizer, device)
        if self.secondary:
            static["other"] += StepContext.bytes_kept(self.example_inputs, capture.overwritten_inputs, device)
        return static

    def _check_budget(self, plan: Plan, capture: Capture, device: torch.device) -> None:
        """Refuse a given plan that needs more than a given budget, with what is resident now."""
        budget = self.backend.settings.budget_bytes
        if budget is None:
            return
        peak = plan.peak_bytes - plan.static_bytes + sum(self._static(capture, device).values())
        if peak > budget:
            raise PlanMismatch(
                f"the given plan needs {format_bytes(peak)}, with what is resident now, and the budget is "
                f"{format_bytes(budget)}: raise the budget to {budget_that_covers(peak)} GB, leave it out to run the "
                "plan as it is, or leave the plan out to have the step planned"
            )

    def skip_backward(self) -> Sequence[None] | None:
        """The results of a backward that no gradient has reached: the step was replayed for those there were."""
        assert self.reach is not None
        return self.reach.none_received()

    def begin_backward(self) -> None:
        """Tell the measurement, where there is one.

        Raises:
            UnsupportedModelError: autocast is on, and would have the backward run in another precision.

        """
        if torch.is_autocast_enabled(self.device.type) or (self.under_autocast and autocast_depth()):
            self._check_precision()
        if self.first_step is not None:
            self.first_step.backward_begins()

    def _check_precision(self) -> None:
        assert self.scheduled is not None
        capture, steps = self.scheduled.capture, self.scheduled.plan.steps
        ops = [step.op for step in steps if isinstance(step, Compute)]
        late = ops[ops.index(capture.tangents_op) :]
        node = changed_by_autocast([capture.nodes[op] for op in late], self.device)
        if node is not None:
            op = capture.graph.ops[capture.nodes.index(node)]
            raise UnsupportedModelError(
                f"backward() was called inside of torch.autocast, where {op.name} ({op.target}) of "
                f"{op.module_path or 'the model'} would run in another "
                "precision than it was planned with. Call it outside of the context, as is usual with autocast."
            )

    def finish_backward(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Drop the gradients of what no output reaches that received one."""
        assert self.reach is not None
        if self.first_step is not None:
            self.first_step.backward_has_run()
        return self.reach.only_reached(gradients)


def _scheduled(plan: Plan, capture: Capture) -> Scheduled:
    """A captured step, lowered to run as planned.

    Raises:
        HostMemoryError: the host's memory is refused to the copies of the plan.

    """
    ordered = capture_in_order(capture, plan.graph.order)
    return Scheduled(plan, ordered, lower(ordered, plan.steps, functools.partial(transfers_of, ordered, plan)))


_T = TypeVar("_T")


def _weak(value: _T | None) -> Callable[[], _T | None]:
    """Gives a value as long as something else holds it."""
    return (lambda: None) if value is None else weakref.ref(value)


def forget_traced_values(gm: fx.GraphModule) -> None:
    """Drop the values that Dynamo traced a graph with: their history holds real tensors, the numbers multiplied by."""
    for node in gm.graph.nodes:
        node.meta.pop("example_value", None)


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The device to schedule: the one accelerator among the inputs, else CPU."""
    devices = {x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta")}
    if len(devices) > 1:
        names = ", ".join(sorted(str(d) for d in devices))
        raise ValueError(f"the step's tensors lie on several devices ({names}); schedule each device's part by itself")
    return devices.pop() if devices else torch.device("cpu")


def input_kinds(joint: fx.GraphModule, example_inputs: Sequence[Any], module: nn.Module) -> list[StorageKind]:
    """Whether each primal of the joint graph is a parameter, a buffer or an input."""
    buffers = {id(b) for b in module.buffers()}
    kinds = []
    for position, node in enumerate(joint.graph.nodes):
        if node.op != "placeholder" or node.name.startswith("tangents_"):
            break
        index = getattr(node.meta.get("desc"), "idx", position)
        value = example_inputs[index] if index < len(example_inputs) else None
        if isinstance(value, nn.Parameter):
            kinds.append(StorageKind.PARAMETER)
        elif id(value) in buffers:
            kinds.append(StorageKind.BUFFER)
        else:
            kinds.append(StorageKind.INPUT)
    return kinds


def checkpoint_scheduler(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Backend for ``torch.compile(model, backend="checkpoint_scheduler", options={"budget_gb": 8})``.

    The budget covers the graph's parameters and inputs and what the graph allocates. :func:`scheduler.schedule` counts
    existing gradients and optimizer state too, and keeps the plan: prefer it.

    Args:
        gm: graph captured by Dynamo.
        example_inputs: its inputs.
        options: ``budget_gb``, ``keep``, ``never_recompute``, ``never_offload`` and any field of
            :class:`scheduler.planner.Settings`.

    """
    chosen = dict(options or {})
    budget = chosen.pop("budget_gb", None)
    constraints = Constraints.from_dict({kind: chosen.pop(kind) for kind in KINDS if kind in chosen})
    chosen.setdefault("constraints", constraints)
    settings = Settings(budget_bytes=None if budget is None else parse_budget(budget), **chosen)
    settings.check()
    if settings.dynamic is not None or settings.allow_graph_breaks:
        raise ValueError("dynamic= and allow_graph_breaks= need what was planned before, which only schedule() keeps")
    return Backend(module=None, settings=settings)(gm, example_inputs)
