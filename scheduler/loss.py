"""A loss that is taken outside of the module, put inside the scheduled step.

The call of the module becomes the call of the loss: ``model(x, loss_args=(target,))`` returns
``loss_fn(model(x), target)``. The output itself is then a value like any other inside of the step, which need not be
kept to its end.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

#: Keyword of a scheduled module's call that carries the loss's further arguments.
LOSS_ARGS: Final = "loss_args"


def check_none_given(kwargs: Mapping[str, Any], module: nn.Module) -> None:
    """Refuse arguments of a loss where there is none, unless the module has an argument of that name.

    Raises:
        TypeError: ``loss_args`` is given.

    """
    if LOSS_ARGS not in kwargs:
        return
    accepted = inspect.signature(module.forward).parameters.values()
    if not any(p.name == LOSS_ARGS or p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted):
        raise TypeError(
            f"{type(module).__name__} was called with loss_args and is scheduled without a loss: give it as in "
            "schedule(model, budget_gb, loss_fn=criterion)"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalLoss:
    """The loss of a scheduled module.

    Attributes:
        function: called with the module's output and then ``loss_args``; may be a module.

    """

    function: Callable[..., Any]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The loss, where it is a module: its parameters are trained and its buffers are held like the model's."""
        return (self.function,) if isinstance(self.function, nn.Module) else ()

    def check_given(self, kwargs: Mapping[str, Any], module: nn.Module) -> None:
        """Refuse a call that wants gradients without the arguments of the loss.

        Raises:
            TypeError: ``loss_args`` is left out, or is no tuple.

        """
        name = type(module).__name__
        if LOSS_ARGS not in kwargs:
            raise TypeError(
                f"{name} is scheduled with loss_fn: call it as loss = model(..., loss_args=(target,)), which returns "
                "loss_fn(output, target). For the output alone, call it under torch.no_grad()."
            )
        if not isinstance(kwargs[LOSS_ARGS], tuple | list):
            raise TypeError(
                f"loss_args of {name} takes a tuple of what loss_fn takes after the output, as in "
                f"loss_args=(target,), and got {type(kwargs[LOSS_ARGS]).__name__}"
            )

    def after(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls the forward and then the loss."""
        loss_fn = self.function

        def step(*args: Any, loss_args: tuple[Any, ...], **kwargs: Any) -> Any:
            return loss_fn(forward(*args, **kwargs), *loss_args)

        return step

    def plain(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call without a schedule: the loss where its arguments are given, else the output."""
        if LOSS_ARGS not in kwargs:
            return forward(*args, **kwargs)
        return self.after(forward)(*args, **kwargs)

    def copied(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The loss for a copy of the module: a loss that is a module is copied, a function is shared."""
        return copy.deepcopy(self.function, memo) if isinstance(self.function, nn.Module) else self.function
