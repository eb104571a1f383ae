"""The torch.compile backend: plan a Dynamo graph's training step, and return the function that runs the plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphs.ir import StorageKind
from graphs.joint import Capture, capture_from_joint
from scheduler import _torch
from scheduler.errors import parse_budget
from scheduler.lower import Lowered, lower
from scheduler.outputs import Reach, StepContext, attach_secondary, detach_outputs, held_gradients, secondary_outputs
from scheduler.plan import Plan
from scheduler.planner import Settings, make_plan
from scheduler.static import static_memory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A planned step, as the backend made it."""

    plan: Plan
    capture: Capture
    lowered: Lowered


class Backend:
    """Plans each training graph that Dynamo captures for one module.

    Args:
        module: the module, for what it holds in memory and for module paths; ``None`` if unknown.
        settings: how to plan.
        optimizer: whose state counts as resident.
        call_inputs: gives what the module was called with; the graph's inputs leave out what the step does not read.
        given: a plan to run instead of solving.
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
        call_inputs: Callable[[], Any] = lambda: (),
        given: Plan | None = None,
        on_planned: Callable[[Plan], None] | None = None,
        on_scheduled: Callable[[Scheduled], None] | None = None,
        every_output: bool = False,
        on_secondary_gradient: Callable[[], None] | None = None,
    ) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.call_inputs = call_inputs
        self.given = given
        self.on_planned = on_planned
        self.on_scheduled = on_scheduled
        self.every_output = every_output
        self.on_secondary_gradient = on_secondary_gradient

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        secondary = () if self.every_output else secondary_outputs(gm)
        compilation = _Compilation(self, gm, example_inputs, secondary)
        detached = detach_outputs(gm, secondary)
        compiled = _torch.compile_joint(detached, example_inputs, compilation.partition, compilation.finish_backward)
        if detached is not gm:
            forget_traced_values(detached)
        scheduled, reach = compilation.scheduled, compilation.reach
        if scheduled is None or reach is None:  # nothing here is differentiated
            return compiled
        if self.on_scheduled is not None:
            self.on_scheduled(scheduled)
        if not secondary and not reach.is_partial_possible:
            return compiled
        return self._with_outputs_attached(gm, compiled, secondary, scheduled.capture, reach)

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
            if reach.is_partial_possible:
                reach.apply_to(outputs)
            if context is None or not torch.is_grad_enabled():
                return outputs

            def replay(gradients: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
                if gradients and self.on_secondary_gradient is not None:
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
        self.scheduled: Scheduled | None = None
        self.reach: Reach | None = None

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        backend = self.backend
        device = device_of(self.example_inputs)
        self.reach = Reach.of(joint, num_fwd_outputs)
        capture = capture_from_joint(
            joint,
            num_forward_outputs=num_fwd_outputs,
            input_kinds=input_kinds(joint, self.example_inputs, backend.module),
            device=device,
            module_names=[name for name, _ in backend.module.named_modules()] if backend.module is not None else (),
            never_recompute=backend.settings.never_recompute,
            held_gradients=held_gradients(self.gm, joint, self.secondary, device),
            name=type(backend.module).__name__ if backend.module is not None else "graph",
        )
        del joint_inputs
        plan = backend.given
        if plan is None:
            module = backend.module if backend.module is not None else nn.Module()
            inputs = (self.example_inputs, backend.call_inputs())
            static = static_memory(module, inputs, backend.optimizer, device)
            if self.secondary:
                static["other"] += StepContext.bytes_kept(self.example_inputs, capture.overwritten_inputs, device)
            plan = make_plan(capture, static, backend.settings)
        else:
            plan.check_fits(capture.graph)
        if backend.on_planned is not None:
            backend.on_planned(plan)
        lowered = lower(capture, plan.steps)
        self.scheduled = Scheduled(plan, capture, lowered)
        return lowered.forward, lowered.backward

    def finish_backward(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Drop the gradients of what no output reaches that received one."""
        assert self.reach is not None
        return self.reach.only_reached(gradients)


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


def input_kinds(joint: fx.GraphModule, example_inputs: Sequence[Any], module: nn.Module | None) -> list[StorageKind]:
    """Whether each primal of the joint graph is a parameter, a buffer or an input."""
    buffers = {id(b) for b in module.buffers()} if module is not None else set()
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
        options: ``budget_gb`` and any field of :class:`scheduler.planner.Settings`.

    """
    chosen = dict(options or {})
    budget = chosen.pop("budget_gb", None)
    settings = Settings(budget_bytes=None if budget is None else parse_budget(budget), **chosen)
    return Backend(module=None, settings=settings)(gm, example_inputs)
