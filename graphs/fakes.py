"""Where the fake results of an op differ from what its kernel returns.

The kernel of a recurrent layer hands its backward a buffer in a layout of its own, to which fake tensors give no bytes.
So the kernel runs once for real, on zeros, which takes no more than the memory of one op, and its fake results are
corrected.
"""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any, Final

import torch
from torch import fx

from graphs._torch import packet_name, storage_identity
from graphs.kernels import as_executed
from graphs.mutations import move_views
from graphs.phases import is_tangent
from graphs.threads import on_own_thread

logger = logging.getLogger(__name__)

#: Ops that return such a buffer, and its position among their results.
_BUFFERS: Final = {"aten.mkldnn_rnn_layer": 3, "aten._cudnn_rnn": 3, "aten.miopen_rnn": 3}

#: Ops whose result may be their argument in fakes, though the real one never is: its position.
_ARGUMENT_IN_FAKES: Final = {"aten.native_dropout": 0}

#: Normalisations that on CPU give statistics in the precision of their weight, and the weight's position: fakes give
#: them in that of the input.
_WEIGHT_OF_NORM: Final = {
    "aten.native_layer_norm": 2,
    "aten.native_group_norm": 1,
    "aten.native_batch_norm": 1,
    "aten._native_batch_norm_legit_functional": 1,
}

#: Ops of which two results may be one in fakes, though the real ones are two with equal values: their positions.
_ONE_IN_FAKES: Final = {"aten.mkldnn_rnn_layer_backward": (3, 4)}

#: Ops that begin with a copy of the whole storage behind their first argument, and return a view of that. Fakes know
#: this only where they are not from torch's cache of fake results.
_COPIES_STORAGE: Final = frozenset(
    {"aten.copy", "aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter", "aten.as_strided_scatter"}
)


def correct_fake_results(joint: fx.GraphModule) -> None:
    """Give the values in a joint graph the sizes, and the storages of their own, that they really have."""
    _separate_tangents(joint)
    for node in joint.graph.nodes:
        packet = packet_name(node.target)
        if packet in _ARGUMENT_IN_FAKES:
            _replace_by_fresh(node, _ARGUMENT_IN_FAKES[packet])
        if packet in _WEIGHT_OF_NORM:
            _widen_statistics(node, node.args[_WEIGHT_OF_NORM[packet]])
        if packet in _ONE_IN_FAKES:
            _separate(joint, node, *_ONE_IN_FAKES[packet])
        if packet in _COPIES_STORAGE:
            _give_whole_storage(node, node.args[0])
        if packet in _BUFFERS:
            _correct_buffer(node, _BUFFERS[packet])


def buffer_origin(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The op that fills a buffer of its own layout, and its position there, if ``node`` is one."""
    if node.target is not operator.getitem:
        return None
    maker, position = node.args
    assert isinstance(maker, fx.Node)
    return (maker, position) if _BUFFERS.get(packet_name(maker.target)) == position else None  # type: ignore[return-value]


def _separate(joint: fx.GraphModule, node: fx.Node, first: int, second: int) -> None:
    """Give two equal results a storage each; where the step returns one of them twice, it returns each once."""
    _replace_by_fresh(node, second)
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if second not in items or first in items:
        return
    output = joint.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    if results.count(items[second]) < 2:
        return
    with joint.graph.inserting_before(items[second]):
        item = joint.graph.call_function(operator.getitem, (node, first))
    item.meta = {**items[second].meta, "val": node.meta["val"][first]}
    results[results.index(items[second])] = item
    output.args = (results,)


def _correct_buffer(node: fx.Node, position: int) -> None:
    fake = node.meta["val"][position]
    try:
        size, dtype = on_own_thread(
            functools.partial(_real_buffer, node, position), name="checkpoint-scheduler-buffers"
        )
    except Exception as error:  # noqa: BLE001 - whatever the kernel raises on stand-ins, training may work
        logger.warning("the size of the buffer that %s keeps for its backward is not known: %r", node.name, error)
        return
    with fake.fake_mode:
        _replace_result(node, position, torch.empty(size, dtype=dtype, device=fake.device))


def _widen_statistics(node: fx.Node, weight: Any) -> None:
    value = node.meta["val"][0]
    if not isinstance(weight, fx.Node) or value.device.type != "cpu":
        return
    dtype = weight.meta["val"].dtype
    if value.dtype not in (torch.bfloat16, torch.float16) or dtype is not torch.float32:
        return
    for position in (1, 2):
        fake = node.meta["val"][position]
        with fake.fake_mode:
            _replace_result(node, position, torch.empty_like(fake, dtype=dtype))


def _give_whole_storage(node: fx.Node, copied: fx.Node) -> None:
    value, like = node.meta["val"], copied.meta["val"]
    size = like.untyped_storage().nbytes()
    if value.stride() != like.stride() or value.untyped_storage().nbytes() == size:
        return
    before = storage_identity(value)
    with value.fake_mode:
        whole = torch.empty(size // like.itemsize, dtype=value.dtype, device=value.device)
        node.meta["val"] = whole.as_strided(value.shape, value.stride(), like.storage_offset())
    move_views(node, before)


def _separate_tangents(joint: fx.GraphModule) -> None:
    """Give the gradient of each output its own storage.

    The fake of one whose output is a view of an input looks at the input's storage, and that of one whose output is
    another output as well looks at the storage of the other's gradient.
    """
    seen: set[int] = set()
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        if is_tangent(node) and (shared := storage_identity(value)) in seen:
            with value.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
            move_views(node, shared)
        else:
            seen.add(storage_identity(value))


def _replace_by_fresh(node: fx.Node, position: int) -> None:
    fake = node.meta["val"][position]
    with fake.fake_mode:
        _replace_result(node, position, torch.empty_like(fake))


def _replace_result(node: fx.Node, position: int, value: torch.Tensor) -> None:
    values = list(node.meta["val"])
    before = storage_identity(values[position])
    values[position] = value
    node.meta["val"] = tuple(values)
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == position:
            user.meta["val"] = value
            move_views(user, before)


def elements_spanned(like: torch.Tensor) -> int:
    """Elements from the first to the last of a strided tensor: the least that a storage for its metadata holds."""
    return 0 if 0 in like.shape else 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))


def _real_buffer(node: fx.Node, position: int) -> tuple[tuple[int, ...], torch.dtype]:
    def zeros(argument: fx.Node) -> torch.Tensor:
        like = argument.meta["val"]
        return torch.zeros(elements_spanned(like), dtype=like.dtype, device=like.device).as_strided(
            like.shape, like.stride()
        )

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), zeros)
    target, args = as_executed(node, tuple(args))
    with torch.no_grad():
        buffer = target(*args, **kwargs)[position]
    return tuple(buffer.shape), buffer.dtype
