"""Time of each op from the figures of a datasheet: the roofline of a named device.

An op takes the longer of its arithmetic and its memory traffic, plus a fixed time to start it::

    time = max( flops / (peak flop/s of its dtype × efficiency),  bytes / (bandwidth × efficiency) ) + launch

(Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.) Floating-point operations come from
:mod:`torch.utils.flop_counter`; ops it does not know count as memory-bound. Bytes are those a kernel must move:
every input read once, every output written once, with the exceptions that :func:`op_bytes` lists.

The workspace of an op is 0 but for the rules in :func:`workspace_bytes`: what a kernel allocates beyond its outputs is
not in any datasheet. ``profiled`` measures it.
"""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.utils import flop_counter

from graphs._torch import OpOverload, packet_name, schema_of
from graphs.costs.devices import DeviceSpec, device_spec
from graphs.costs.signature import op_signature, target_name
from graphs.ir import Costs

logger = logging.getLogger(__name__)

_NO_KERNEL: Final = frozenset({"aten._unsafe_view", "aten._reshape_alias"})
"""Ops that move nothing although their schema does not say that they alias their input."""

_WRITES_NOTHING: Final = frozenset({"aten.empty", "aten.empty_strided", "aten.new_empty", "aten.empty_like"})
"""Ops that allocate and leave the bytes as they are."""

_OVERWRITES: Final = frozenset({"aten.copy_", "aten.fill_", "aten.zero_"})
"""In-place ops that write their first argument without reading it."""

_READS_SELECTED: Final = frozenset(
    {"aten.embedding", "aten.gather", "aten.index_select", "aten.index", "aten._unsafe_index", "aten.take"}
)
"""Ops that read of their first tensor argument as many elements as they return."""

_CPU_FLASH: Final = "aten._scaled_dot_product_flash_attention_for_cpu"

_FLOPS_AS: Final[Mapping[str, Any]] = types.MappingProxyType(
    {
        _CPU_FLASH: torch.ops.aten._scaled_dot_product_flash_attention,  # noqa: SLF001 - the op's name
        f"{_CPU_FLASH}_backward": torch.ops.aten._scaled_dot_product_flash_attention_backward,  # noqa: SLF001 - as above
    }
)
"""Ops that the flop counter lacks, and the op whose formula holds for them."""


def roofline(nodes: Sequence[fx.Node | None], device: str | DeviceSpec) -> Costs:
    """Estimate what each op costs on a device that need not be present.

    Args:
        nodes: the fx node of each op, with a fake tensor in ``meta["val"]``; ``None`` for an op without a kernel, which
            costs nothing.
        device: name in :data:`graphs.costs.devices.DEVICES`, or figures of one's own.

    Returns:
        Costs in op order, ``source="roofline"``. Times are rounded up to whole nanoseconds.

    Raises:
        ValueError: unknown device name.

    """
    spec = device_spec(device)
    known: dict[str, tuple[int, int]] = {}
    figures = []
    for node in nodes:
        if node is None or node.op != "call_function":
            figures.append((0, 0))
            continue
        key = op_signature(node)
        if key not in known:
            known[key] = estimate(node, spec)
        figures.append(known[key])
    return Costs(
        time_ns=tuple(time for time, _ in figures),
        workspace_bytes=tuple(workspace for _, workspace in figures),
        device=spec.name,
        source="roofline",
    )


def estimate(node: fx.Node, spec: DeviceSpec) -> tuple[int, int]:
    """Time in nanoseconds and workspace in bytes of one op; (0, 0) for one that only makes a view."""
    if makes_view(node.target):
        return 0, 0
    arithmetic_s = op_flops(node) / (spec.flops_per_s(compute_dtype(node)) * spec.compute_efficiency)
    traffic_s = op_bytes(node) / (spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency)
    return math.ceil(max(arithmetic_s, traffic_s) * 1e9) + spec.launch_ns, workspace_bytes(node, spec)


def makes_view(target: Any) -> bool:
    """Whether an op runs no kernel: every result aliases an argument that it does not write."""
    if not isinstance(target, OpOverload):
        return target_name(target) == "_operator.getitem"
    if packet_name(target) in _NO_KERNEL:
        return True
    returns = schema_of(target).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def op_flops(node: fx.Node) -> int:
    """Floating-point operations of an op, a multiplication and an addition counting two; 0 where not known.

    Formulas are those of :data:`torch.utils.flop_counter.flop_registry`; attention on CPU counts as on GPU. Causal
    attention is counted in full.
    """
    name = packet_name(node.target)
    key = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    formula: Callable[..., int] | None = flop_counter.flop_registry.get(_FLOPS_AS.get(name, key))
    if formula is None:
        return 0
    try:
        return int(formula(*_values(node.args), **_values(node.kwargs), out_val=node.meta.get("val")))
    except Exception as error:  # noqa: BLE001 - formulas assert what they have not foreseen; an estimate goes on
        logger.warning("%s (%s) counts as memory-bound: %s", node.name, target_name(node.target), error)
        return 0


def op_bytes(node: fx.Node) -> int:
    """Bytes that a kernel of this op must read and write.

    Every distinct tensor argument is read once and every result written once. Dimensions of stride 0 count once, as
    their elements share memory. Exceptions: lookups read only what they return, and their indices; an argument that is
    written in place counts as read and written, or as written alone where the op overwrites it (``copy_``); ops that
    leave their result uninitialised write nothing.
    """
    name = packet_name(node.target)
    results = _tensors(node.meta.get("val"))
    arguments = _argument_tensors(node)
    written = _written_arguments(node)
    if name in _WRITES_NOTHING:
        return 0
    if written:
        changed = sum(_touched_bytes(t) for t in written) * (1 if name in _OVERWRITES else 2)
        return changed + sum(_touched_bytes(t) for t in arguments if not any(t is w for w in written))
    moved = sum(_touched_bytes(t) for t in results)
    if name in _READS_SELECTED and arguments:
        return 2 * moved + sum(_touched_bytes(t) for t in arguments[1:])
    return moved + sum(_touched_bytes(t) for t in arguments)


def compute_dtype(node: fx.Node) -> str:
    """Name of the dtype at whose peak rate an op computes: that of its first floating-point tensor.

    ``tfloat32`` for float32 where :func:`torch.get_float32_matmul_precision` allows it.
    """
    for tensor in (*_argument_tensors(node), *_tensors(node.meta.get("val"))):
        if tensor.dtype.is_floating_point:
            if tensor.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
                return "tfloat32"
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def workspace_bytes(node: fx.Node, spec: DeviceSpec) -> int:
    """Scratch bytes of an op, where a rule is known; 0 elsewhere.

    The one rule: on a GPU, the backward of 16-bit flash attention accumulates the gradient of the queries in float32
    (batch × heads × queries rounded up to 128 × head size rounded up to 32) and holds one float32 per row, and with
    fewer key heads than query heads it makes the gradients of keys and values per query head before adding them up.
    """
    name = packet_name(node.target)
    flash = ("aten._scaled_dot_product_flash_attention_backward", f"{_CPU_FLASH}_backward")
    if not spec.is_gpu or name not in flash:
        return 0
    query, key = _values(node.args)[1:3]
    if query.dtype not in (torch.float16, torch.bfloat16):
        return 0
    batch, heads, queries, head_size = query.shape
    rows = batch * heads * _round_up(queries, 128)
    accumulator = rows * (_round_up(head_size, 32) + 1) * 4
    expanded = 2 * batch * heads * key.shape[2] * head_size * query.dtype.itemsize if key.shape[1] != heads else 0
    return int(accumulator + expanded)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a tensor: dimensions of stride 0 count once."""
    if tensor.numel() == 0:
        return 0
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    distinct = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(distinct) * tensor.element_size()


def _values(arguments: Any) -> Any:
    """Arguments with each node replaced by its ``meta["val"]``."""
    return fx.map_arg(arguments, lambda n: n.meta.get("val"))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _argument_tensors(node: fx.Node) -> list[torch.Tensor]:
    """Tensor arguments in order, a node that is passed twice once."""
    return [t for argument in node.all_input_nodes for t in _tensors(argument.meta.get("val"))]


def _written_arguments(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an op writes in place, by its schema."""
    if not isinstance(node.target, OpOverload):
        return []
    written = []
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        written += _tensors(_values(given))
    return written
