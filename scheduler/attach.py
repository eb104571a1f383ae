"""Bounding a module in place, and undoing it.

``nn.Module.__call__`` runs ``_compiled_call_impl`` where a module has one; that is the only thing that scheduling sets,
beside a handle, the plan and the two graphs in the instance's ``__dict__``. Class, parameters, buffers, hooks and
``state_dict`` stay what they were.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn

from graphs.errors import CaptureError, CheckpointSchedulerError
from scheduler import _torch
from scheduler.backend import Backend, Scheduled, forget_traced_values
from scheduler.plan import Plan
from scheduler.planner import Settings
from scheduler.substitutes import needing_substitute, substituted

HANDLE: Final = "_checkpoint_schedule"
_CALL: Final = "_compiled_call_impl"
_PUBLISHED: Final = ("plan", "forward_graph", "backward_graph")


class _PlannedWithoutRunningError(Exception):
    """Ends a call whose only purpose was to plan."""


class _Situation(NamedTuple):
    """What a compiled step was planned for.

    Attributes:
        gradients_resident: parameters hold gradients for which the plan made without them leaves no room. From the
            second step of an accumulation on that is so.
        every_output: all outputs are differentiated, by-products of the loss too.

    """

    gradients_resident: bool
    every_output: bool


class Attachment:
    """What makes a module a scheduled one. Stored in the module; called instead of its plain ``__call__``."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        given: Plan | None = None,
        only_plan: bool = False,
    ) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.given = given
        self.plan: Plan | None = None
        self.graphs: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self.previous_call: Any = None
        self._plain: Callable[..., Any] = module._call_impl  # noqa: SLF001 - what nn.Module.__call__ runs
        self.ends_at_plan = only_plan  # else planning with samples compiles too, and only does not run
        self.only_plan = only_plan
        # Found out when they are first needed: a copy is attached before deepcopy has filled the module.
        self._substituted: tuple[nn.Module, ...] | None = None
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._call_inputs: Any = None
        self._every_output = False
        self._steps: dict[_Situation, Callable[..., Any]] = {}
        self._room: dict[bool, int] = {}

    def _compile(self, situation: _Situation) -> Callable[..., Any]:
        backend = Backend(
            module=self.module,
            settings=self.settings,
            optimizer=self.optimizer,
            call_inputs=lambda: self._call_inputs,
            given=self.given,
            on_planned=self._end_here if self.ends_at_plan else None,
            on_scheduled=functools.partial(self._publish, situation),
            every_output=situation.every_output,
            on_secondary_gradient=self._differentiate_every_output,
        )

        def planned(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            return self._unless_only_planning(backend(gm, example_inputs), gm)

        return torch.compile(_entry_point(self.module), backend=planned, fullgraph=True, dynamic=False)

    def _end_here(self, plan: Plan) -> None:
        self.plan = plan
        raise _PlannedWithoutRunningError

    def _unless_only_planning(self, compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
        traced = [gm]

        def run(*inputs: Any) -> Any:
            if self.only_plan:
                raise _PlannedWithoutRunningError
            if traced:
                forget_traced_values(traced.pop())
            return compiled(*inputs)

        return run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: scheduled where gradients are wanted, plainly elsewhere."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        if self._substituted is None:
            self._substituted = needing_substitute(self.module)
        with _torch.capture_config(), substituted(self._substituted):
            self._call_inputs = (args, kwargs)
            try:
                return self._step_for_now()(*args, **kwargs)
            except _torch.BackendCompilerFailed as error:
                inner = error.inner_exception
                if isinstance(inner, CheckpointSchedulerError | ValueError | _PlannedWithoutRunningError):
                    raise inner from None
                raise CaptureError(f"{_name(self.module)} could not be planned: {inner!r}") from error
            except (_torch.Unsupported, _torch.UserError) as error:
                raise CaptureError(
                    f"{_name(self.module)} could not be captured as one graph. {error}\n"
                    "Move what breaks the graph out of the module's forward, or schedule the submodules around it."
                ) from error
            finally:
                self._call_inputs = None

    def _step_for_now(self) -> Callable[..., Any]:
        """The compiled step for the situation at hand, compiled and planned when it first arises."""
        gradients_resident = False
        room = self._room.get(self._every_output)
        if room is not None and self.given is None:
            existing = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
            gradients_resident = existing > room
        situation = _Situation(gradients_resident=gradients_resident, every_output=self._every_output)
        if situation not in self._steps:
            self._steps[situation] = self._compile(situation)
        return self._steps[situation]

    def _differentiate_every_output(self) -> None:
        """Plan anew with all outputs differentiated: one that was taken for a by-product has received a gradient."""
        self._every_output = True

    def plan_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Plan for a batch without running the step."""
        before, self.only_plan = self.only_plan, True
        try:
            self(*args, **kwargs)
        except _PlannedWithoutRunningError:
            pass
        finally:
            self.only_plan = before

    def install(self) -> None:
        """Make the module scheduled. An earlier schedule must have been removed."""
        self.previous_call = self.module.__dict__.get(_CALL)
        self.module.__dict__[HANDLE] = self
        self.module.__dict__[_CALL] = self
        self._publish_attributes()

    def remove(self) -> None:
        """Give the module back as it was."""
        attributes = self.module.__dict__
        attributes.pop(HANDLE, None)
        attributes.pop(_CALL, None)
        if self.previous_call is not None:
            attributes[_CALL] = self.previous_call
        for name in _PUBLISHED:
            if self._may_set(name):
                attributes.pop(name, None)

    def _publish(self, situation: _Situation, scheduled: Scheduled) -> None:
        self.plan = plan = scheduled.plan
        self._parameters = tuple(self.module.parameters())
        if not situation.gradients_resident and plan.budget_bytes is not None:
            room = plan.budget_bytes - plan.peak_bytes + plan.static.get("gradients", 0)
            self._room[situation.every_output] = min(room, self._room.get(situation.every_output, room))
        self.graphs = (scheduled.lowered.forward, scheduled.lowered.backward)
        if self.module.__dict__.get(HANDLE) is self:
            self._publish_attributes()

    def _publish_attributes(self) -> None:
        self._set("plan", self.plan)
        if self.graphs is not None:
            self._set("forward_graph", self.graphs[0])
            self._set("backward_graph", self.graphs[1])

    def _may_set(self, name: str) -> bool:
        module = self.module
        own = (module._parameters, module._buffers, module._modules)  # noqa: SLF001 - names that nn.Module resolves
        return not hasattr(type(module), name) and not any(name in names for names in own)

    def _set(self, name: str, value: Any) -> None:
        if self._may_set(name):
            self.module.__dict__[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment | None:
        """Schedule the copy of the module too. The optimizer is the original's: the copy does not count its state."""
        twin = memo.get(id(self.module))
        if not isinstance(twin, nn.Module):
            return None
        attachment = Attachment(twin, self.settings, given=self.given)
        attachment.plan = self.plan
        memo[id(self)] = attachment
        twin.__dict__[_CALL] = attachment
        return attachment

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a module stays scheduled: the loaded one plans anew on its first call."""
        return _restore, (self.module, dataclasses.replace(self.settings))


def _restore(module: nn.Module, settings: Settings) -> Attachment:
    attachment = Attachment(module, settings)
    module.__dict__[_CALL] = attachment
    return attachment


def attachment_of(module: nn.Module) -> Attachment | None:
    """The handle of a scheduled module, or ``None``."""
    found = module.__dict__.get(HANDLE)
    return found if isinstance(found, Attachment) else None


def _entry_point(module: nn.Module) -> Callable[..., Any]:
    """A function of our own for Dynamo to trace, with a code object of its own so that modules share no cache."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as in __call__

    code = step.__code__.replace(co_name="step")
    return types.FunctionType(code, step.__globals__, "step", step.__defaults__, step.__closure__)


def _name(module: nn.Module) -> str:
    return type(module).__name__
