"""Bounding a module in place, and undoing it.

``nn.Module.__call__`` runs ``_compiled_call_impl`` where a module has one; that is the only thing that scheduling sets,
beside a handle, the plan and the two graphs in the instance's ``__dict__``. Class, parameters, buffers, hooks and
``state_dict`` stay what they were.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn

from graphs.errors import CaptureError, CheckpointSchedulerError
from scheduler import _torch
from scheduler.backend import Backend, Scheduled, forget_traced_values
from scheduler.first_step import end_measurements
from scheduler.loss import ExternalLoss, check_none_given
from scheduler.memory import tensors_in
from scheduler.pieces import Pieces
from scheduler.plan import Plan
from scheduler.planner import Settings
from scheduler.remembered import RememberedPlans
from scheduler.substitutes import needing_substitute, substituted

logger = logging.getLogger(__name__)

HANDLE: Final = "_checkpoint_schedule"
_CALL: Final = "_compiled_call_impl"
#: Captures that are kept at once; Dynamo refuses more than its limit for one function, see ``capture_config``.
MOST_CAPTURES: Final = 200
_PUBLISHED: Final = ("plan", "forward_graph", "backward_graph")


def check_not_sharded(module: nn.Module) -> None:
    """Raise :class:`CaptureError` where FSDP shards a module or a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not loaded nothing is sharded
    if fsdp and any(isinstance(m, fsdp.FSDPModule | fsdp.FullyShardedDataParallel) for m in module.modules()):
        raise CaptureError(
            f"{_name(module)} is sharded by FSDP, which gathers parameters in hooks that no graph holds. Plan the "
            "module without FSDP, and use plan.to_sac_policy() or plan.apply_modules() on the sharded one."
        )


def check_initialised(module: nn.Module) -> None:
    """Raise :class:`CaptureError` where a part of a module waits for its first call to make its parameters."""
    lazy = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(t)]
    if lazy:
        raise CaptureError(
            f"{_name(module)} has lazy parameters that its first call makes ({', '.join(lazy[:3])}"
            f"{', ...' if len(lazy) > 3 else ''}): capturing would draw their random numbers in another order than the "
            "plain call does. Call the module once with a batch, under torch.no_grad(), before it is scheduled."
        )


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


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its owner alive, and does nothing once that is gone.

    Dynamo holds what it has compiled where no garbage collector looks: what that held would live as long.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return call


def _unless_only_planning(
    compiled: Callable[..., Any], gm: fx.GraphModule, is_only_planning: Callable[[], bool]
) -> Callable[..., Any]:
    traced = [gm]

    def run(*inputs: Any) -> Any:
        if is_only_planning():
            raise _PlannedWithoutRunningError
        if traced:
            forget_traced_values(traced.pop())
        return compiled(*inputs)

    return run


class Attachment:
    """What makes a module a scheduled one. Stored in the module; called instead of its plain ``__call__``."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        given: Plan | None = None,
        only_plan: bool = False,
    ) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.loss = None if loss_fn is None else ExternalLoss(loss_fn)
        # With buckets a given plan is where to start from, else it is the only one that may run.
        self.given = None if settings.dynamic == "bucket" else given
        self.remembered = RememberedPlans(given)
        self.plan: Plan | None = None
        self.graphs: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self.previous_call: Any = None
        self._plain: Callable[..., Any] = module._call_impl  # noqa: SLF001 - what nn.Module.__call__ runs
        self.ends_at_plan = only_plan  # else planning with samples compiles too, and only does not run
        self.only_plan = only_plan
        # Found out when they are first needed: a copy is attached before deepcopy has filled the module.
        self._substituted: tuple[nn.Module, ...] | None = None
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._of_thread = threading.local()  # what the call in progress was given
        self._lock = threading.RLock()
        self._every_output = False
        self._steps: dict[_Situation, Callable[..., Any]] = {}
        self._may_break = settings.allow_graph_breaks
        self._pieces: dict[_Situation, Pieces] = {}
        self._captured: collections.Counter[_Situation] = collections.Counter()
        self._room: dict[bool, int] = {}

    def _compile(self, situation: _Situation) -> Callable[..., Any]:
        check_not_sharded(self.module)  # it may be since it was scheduled
        for part in self._parts():
            check_initialised(part)
        backend = Backend(
            module=self.module,
            settings=self.settings,
            optimizer=self.optimizer,
            loss_fn=None if self.loss is None else self.loss.function,
            call_inputs=_weakly(self._inputs_now),
            given=self.given,
            remembered=self.remembered,
            pieces=self._pieces_for(situation),
            on_planned=_weakly(self._end_here) if self.ends_at_plan else None,
            on_scheduled=functools.partial(_weakly(self._publish), situation),
            every_output=situation.every_output,
            on_secondary_gradient=_weakly(self._differentiate_every_output),
        )
        captured, is_only_planning = self._captured, _weakly(self._is_only_planning)

        def planned(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            captured[situation] += 1
            return _unless_only_planning(backend(gm, example_inputs), gm, is_only_planning)

        return torch.compile(self._entry_point(), backend=planned, fullgraph=not self._may_break, dynamic=False)

    def _pieces_for(self, situation: _Situation) -> Pieces | None:
        """The pieces of the step in a situation, where its graph may break."""
        if not self._may_break:
            return None
        if situation not in self._pieces:
            self._pieces[situation] = Pieces(self.settings)
        return self._pieces[situation]

    def _end_here(self, plan: Plan) -> None:
        self.plan = plan
        raise _PlannedWithoutRunningError

    def _is_only_planning(self) -> bool:
        return self.only_plan

    def _inputs_now(self) -> Any:
        """What the call in progress on this thread was given."""
        return getattr(self._of_thread, "inputs", ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: scheduled where gradients are wanted, plainly elsewhere.

        With an external loss, the loss that belongs to the call runs within it.
        """
        if not torch.is_grad_enabled() or (torch.compiler.is_compiling() and _torch.is_traced_here()):
            return self._plain(*args, **kwargs) if self.loss is None else self.loss.plain(self._plain, args, kwargs)
        if self.loss is None:
            check_none_given(kwargs, self.module)
        else:
            self.loss.check_given(kwargs, self.module)
        if self._substituted is None:
            self._substituted = tuple(layer for part in self._parts() for layer in needing_substitute(part))
        with _torch.capture_config(), substituted(self._substituted):
            self._of_thread.inputs = (args, kwargs)
            try:
                with self._lock:
                    situation = self._situation_now()
                    step = self._step_for(situation)
                if self._may_break:
                    return self._in_pieces(situation, step, args, kwargs)
                return step(*args, **kwargs)
            except _torch.BackendCompilerFailed as error:
                inner = error.inner_exception
                if isinstance(inner, CheckpointSchedulerError | ValueError | _PlannedWithoutRunningError):
                    raise inner from None
                raise CaptureError(f"{_name(self.module)} could not be planned: {inner!r}") from error
            except _torch.FailOnRecompileLimitHit as error:
                raise CaptureError(
                    f"{_name(self.module)} was captured too often: {error.__cause__ or error}"
                ) from error
            except (_torch.Unsupported, _torch.UserError) as error:
                raise CaptureError(
                    f"{_name(self.module)} could not be captured as one graph. {error}\n"
                    "Move what breaks the graph out of the module's forward, schedule the submodules around it, or "
                    "pass allow_graph_breaks=True to schedule the pieces."
                ) from error
            finally:
                self._of_thread.inputs = ()

    def _in_pieces(
        self, situation: _Situation, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a step whose graph may break; once it has shown its pieces, the next call captures them anew."""
        pieces = self._pieces[situation]
        pieces.begin()
        try:
            result = step(*args, **kwargs)
        except BaseException as error:
            end_measurements()  # the error's traceback keeps the graphs of the pieces that have run
            if isinstance(error, (CheckpointSchedulerError, *_torch.REFUSALS)):
                pieces.undo()
            raise
        differentiated = any(t.grad_fn is not None for t in tensors_in(result))
        if differentiated and pieces.is_first() and any(p.requires_grad for p in self.module.parameters()):
            raise CaptureError(
                f"no piece of {_name(self.module)} could be captured, and nothing of it would be scheduled. Without "
                "allow_graph_breaks=True the error names the line that breaks the graph"
            )
        with self._lock:
            if pieces.end() and self._steps.get(situation) is step:
                del self._steps[situation]
            whole = pieces.whole()
            if whole is not None and whole is not self.plan:
                self._publish_plan(situation, whole)
        return result

    def _situation_now(self) -> _Situation:
        gradients_resident = False
        room = self._room.get(self._every_output)
        if room is not None and self.given is None:
            existing = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
            gradients_resident = existing > room
        return _Situation(gradients_resident=gradients_resident, every_output=self._every_output)

    def _step_for(self, situation: _Situation) -> Callable[..., Any]:
        """The compiled step for a situation, compiled and planned when it first arises."""
        if self._captured[situation] >= MOST_CAPTURES:
            logger.warning(
                "%s was captured for %d shapes or modes: what was compiled for them is dropped, and captured again "
                "when it is needed; plans are kept",
                *(_name(self.module), MOST_CAPTURES),
            )
            del self._steps[situation], self._captured[situation]
        if situation not in self._steps:
            self._steps[situation] = self._compile(situation)
        return self._steps[situation]

    def _parts(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters and buffers take part in the step."""
        return (self.module,) if self.loss is None else (self.module, *self.loss.modules)

    def _entry_point(self) -> Callable[..., Any]:
        """A function of our own for Dynamo to trace, with a code object of its own so that modules share no cache."""
        module = self.module

        def step(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as __call__ does

        function = step if self.loss is None else self.loss.after(step)
        assert isinstance(function, types.FunctionType)
        code = function.__code__.replace(co_name="step")
        entry = types.FunctionType(code, function.__globals__, "step", function.__defaults__, function.__closure__)
        entry.__kwdefaults__ = function.__kwdefaults__
        return entry

    def _differentiate_every_output(self) -> None:
        """Plan anew with all outputs differentiated: one that was taken for a by-product has received a gradient."""
        self._every_output = True

    def plan_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Plan for a batch without running the step."""
        before, self.only_plan = self.only_plan, True
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():  # else the call would run, and plainly
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
        self.graphs = (scheduled.lowered.forward, scheduled.lowered.backward)
        if scheduled.lowered.transfers is not None:
            weakref.finalize(self, scheduled.lowered.transfers.retire).atexit = False
        self._publish_plan(situation, scheduled.plan)

    def _publish_plan(self, situation: _Situation, plan: Plan) -> None:
        self.plan = plan
        self._parameters = tuple({id(p): p for part in self._parts() for p in part.parameters()}.values())
        if not situation.gradients_resident and plan.budget_bytes is not None:
            room = plan.budget_bytes - plan.peak_bytes + plan.static.get("gradients", 0)
            self._room[situation.every_output] = min(room, self._room.get(situation.every_output, room))
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
        loss_fn = None if self.loss is None else self.loss.copied(memo)
        attachment = Attachment(twin, self.settings, loss_fn=loss_fn, given=self.given)
        attachment.plan = self.plan
        memo[id(self)] = attachment
        twin.__dict__[_CALL] = attachment
        return attachment

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a module stays scheduled: the loaded one plans anew on its first call."""
        loss_fn = None if self.loss is None else self.loss.function
        return _restore, (self.module, dataclasses.replace(self.settings), loss_fn)


def _restore(module: nn.Module, settings: Settings, loss_fn: Callable[..., Any] | None = None) -> Attachment:
    attachment = Attachment(module, settings, loss_fn=loss_fn)
    module.__dict__[_CALL] = attachment
    return attachment


def attachment_of(module: nn.Module) -> Attachment | None:
    """The handle of a scheduled module, or ``None``."""
    found = module.__dict__.get(HANDLE)
    return found if isinstance(found, Attachment) else None


def _name(module: nn.Module) -> str:
    return type(module).__name__
