"""Every private torch name that the scheduler uses, in one place. Checked with torch 2.13 (CPU)."""
# ruff: noqa: SLF001 - that is what this file is for

from __future__ import annotations

import contextlib
import functools
import logging
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch._dynamo
import torch._functorch._aot_autograd.graph_compile as _graph_compile
import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, Unsupported, UserError
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "BackendCompilerFailed",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "Unsupported",
    "UserError",
    "VersionOf",
    "boxed",
    "capture_config",
    "compile_joint",
    "compiled_node_of",
    "is_gone",
    "is_traced_here",
    "storage_behind",
    "unset_fake_temporarily",
    "version_of",
]

_LOGGER_METHODS = (
    *("debug", "info", "warning", "warn", "error", "critical", "exception", "log"),
    *("debug_once", "info_once", "warning_once", "warning_advice"),
)


#: What a call raises where Dynamo, or the backend that it called, refuses to compile.
REFUSALS: Final = (BackendCompilerFailed, FailOnRecompileLimitHit, Unsupported, UserError)


def boxed(
    module: fx.GraphModule,
    _example_inputs: Sequence[Any] = (),
    *,
    skip: Callable[[], Sequence[Any] | None] = lambda: None,
    begin: Callable[[], None] = lambda: None,
    finish: Callable[[Sequence[Any]], Sequence[Any]] = lambda results: results,
) -> Callable[[list[Any]], Any]:
    """Make a graph take its inputs as one list that it empties, so that each can be freed after its last use."""
    transformer = module.graph._codegen._body_transformer
    module.graph.set_codegen(_BoxedCodeGen())
    module.graph._codegen._body_transformer = transformer
    module.recompile()
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        results = skip()
        if results is not None:
            arguments.clear()
            return results
        begin()
        return finish(forward(arguments))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compile_joint(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    *,
    skip_backward: Callable[[], Sequence[Any] | None],
    begin_backward: Callable[[], None],
    finish_backward: Callable[[Sequence[Any]], Sequence[Any]],
) -> Callable[..., Any]:
    """Trace a Dynamo graph's joint forward and backward, have ``partition`` split it, and make the halves callable.

    Args:
        gm: graph that Dynamo hands to a backend.
        example_inputs: its inputs.
        partition: called as ``partition(joint, joint_inputs, num_fwd_outputs=...)``; other keywords are dropped.
        skip_backward: called before each backward; the results of one that need not run, or ``None``.
        begin_backward: called at the start of each backward.
        finish_backward: called with the gradients at the end of each backward; returns those to hand on.

    """

    def partition_fn(
        joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def compile_backward(module: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return boxed(module, skip=skip_backward, begin=begin_backward, finish=finish_backward)

    # Without fallback_random, tracing drops random ops whose results nobody reads, and the stream would end elsewhere.
    random_ops_stay = torch._inductor.config.patch(fallback_random=True)
    # A backward runs outside of the autocast context that the forward ran in, as in eager mode.
    backward_outside = torch._functorch.config.patch({"backward_pass_autocast": "off"})
    with _no_donated_buffers(), random_ops_stay, backward_outside, native_kernels():
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=boxed,
            bw_compiler=compile_backward,
            partition_fn=partition_fn,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)
    return compiled


def _no_donated_buffers() -> contextlib.AbstractContextManager[Any]:
    """While compiling, have no saved tensor be given away for reuse.

    AOTAutograd refuses ``retain_graph=True`` at run time unless the list of such tensors is there and empty; its own
    switch leaves the list out instead. Nothing here reuses the bytes of a saved tensor.
    """
    return unittest.mock.patch.object(_graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])


#: Operators whose decomposition rounds otherwise than their kernel, or takes dozens of ops for one.
_KEPT_WHOLE = (
    "upsample_",
    "_upsample_",
    "hardshrink",
    "softshrink",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "lstm",
    "gru",
    "rnn_",
)


@functools.cache
def _decomposed_operators() -> tuple[Any, ...]:
    """Overloads of these operators for which torch registers Python kernels that only tracing takes."""
    overloads = [
        getattr(packet, overload)
        for packet in (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_KEPT_WHOLE))
        for overload in packet.overloads()
    ]
    return tuple(o for o in overloads if any(key in o.py_kernels for key in _TRACING_KEYS))


_TRACING_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def native_kernels() -> Iterator[None]:
    """While tracing, have ops run the kernels they run in eager mode.

    torch decomposes some of them (upsampling above all) in Python as soon as a tracer is active.
    """
    saved = []
    for operator in _decomposed_operators():
        taken = {key: operator.py_kernels.pop(key) for key in _TRACING_KEYS if key in operator.py_kernels}
        operator._dispatch_cache.clear()
        saved.append((operator, taken))
    dropout = torch.ops.aten.dropout.default
    fused = {key: dropout.py_kernels[key] for key in _TRACING_KEYS if key in dropout.py_kernels}
    saved.append((dropout, fused))
    dropout.py_kernels.update({key: _dropout_kernel(kernel) for key, kernel in fused.items()})
    dropout._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, taken in saved:
            operator.py_kernels.update(taken)
            operator._dispatch_cache.clear()


def _dropout_kernel(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout as eager mode computes it; the fused op serves where the two agree.

    In 16 bits on CPU eager mode rounds the scale. Where everything is dropped, it draws nothing.
    """

    def kernel(x: torch.Tensor, p: float, train: bool) -> Any:  # noqa: FBT001 - the operator's schema
        if p == 1 or (x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)):
            composite = torch._C.DispatchKey.CompositeImplicitAutograd
            return torch.ops.aten.dropout.default._op_dk(composite, x, p, train)
        return fused(x, p, train)

    return kernel


def is_traced_here() -> bool:
    """Whether the calling thread traces a program, for which :func:`torch.compiler.is_compiling` must be true already.

    That flag is one for the whole process: it is set while some other thread compiles, too.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_exporting() or CompileContext.try_get() is not None


def capture_config() -> contextlib.AbstractContextManager[None]:
    """Dynamo's settings while a scheduled module runs: logging breaks no graph, hooks added later are seen.

    They hold for the calling thread: torch keeps patched settings per thread.
    """
    ignored = torch._dynamo.config.ignore_logging_functions
    if isinstance(ignored, _LoggingMethods):
        return contextlib.nullcontext()  # within a call of another scheduled module
    return _config_patch(frozenset(ignored))


@functools.lru_cache(maxsize=8)
def _config_patch(ignored: frozenset[Any]) -> contextlib.AbstractContextManager[None]:
    """The settings as a context that any number of calls enter: making one takes longer than some ops."""
    return torch._dynamo.config.patch(  # type: ignore[no-any-return]
        optimize_ddp=False,  # would hand over a graph per bucket of DistributedDataParallel
        skip_nnmodule_hook_guards=False,
        allow_rnn=True,
        recompile_limit=256,
        accumulated_recompile_limit=1024,
        fail_on_recompile_limit_hit=True,  # else what is over the limit runs plainly
        ignore_logging_functions=_LoggingMethods(ignored),
    )


class _LoggingMethods(set[Any]):
    """The set of all methods of all loggers, without listing them."""

    def __contains__(self, function: object) -> bool:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        return super().__contains__(function) or (isinstance(owner, logging.Logger) and name in _LOGGER_METHODS)


def compiled_node_of(outputs: Sequence[Any]) -> Any:
    """Autograd node of an AOTAutograd-compiled function, found from its outputs; ``None`` where no gradient flows."""
    pending = [o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node.name().startswith("CompiledFunction"):
            return node
        pending.extend(n for n, _ in node.next_functions if n is not None)
    return None


def is_gone(reference: StorageWeakRef) -> bool:
    """Whether the storage that a weak reference stands for has been freed."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def storage_behind(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that a weak reference stands for, or ``None`` where it is gone."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, was changed in place; 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


class VersionOf:
    """The count of in-place changes of a tensor and of all its views, held without holding its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = tensor.detach()
        with torch.autograd._unsafe_preserve_version_counter(self._counter):  # type: ignore[attr-defined]
            self._counter.set_()  # type: ignore[call-overload]
        self.seen = self._counter._version

    @property
    def is_current(self) -> bool:
        """Whether the tensor is as it was when this was made."""
        return self._counter._version == self.seen
