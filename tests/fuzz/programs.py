"""Random training steps: modules written as fx graphs, with everything in them that a scheduler can get wrong.

``make_program(seed, size)`` draws ``size`` operations from a seeded generator: pointwise ops, matrix products, layers
(shared ones too), views, in-place writes (through views too), ops with several results, dropout and noise, buffers
that are read and updated, integer inputs, constants. A smaller size gives a prefix of the same program, so a failure is
shrunk by lowering the size. ``print(program.module.code)`` shows the program.
"""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphs._torch import storage_identity

BATCH, TIME, WIDTH, VOCABULARY = 8, 24, 32, 40
"""Sizes of the tensors: 24 kB each, large against what a few scalars take."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of the program under construction.

    Attributes:
        node: its fx node.
        meta: a tensor on ``meta`` with its shape and its place in autograd.
        may_write: whether eager allows it to be written to at all (no leaf, no view that has siblings).

    """

    node: fx.Node
    meta: Tensor
    may_write: bool = True


@dataclasses.dataclass(frozen=True)
class Program:
    """A random training step.

    Attributes:
        module: what is trained; every call takes the tensors of :meth:`batch`.
        floats: how many floating-point inputs it takes, ahead of two integer ones.
        differentiated: which of the floating-point inputs require grad.
        loss_inside: whether the first output is a scalar loss.
        used: positions of the outputs that the loss outside of the module reads.

    """

    module: fx.GraphModule
    floats: int
    differentiated: tuple[bool, ...]
    loss_inside: bool
    used: tuple[int, ...]

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        """Inputs: floating-point ones (batch, time, width), token ids (batch, time), an index (time,)."""
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(BATCH, TIME, WIDTH, generator=generator) for _ in range(self.floats)]
        ids = torch.randint(VOCABULARY, (BATCH, TIME), generator=generator)
        index = torch.randint(TIME, (TIME,), generator=generator)
        return (*(x.requires_grad_(r) for x, r in zip(inputs, self.differentiated, strict=True)), ids, index)

    def loss(self, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """The loss: the module's own, or a weighted sum over the outputs in use (``weights`` has one for each)."""
        if self.loss_inside:
            return outputs[0]
        terms = [(outputs[i] * weights[i]).sum() for i in self.used]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def make_program(seed: int, size: int) -> Program:
    """The program of a seed, with ``size`` operations; parameters are initialised from the seed too."""
    torch.manual_seed(seed)
    writer = _Writer(random.Random(seed))
    for _ in range(size):
        writer.add_operation()
    return writer.finish(random.Random(f"{seed} outputs"))


class _Writer:
    """Writes one program. ``saved`` holds the storages whose values autograd reads later: none may be written to."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.values: list[Value] = []
        self.saved: set[int] = set()
        self.layers: list[tuple[str, nn.Module]] = []
        self.differentiated = tuple(draw.random() < 0.4 for _ in range(draw.randint(1, 2)))
        for i, required in enumerate(self.differentiated):
            node = self.graph.placeholder(f"x{i}")
            meta = torch.empty(BATCH, TIME, WIDTH, device="meta", requires_grad=required)
            self.values.append(Value(node, meta, may_write=not required and draw.random() < 0.3))
        self.inputs = {storage_identity(v.meta) for v in self.values}
        self.saved_buffers: set[str] = set()
        self.ids = Value(
            self.graph.placeholder("ids"), torch.empty(BATCH, TIME, device="meta", dtype=torch.long), may_write=False
        )
        self.index = Value(
            self.graph.placeholder("index"), torch.empty(TIME, device="meta", dtype=torch.long), may_write=False
        )
        self.operations: list[tuple[Callable[[], None], int]] = [
            (self.pointwise, 6),
            (self.arithmetic, 6),
            (self.layer, 6),
            (self.view, 6),
            (self.several_results, 4),
            (self.write, 7),
            (self.write_through_view, 3),
            (self.randomness, 4),
            (self.update_buffer, 3),
            (self.use_buffer, 2),
            (self.by_index, 2),
            (self.product, 3),
            (self.join, 2),
            (self.selection, 1),
            (self.without_gradient, 1),
            (self.bare_parameter, 2),
        ]

    # --- emitting -----------------------------------------------------------------------------------------------------

    def emit(
        self,
        target: Callable[..., Any] | str,
        *args: Any,
        saves: Sequence[Value] = (),
        keep: bool = True,
        **kwargs: Any,
    ) -> Value:
        """Add a call of a function (or, by name, of a tensor's method), and run it on ``meta``.

        ``saves`` lists the values that autograd keeps for the backward; ``keep`` whether later operations may use it.
        """
        node_args, node_kwargs = _map((args, kwargs), lambda v: v.node)
        meta_args, meta_kwargs = _map((args, kwargs), lambda v: v.meta)
        if isinstance(target, str):
            node = self.graph.call_method(target, node_args, node_kwargs)
            meta = getattr(meta_args[0], target)(*meta_args[1:], **meta_kwargs)
        else:
            node = self.graph.call_function(target, node_args, node_kwargs)
            meta = target(*meta_args, **meta_kwargs)
        self.saved.update(storage_identity(v.meta) for v in saves)
        value = Value(node, meta)
        if keep and isinstance(meta, Tensor):
            self.values.append(value)
        return value

    def save(self, value: Value) -> Value:
        """Mark a value as read by the backward."""
        self.saved.add(storage_identity(value.meta))
        return value

    def item(self, container: Value, position: int, *, may_write: bool) -> Value:
        """Element of an op's several results."""
        node = self.graph.call_function(operator.getitem, (container.node, position))
        value = Value(node, container.meta[position], may_write=may_write)
        self.values.append(value)
        return value

    def attribute(self, name: str, tensor: Tensor) -> Value:
        """Read a parameter or buffer of the root."""
        return Value(self.graph.get_attr(name), tensor, may_write=False)

    def parameter(self, *shape: int) -> Value:
        """A parameter of the root: one that exists with this shape already, now and then, else a new one."""
        same = [name for name, p in self.root.named_parameters() if tuple(p.shape) == shape and "." not in name]
        name = self.draw.choice(same) if same and self.draw.random() < 0.4 else f"weight_{len(self.root._parameters)}"
        if not hasattr(self.root, name):
            self.root.register_parameter(name, nn.Parameter(torch.randn(shape) / max(shape[-1], 1) ** 0.5))
        return self.attribute(name, getattr(self.root, name).to("meta"))

    # --- picking ------------------------------------------------------------------------------------------------------

    def any_value(self, suits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """A value that suits, more often a recent one."""
        found = [v for v in self.values if v.meta.is_floating_point() and suits(v)]
        if not found:
            return None
        return found[-1 - min(int(self.draw.expovariate(0.3)), len(found) - 1)]

    def base(self) -> Value:
        """A value of the full shape (one of the inputs at least has it)."""
        value = self.any_value(lambda v: tuple(v.meta.shape) == (BATCH, TIME, WIDTH))
        assert value is not None
        return value

    def writable(self, suits: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """A value that eager lets be written to without harm to the backward: no leaf that requires grad, no view of
        one, nothing that was split into several views, nothing expanded."""
        return self.any_value(
            lambda v: (
                v.may_write
                and storage_identity(v.meta) not in self.saved
                and not any(t.is_leaf and t.requires_grad for t in (v.meta, v.meta._base) if t is not None)
                and suits(v)
                and not torch._debug_has_internal_overlap(v.meta)
            )
        )

    def is_input(self, value: Value) -> bool:
        """Whether a write to the value is one to the caller's tensor: then no gradient may come in with it."""
        return storage_identity(value.meta) in self.inputs

    def add_operation(self) -> None:
        """Draw one operation and write it."""
        operations, weights = zip(*self.operations, strict=True)
        self.draw.choices(operations, weights)[0]()

    # --- operations ---------------------------------------------------------------------------------------------------

    def pointwise(self) -> None:
        value = self.any_value()
        assert value is not None
        kind = self.draw.choice(["saves input", "saves result", "saves nothing"])
        if kind == "saves input":
            functions = (nn.functional.gelu, nn.functional.silu, torch.sin, torch.square, nn.functional.softplus)
            self.emit(self.draw.choice(functions), value, saves=[value])
        elif kind == "saves result":
            functions = (torch.relu, torch.tanh, torch.sigmoid)
            self.save(self.emit(self.draw.choice(functions), value))
        else:
            name, *scalars = self.draw.choice((("neg",), ("clone",), ("mul", 0.5), ("div", 3.0)))
            self.emit(name, value, *scalars)

    def arithmetic(self) -> None:
        a = self.any_value()
        assert a is not None
        b = self.any_value(lambda v: _broadcast(a, v) == tuple(a.meta.shape))
        assert b is not None
        kind = self.draw.choice([torch.add, torch.sub, torch.mul, torch.maximum, torch.lerp])
        if kind is torch.lerp:
            self.emit(torch.lerp, a, b, 0.3) if a.meta.shape == b.meta.shape else self.emit(torch.add, a, b)
        else:
            self.emit(kind, a, b, saves=[] if kind in (torch.add, torch.sub) else [a, b])

    def layer(self) -> None:
        value = self.base()
        if self.layers and self.draw.random() < 0.35:
            name, module = self.draw.choice(self.layers)  # the same block called twice
        else:
            name = f"layer_{len(self.layers)}"
            module = self.draw.choice(
                [
                    lambda: nn.Linear(WIDTH, WIDTH),
                    lambda: nn.LayerNorm(WIDTH),
                    lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
                    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2)),
                    lambda: nn.BatchNorm1d(TIME),
                    lambda: nn.BatchNorm1d(TIME, momentum=0.3, affine=False),
                ]
            )()
            linears = [m for m in module.modules() if isinstance(m, nn.Linear) and m.in_features == m.out_features]
            earlier = [m for _, layer in self.layers for m in layer.modules() if isinstance(m, nn.Linear)]
            earlier = [m for m in earlier if m.in_features == m.out_features]
            if linears and earlier and self.draw.random() < 0.8:
                linears[0].weight = self.draw.choice(earlier).weight  # tied
            if self.draw.random() < 0.15:
                module.requires_grad_(requires_grad=False)
            self.root.add_module(name, module)
            self.layers.append((name, module))
        node = self.graph.call_module(name, (value.node,))
        meta = value.meta + torch.empty((), device="meta", requires_grad=True)
        self.save(value)
        self.values.append(self.save(Value(node, meta)))

    def view(self) -> None:
        value = self.any_value(lambda v: v.meta.dim() >= 2)
        assert value is not None
        rows = value.meta.shape[-2]
        kind = self.draw.randrange(6)
        if kind == 0:
            self.emit("transpose", value, -1, -2)
        elif kind == 1:
            self.emit("reshape", value, -1, value.meta.shape[-1])
        elif kind == 2:
            self.emit("narrow", value, -2, 0, max(1, rows // 2))
        elif kind == 3 and value.meta.numel() == BATCH * TIME * WIDTH:
            self.emit("reshape", value, BATCH, TIME, WIDTH)
        elif kind == 4:
            self.emit("expand", self.emit("narrow", value, -2, 0, 1, keep=False), *value.meta.shape)
        else:
            self.emit("select", value, 0, value.meta.shape[0] // 2)

    def several_results(self) -> None:
        value = self.save(self.base())  # eager refuses writes to what was split into several views
        kind = self.draw.randrange(6)
        if kind == 0:
            pieces = self.emit("chunk", value, 2, -1)
        elif kind == 1:
            pieces = self.emit("split", value, [8, 8, 16], -1)
        elif kind == 2:
            pieces = self.emit("unbind", value, 0)
        elif kind == 3:
            pieces = self.emit(torch.var_mean, value, -1, keepdim=True, saves=[value])
        elif kind == 4:
            self.item(self.emit("max", value, -1, keepdim=True), 0, may_write=False)
            return
        else:
            pieces = self.emit("tensor_split", value, 3, 1)
        count = len(pieces.meta)
        for position in self.draw.sample(range(count), self.draw.randint(1, min(3, count))):
            self.item(pieces, position, may_write=False)

    def write(self) -> None:
        """Write to a tensor whose old value nobody needs."""
        value = self.writable()
        if value is None:
            self.emit("clone", self.base())
            return
        kind = self.draw.randrange(6)
        if kind == 0:
            other = self.any_value(lambda v: _broadcast(value, v) == tuple(value.meta.shape))
            if other is not None and storage_identity(other.meta) != storage_identity(value.meta):
                other = self.emit("detach", other, keep=False) if self.is_input(value) else other
                self.emit("add_", value, other)
        elif kind == 1:
            self.emit("mul_", value, 0.7)
        elif kind == 2:
            self.save(self.emit(self.draw.choice(["relu_", "tanh_", "sigmoid_"]), value))
        elif kind == 3:
            mask = self.emit("lt", self.emit("detach", value, keep=False), -0.5, keep=False)
            self.emit("masked_fill_", value, self.emit("clone", mask, keep=False), 0.25)
        elif kind == 4:
            self.emit("add_", value, 1.0)
        else:
            self.emit(nn.functional.dropout, value, 0.1, training=True, inplace=True)

    def write_through_view(self) -> None:
        """Write to a part of a tensor; the tensor and its other views see it."""
        value = self.writable(lambda v: v.meta.dim() >= 2 and v.meta.shape[-2] > 1)
        if value is None:
            self.emit("mul", self.base(), 0.5)
            return
        rows = value.meta.shape[-2] // 2
        part = self.emit("narrow", value, -2, 0, rows, keep=False)
        if self.draw.random() < 0.5:
            source = self.any_value(
                lambda v: (
                    _broadcast(part, v) == tuple(part.meta.shape)
                    and storage_identity(v.meta) != storage_identity(value.meta)
                )
            )
            if source is not None:
                source = self.emit("detach", source, keep=False) if self.is_input(value) else source
                self.emit("copy_", part, source, keep=False)
                return
        self.emit(self.draw.choice(["zero_", "neg_"]), part, keep=False)

    def randomness(self) -> None:
        value = self.any_value()
        assert value is not None
        kind = self.draw.randrange(5)
        if kind == 0:
            self.emit(nn.functional.dropout, value, self.draw.choice([0.1, 0.5]), training=True)
        elif kind == 1:
            self.emit("add", value, self.emit(torch.randn_like, value, keep=False))  # backward does not need it
        elif kind == 2:
            noise = self.emit(torch.rand_like, value, keep=False)
            self.emit("mul", value, noise, saves=[value])  # backward needs it
        elif kind == 3:
            probability = self.emit("sigmoid", self.emit("detach", value, keep=False), keep=False)
            self.emit("mul", value, self.emit(torch.bernoulli, probability, keep=False), saves=[value])
        else:
            base = self.base()
            self.emit(nn.functional.scaled_dot_product_attention, base, base, base, None, 0.1, saves=[base])

    def update_buffer(self) -> None:
        """Read a buffer, write to it, and now and then read it again.

        What is multiplied is a copy: eager refuses to differentiate by a buffer that is written to afterwards.
        """
        value = self.base()
        statistics = self.emit("mean", self.emit("detach", value, keep=False), (0, 1), keep=False)
        name = self.buffer()
        if name in self.saved_buffers:
            return
        if self.draw.random() < 0.6:
            self.emit("mul", value, self.emit("clone", self.read(name), keep=False), saves=[value])
        if self.draw.random() < 0.7:
            self.emit("lerp_", self.read(name), statistics, 0.1, keep=False)
        else:
            self.emit("add_", self.read(name), 0.125, keep=False)
        if self.draw.random() < 0.5:
            self.emit("mul", value, self.emit("clone", self.read(name), keep=False), saves=[value])

    def use_buffer(self) -> None:
        value = self.base()
        name = self.buffer()
        if self.draw.random() < 0.5:
            self.emit("add", value, self.read(name))
        else:
            self.saved_buffers.add(name)
            self.emit("mul", value, self.read(name), saves=[value])

    def buffer(self) -> str:
        existing = list(self.root._buffers)
        if existing and self.draw.random() < 0.6:
            return self.draw.choice(existing)
        name = f"buffer_{len(existing)}"
        self.root.register_buffer(name, torch.rand(WIDTH) + 0.5)
        return name

    def read(self, name: str) -> Value:
        return self.attribute(name, self.root._buffers[name].to("meta"))

    def by_index(self) -> None:
        kind = self.draw.randrange(4)
        if kind == 0:
            table = self.parameter(VOCABULARY, WIDTH)
            self.emit(nn.functional.embedding, self.ids, table)
        elif kind == 1:
            self.emit("index_select", self.base(), 1, self.index)
        elif kind == 2:
            value = self.base()
            clone = self.emit("clone", value, keep=False)
            self.emit("index_add_", clone, 1, self.index, value)
        else:
            self.emit("index_copy", self.base(), 1, self.emit(torch.argsort, self.index, keep=False), self.base())

    def product(self) -> None:
        kind = self.draw.randrange(3)
        value = self.base()
        if kind == 0:
            scores = self.emit(torch.matmul, value, self.emit("transpose", value, -1, -2, keep=False), saves=[value])
            weights = self.save(self.emit("softmax", scores, -1))
            self.emit(torch.matmul, weights, value, saves=[value])
        elif kind == 1:
            self.emit(torch.matmul, value, self.parameter(WIDTH, WIDTH), saves=[value])
        else:
            gate = self.save(self.emit("softmax", value, -1))
            self.emit(torch.einsum, "btc,btc->bt", gate, value, saves=[value])

    def join(self) -> None:
        a, b = self.base(), self.base()
        self.emit(torch.cat, [a, b], 1) if self.draw.random() < 0.5 else self.emit(torch.stack, [a, b])

    def selection(self) -> None:
        value = self.base()
        top = self.emit("topk", value, 8, -1) if self.draw.random() < 0.6 else self.emit("sort", value, -1)
        self.item(top, 0, may_write=False)

    def without_gradient(self) -> None:
        self.emit("clone", self.emit("detach", self.base(), keep=False))

    def bare_parameter(self) -> None:
        self.emit("add" if self.draw.random() < 0.5 else "sub", self.base(), self.parameter(WIDTH))

    # --- results ------------------------------------------------------------------------------------------------------

    def finish(self, draw: random.Random) -> Program:
        """Close the graph: a loss over all that is left unused, or several outputs."""
        last = self.emit("mul", self.base(), self.parameter(WIDTH))
        for node in [n for n in self.graph.nodes if n.op == "placeholder" and not n.users]:
            (value,) = (v for v in (*self.values, self.ids, self.index) if v.node is node)
            last = self.emit(
                "add", last, self.emit("mean", self.emit("to", value, torch.float32, keep=False), keep=False)
            )
        unused = [v for v in self.values if not v.node.users and v is not last and v.meta.is_floating_point()]
        # An output that is a view of an input gets its gradient outside of the scheduled graph.
        unused = [v for v in unused if not (self.is_input(v) and v.meta.requires_grad)]
        draw.shuffle(unused)
        loss_inside = draw.random() < 0.5
        results = [last, *(v for v in unused if v.node.op != "placeholder")][: draw.randint(1, 3)]
        if loss_inside:
            terms = [last, *(v for v in unused if v not in results)][: draw.randint(2, 5)]
            pieces = [self.emit("mean", self.emit(torch.mul, v, self.emit(torch.sin, v))) for v in terms]
            results = [self.emit("sum", self.emit(torch.stack, pieces)), *(results if draw.random() < 0.5 else [])]
        required = [i for i, v in enumerate(results) if v.meta.requires_grad]
        used = tuple(sorted(draw.sample(required, draw.randint(1, len(required))))) if required else ()
        self.graph.output(tuple(v.node for v in results))
        module = fx.GraphModule(self.root, self.graph, "RandomProgram")
        return Program(module, len(self.differentiated), self.differentiated, loss_inside, used)


def _map(tree: Any, function: Callable[[Value], Any]) -> Any:
    if isinstance(tree, Value):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_map(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: _map(item, function) for key, item in tree.items()}
    return tree


def _broadcast(a: Value, b: Value) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(a.meta.shape, b.meta.shape))
    except RuntimeError:
        return ()
