"""Made-up arguments for one op: real tensors of the right shape, strides, dtype and device, with values that are valid.

Floating-point tensors are uniform in [0, 1): valid as probabilities, variances and weights. Booleans are fair coins.
Integers are 0, but where the op looks something up by them: then they are uniform within the valid range, since an
index outside it is an error on CPU and the end of the process's context on CUDA, and equal indices would make scattered
additions collide. A buffer that only a library's forward can fill is filled by running that forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from graphs._torch import OpOverload, packet_name, schema_of
from graphs.fakes import buffer_origin, elements_spanned
from graphs.kernels import as_executed

_BLOCK_ELEMENTS: Final = 1 << 20
"""Random values are drawn for this many elements and repeated: drawing 10^8 of them would take longer than the op."""

_SEED: Final = 0


class CannotSampleError(Exception):
    """No valid arguments can be made up for an op. The message says why."""


class Sampler:
    """Makes arguments on one device, from generators of its own.

    Args:
        device: where the op is to run.
        retarget: whether tensors that the graph holds elsewhere are made on ``device`` too (a graph captured on CPU
            whose ops are measured on a GPU). Otherwise each is made where the graph has it.

    """

    def __init__(self, device: torch.device, *, retarget: bool) -> None:
        self._device = device
        self._retarget = retarget
        self._generators: dict[torch.device, torch.Generator] = {}

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for the op of ``node``.

        Raises:
            CannotSampleError: an argument has a symbolic size, is no dense tensor, or is not known.

        """
        bounds = _integer_bounds(node)
        made = {argument: self._argument(argument, bounds.get(argument, 1)) for argument in node.all_input_nodes}
        return tuple(self._put(a, made) for a in node.args), {k: self._put(a, made) for k, a in node.kwargs.items()}

    def _put(self, argument: Any, made: Mapping[fx.Node, Any]) -> Any:
        """An argument with what was made for each node in its place."""
        if isinstance(argument, fx.Node):
            return made[argument]
        if isinstance(argument, list | tuple):
            return [self._put(a, made) for a in argument]
        if isinstance(argument, dict):
            return {key: self._put(value, made) for key, value in argument.items()}
        if isinstance(argument, torch.device):
            return self._place(argument)
        return argument

    def _argument(self, node: fx.Node, bound: int) -> Any:
        if "val" not in node.meta:
            return _constant(node)
        if (origin := buffer_origin(node)) is not None:
            return self._filled(*origin)
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, bound)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CannotSampleError(f"argument {node.name} has the symbolic value {value}")
        if isinstance(value, list | tuple):
            return [self._tensor(v, bound) if isinstance(v, torch.Tensor) else v for v in value]
        return value

    def _filled(self, maker: fx.Node, position: int) -> Any:
        """A buffer that an op's kernel has written, from made-up arguments of that op."""
        args, kwargs = self.arguments(maker)
        target, args = as_executed(maker, args)
        return target(*args, **kwargs)[position]

    def _place(self, device: torch.device) -> torch.device:
        if self._retarget or device.type in (self._device.type, "meta"):
            return self._device
        return torch.device(device.type)

    def _tensor(self, like: torch.Tensor, bound: int) -> torch.Tensor:
        """Make a tensor with the metadata of ``like``; integers below ``bound``."""
        if like.layout is not torch.strided:
            raise CannotSampleError(f"tensors of layout {like.layout} are not made up")
        size, stride = tuple(like.shape), tuple(like.stride())
        if not all(isinstance(n, int) for n in (*size, *stride)):
            raise CannotSampleError(f"shape {size} with strides {stride} is symbolic")
        flat = torch.empty(elements_spanned(like), dtype=like.dtype, device=self._place(like.device))
        self._fill(flat, bound)
        return flat.as_strided(size, stride)

    def _fill(self, flat: torch.Tensor, bound: int) -> None:
        if flat.is_complex():
            self._fill(torch.view_as_real(flat).flatten(), bound)
            return
        integral = not flat.is_floating_point() and flat.dtype is not torch.bool
        if integral and bound <= 2:  # one value or, for divisors, the value one: nothing to draw
            flat.fill_(bound - 1)
            return
        block = torch.empty(min(flat.numel(), _BLOCK_ELEMENTS), dtype=_drawn_dtype(flat.dtype), device=flat.device)
        generator = self._generator(flat.device)
        if block.is_floating_point():
            block.uniform_(generator=generator)
        else:
            block.random_(0, 2 if flat.dtype is torch.bool else bound, generator=generator)
        for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
            part = flat[start : start + _BLOCK_ELEMENTS]
            part.copy_(block[: part.numel()])

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(_SEED)
        return self._generators[device]


def _drawn_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that random values can be drawn in: the 8-bit floats cannot."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


def _constant(node: fx.Node) -> Any:
    """Value of a ``get_attr`` node without metadata: a sub-graph of a higher-order op, or a real constant."""
    value: Any = node.graph.owning_module
    if node.op != "get_attr" or value is None:
        raise CannotSampleError(f"nothing is known of argument {node.name}")
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    if value is None:
        raise CannotSampleError(f"the graph's module has no attribute {node.target}")
    return value


# --- valid integers -------------------------------------------------------------------------------------------------

_Named = Mapping[str, Any]


def _integer_bounds(node: fx.Node) -> dict[fx.Node, int]:
    """Exclusive upper bound of each integer tensor argument that has one other than 1."""
    rule = _RULES.get(packet_name(node.target))
    if rule is None or not isinstance(node.target, OpOverload):
        return {}
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    values = fx.map_arg(given, lambda n: n.meta.get("val"))
    bounds: dict[fx.Node, int] = {}
    for name, bound in rule(values).items():
        nodes = given.get(name)
        for position, argument in enumerate(nodes if isinstance(nodes, list | tuple) else [nodes]):
            limit = bound[position] if isinstance(bound, list) else bound
            if isinstance(argument, fx.Node):
                bounds[argument] = max(1, int(limit))
    return bounds


def _rows(values: _Named) -> dict[str, Any]:
    return {"indices": values["weight"].shape[0]}


def _row_count(values: _Named) -> dict[str, Any]:
    return {"indices": values["num_weights"]}


def _along_dim(values: _Named) -> dict[str, Any]:
    shape = values["self"].shape
    return {"index": shape[values["dim"]] if shape else 1}


def _any_element(values: _Named) -> dict[str, Any]:
    return {"index": values["self"].numel()}


def _classes(values: _Named) -> dict[str, Any]:
    shape = values["self"].shape
    return {"target": shape[1] if len(shape) > 1 else shape[0]}


def _per_dimension(values: _Named) -> dict[str, Any]:
    """Bounds of a list of index tensors, one per dimension; a mask stands for as many dimensions as it has."""
    shape, bounds, dimension = values["self"].shape, [], 0
    for index in values["indices"]:
        bounds.append(shape[dimension])
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        dimension += index.dim() if masks else 1
    return {"indices": bounds}


def _window(dimensions: int) -> Callable[[_Named], dict[str, Any]]:
    def bounds(values: _Named) -> dict[str, Any]:
        return {"indices": math.prod(values["self"].shape[-dimensions:])}

    return bounds


def _divisor(_: _Named) -> dict[str, Any]:
    return {"other": 2}  # below 2, drawn as the constant 1


_RULES: Final[Mapping[str, Callable[[_Named], dict[str, Any]]]] = {
    "aten.embedding": _rows,
    "aten._embedding_bag": _rows,
    "aten.embedding_dense_backward": _row_count,
    **dict.fromkeys(
        (
            "aten.gather",
            "aten.index_select",
            "aten.index_add",
            "aten.index_add_",
            "aten.index_copy",
            "aten.index_copy_",
            "aten.index_fill",
            "aten.index_fill_",
            "aten.scatter",
            "aten.scatter_",
            "aten.scatter_add",
            "aten.scatter_add_",
            "aten.scatter_reduce",
            "aten.scatter_reduce_",
        ),
        _along_dim,
    ),
    **dict.fromkeys(("aten.take", "aten.put", "aten.put_"), _any_element),
    **dict.fromkeys(
        (
            "aten.nll_loss_forward",
            "aten.nll_loss_backward",
            "aten.nll_loss2d_forward",
            "aten.nll_loss2d_backward",
        ),
        _classes,
    ),
    **dict.fromkeys(
        (
            "aten.index",
            "aten._unsafe_index",
            "aten.index_put",
            "aten.index_put_",
            "aten._unsafe_index_put",
        ),
        _per_dimension,
    ),
    "aten.max_pool2d_with_indices_backward": _window(2),
    "aten.adaptive_max_pool2d_backward": _window(2),
    "aten.max_pool3d_with_indices_backward": _window(3),
    "aten.adaptive_max_pool3d_backward": _window(3),
    **dict.fromkeys(
        ("aten.div", "aten.div_", "aten.floor_divide", "aten.remainder", "aten.fmod", "aten.remainder_"), _divisor
    ),
}
"""For each op that looks something up by integers: the exclusive upper bound of each such argument, by its name."""
