"""Which outputs a training step differentiates, and what happens when it turns out otherwise.

AOTAutograd differentiates every output that requires grad and fills in zeros for gradients that do not come. For a
model that returns its loss together with logits that would allocate, and add, a zero tensor of the logits' size. So
an output that another, scalar output is computed from is *secondary*: the graph treats it as a constant, and it is
handed to the user by a node of its own. If a gradient does reach it there, the plain step is replayed from its inputs,
and later steps are planned with every output differentiated.

Where several outputs are differentiated and only some receive a gradient, parameters that none of these reach get
``None``, as in plain training, instead of the zeros of AOTAutograd.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphs._torch import storage_identity
from graphs.errors import UnsupportedModelError
from graphs.joint import storage_bytes
from scheduler._torch import compiled_node_of
from scheduler.runtime import rng


def secondary_outputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """Positions of outputs that require grad and that a scalar output is computed from.

    None where another differentiated output is a view of what the step made and several outputs look at it: such
    outputs are made outside of the compiled function, where a replay for the others would add their gradients up in an
    order of its own.
    """
    outputs = _results(gm)
    differentiated = [(i, o) for i, o in enumerate(outputs) if _requires_grad(o)]
    ancestors: set[fx.Node] = set()
    pending = [i for _, o in differentiated if o.meta["example_value"].numel() == 1 for i in o.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending.extend(node.all_input_nodes)
    secondary = tuple(i for i, o in differentiated if o in ancestors and o.op != "placeholder")
    shared = _views_of_intermediates(gm)
    if any(position not in secondary for views in shared for position in views):
        return ()
    return secondary


def held_gradients(
    gm: fx.GraphModule, joint: fx.GraphModule, secondary: Sequence[int], device: torch.device
) -> dict[str, int]:
    """Gradients of inputs that reach them past the compiled backward, in bytes by name.

    An output that is a view of an input is made outside of the compiled function. The backward of the view runs first,
    and the gradient of the whole input that it makes is held until the compiled backward brings the other share.

    Args:
        gm: the Dynamo graph.
        joint: what was traced from it.
        secondary: positions of outputs that are not differentiated.
        device: whose memory counts.

    """
    inside = _inside(joint) | set(secondary)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and _requires_grad(n)]
    by_storage = {storage_identity(n.meta["example_value"]): n for n in inputs}
    held: dict[str, int] = {}
    for position, output in enumerate(_results(gm)):
        if position in inside or not _requires_grad(output):
            continue
        source = by_storage.get(storage_identity(output.meta["example_value"]))
        if source is not None:
            value = source.meta["example_value"]
            held[f"gradient of {source.name}"] = (
                value.numel() * value.element_size() if value.device.type == device.type else 0
            )
    return held


def summed_bytes(gm: fx.GraphModule, joint: fx.GraphModule, secondary: Sequence[int], device: torch.device) -> int:
    """Most that autograd allocates, and frees, to sum up the gradients of views that the compiled backward sees as one.

    Outputs that look at the same intermediate are made outside of the compiled function, from their base. The gradient
    of each becomes one of the whole base: the sum so far, the next and their sum are live at once, and the compiled
    backward receives the last of them.

    Args:
        gm: the Dynamo graph.
        joint: what was traced from it.
        secondary: positions of outputs that are not differentiated.
        device: whose memory counts.

    """
    inside = _inside(joint) | set(secondary)
    sums = [
        2 * storage_bytes(next(iter(views.values())), device)
        for views in _views_of_intermediates(gm)
        if any(position not in inside for position in views)
    ]
    return max(sums, default=0)


def _inside(joint: fx.GraphModule) -> set[Any]:
    """Positions of the outputs that the compiled backward receives a gradient for."""
    tangents = [node.meta.get("desc") for node in joint.graph.nodes if node.name.startswith("tangents_")]
    return {getattr(getattr(t, "output", None), "idx", None) for t in tangents}


def detach_outputs(gm: fx.GraphModule, positions: Sequence[int]) -> fx.GraphModule:
    """The same graph, with the outputs at these positions detached."""
    if not positions:
        return gm
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, mapping)
    results: list[Any] = [mapping[o] if isinstance(o, fx.Node) else o for o in _results(gm)]
    for position in positions:
        source = results[position]
        results[position] = graph.call_method("detach", (source,))
        results[position].meta = {"example_value": source.meta["example_value"].detach()}
    output = graph.output(tuple(results))
    output.meta = dict(gm.graph.output_node().meta)
    detached = fx.GraphModule(gm, graph, type(gm).__name__)
    detached.meta = dict(gm.meta)
    return detached


def _results(gm: fx.GraphModule) -> Sequence[Any]:
    """What a graph returns: nodes or constants, in order."""
    results = gm.graph.output_node().args[0]
    assert isinstance(results, list | tuple)
    return results


def _views_of_intermediates(gm: fx.GraphModule) -> list[dict[int, torch.Tensor]]:
    """Differentiated outputs by position, of each storage that the step makes and that several of them look at."""
    values = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    of_inputs = {storage_identity(value) for value in values if isinstance(value, torch.Tensor)}
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for position, output in enumerate(_results(gm)):
        if _requires_grad(output):
            value = output.meta["example_value"]
            groups.setdefault(storage_identity(value), {})[position] = value
    return [views for identity, views in groups.items() if len(views) > 1 and identity not in of_inputs]


def _requires_grad(output: Any) -> bool:
    value = output.meta.get("example_value") if isinstance(output, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


@dataclasses.dataclass(frozen=True, slots=True)
class StepContext:
    """What the plain step needs to run again exactly: inputs as they were, random state, autocast state.

    Attributes:
        inputs: the graph's inputs; those that the step overwrites are copies from before.
        versions: version counters of the tensors among the inputs at that time.
        overwritten: positions of the inputs that the step overwrites.
        rng_states: states of the CPU generator and, where used, of CUDA's, by name of device.
        autocast: per device type whether autocast was on, and its dtype.

    """

    inputs: tuple[Any, ...]
    versions: tuple[int | None, ...]
    overwritten: frozenset[int]
    rng_states: Mapping[str, torch.Tensor]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def record(cls, inputs: Sequence[Any], overwritten: Sequence[int], device: torch.device) -> StepContext:
        """Note the state before a step."""
        kept = tuple(x.detach().clone() if i in overwritten else x for i, x in enumerate(inputs))
        kinds = {"cpu", device.type}
        return cls(
            inputs=kept,
            versions=tuple(x._version if isinstance(x, torch.Tensor) else None for x in kept),  # noqa: SLF001
            overwritten=frozenset(overwritten),
            rng_states=rng.record_states(device),
            autocast=tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)),
        )

    @staticmethod
    def bytes_kept(inputs: Sequence[Any], overwritten: Sequence[int], device: torch.device) -> int:
        """Bytes on ``device`` that a context holds after the forward: copies of inputs, and the CPU's random state."""
        copied = [x for i, x in enumerate(inputs) if i in overwritten and isinstance(x, torch.Tensor)]
        states = torch.get_rng_state().numel() if device.type == "cpu" else 0
        return states + sum(storage_bytes(x, device) for x in copied)

    def gradients(
        self, gm: Callable[..., Sequence[Any]], device: torch.device, gradients: dict[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run the plain graph again and differentiate the outputs at these positions.

        Returns:
            For each input the gradient, or ``None``.

        Raises:
            RuntimeError: an input was overwritten since the forward.

        """
        for value, version in zip(self.inputs, self.versions, strict=True):
            if isinstance(value, torch.Tensor) and value._version != version:  # noqa: SLF001
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an input of shape {tuple(value.shape)} of a scheduled module is at version {value._version}, "  # noqa: SLF001
                    f"expected version {version}"
                )
        leaves = [
            (x.clone() if i in self.overwritten else x.detach()).requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor)
            else x
            for i, x in enumerate(self.inputs)
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            rng.restore_states(self.rng_states)
            with torch.enable_grad():
                outputs = gm(*leaves)
        wanted = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        found = torch.autograd.grad(
            [outputs[p] for p in gradients], [x for _, x in wanted], list(gradients.values()), allow_unused=True
        )
        results: list[torch.Tensor | None] = [None] * len(leaves)
        for (i, _), gradient in zip(wanted, found, strict=True):
            results[i] = gradient
        return results


class _Secondary(torch.autograd.Function):
    """Stands between a step and its outputs: the gradients of primary outputs pass through to the compiled backward.

    Where a secondary output receives a gradient, the plain step is replayed instead for all gradients at once, so that
    they meet in the order in which they do in plain training: sums of parts would round otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any, replay: Callable[..., Any], outputs: list[Any], positions: Any, secondary: Any, *inputs: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.replay = replay
        ctx.positions = positions
        ctx.secondary = secondary
        ctx.inputs = len(inputs) - (len(positions) - len(secondary))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = {p: g for p, g in zip(ctx.positions, gradients, strict=True) if g is not None}
        if given.keys() & ctx.secondary:
            if torch.is_grad_enabled():
                raise UnsupportedModelError(
                    "create_graph=True: an output that the loss is computed from received a gradient of its own, and "
                    "second derivatives through a scheduled module are not supported"
                )
            passed: list[Any] = [None] * (len(gradients) - len(ctx.secondary))
            return (None, None, None, None, *ctx.replay(given), *passed)
        passed = [given.get(p) for p in ctx.positions if p not in ctx.secondary]
        return (None, None, None, None, *[None] * ctx.inputs, *passed)


def _refuse_watchers(attached: Sequence[torch.Tensor], secondary: int) -> None:
    """Have a backward refused that owes someone the whole gradient of a secondary output: it passes such an output by.

    Args:
        attached: outputs of one node, before anybody else has them.
        secondary: how many of them are secondary; they come first.

    """
    watched = [weakref.ref(value) for value in attached[:secondary]]

    def check(_: torch.Tensor | None) -> None:
        for output in watched:
            value = output()
            if value is None:
                continue
            if value.retains_grad or any(key != mine.id for key in value._backward_hooks or ()):  # noqa: SLF001
                raise UnsupportedModelError(
                    f"retain_grad() or a hook on an output of shape {tuple(value.shape)} that the loss is computed "
                    "from: the loss is taken inside of the scheduled module, so that its gradient does not pass "
                    "through the output. Take the loss outside, or look at the gradient inside of the forward"
                )

    # Of the hooks of a node the one that was registered first runs first.
    mine = attached[-1].register_hook(check)  # type: ignore[no-untyped-call]


def attach_secondary(
    outputs: Sequence[Any],
    positions: Sequence[int],
    inputs: Sequence[Any],
    replay: Callable[[dict[int, torch.Tensor]], list[torch.Tensor | None]],
) -> list[Any]:
    """Give the detached outputs at ``positions`` their place in autograd's graph.

    ``replay`` takes the gradients of outputs, by position, and returns those of the inputs.
    """
    results = list(outputs)
    primary = [i for i, o in enumerate(outputs) if i not in positions and _is_of_compiled_node(o)]
    attached_at = (*positions, *primary)
    # Detached, lest an output that is handed on as it is counts as a view, which in-place ops on it would not survive.
    values = [outputs[p] if p in positions else outputs[p].detach() for p in attached_at]
    apply: Callable[..., tuple[Any, ...]] = _Secondary.apply
    # The compiled function's outputs come last: its node is looked for from the last of the inputs on.
    attached = apply(replay, values, attached_at, frozenset(positions), *inputs, *[outputs[p] for p in primary])
    _refuse_watchers(attached, len(positions))
    for position, value in zip(attached_at, attached, strict=True):
        results[position] = value
    return results


def _is_of_compiled_node(output: Any) -> bool:
    """Whether the compiled function itself made an output, rather than a view that is taken of one."""
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    return node is not None and compiled_node_of([output]) is node


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """Which differentiated outputs each gradient depends on.

    Attributes:
        outputs: for each differentiated output its position among the compiled function's results.
        gradients: for each input of the compiled function the positions of the outputs that its gradient depends on.
        received: on the thread that runs a backward, which outputs received a gradient.

    """

    outputs: frozenset[int]
    gradients: tuple[frozenset[int], ...]
    received: threading.local = dataclasses.field(default_factory=threading.local, compare=False)

    @classmethod
    def of(cls, joint: fx.GraphModule, num_forward_outputs: int) -> Reach:
        """Follow the dependencies of a joint graph."""
        output_node = joint.graph.output_node()
        descriptions = list(output_node.meta.get("desc") or ())[:num_forward_outputs]
        reach: dict[fx.Node, frozenset[int]] = {}
        for node in joint.graph.nodes:
            if node.op == "placeholder" and node.name.startswith("tangents_"):
                described = getattr(node.meta.get("desc"), "output", None)
                reach[node] = frozenset({descriptions.index(described)} if described in descriptions else {-1})
            elif node.op != "output":
                reach[node] = frozenset().union(*(reach[i] for i in node.all_input_nodes))
        results = _results(joint)[num_forward_outputs:]
        gradients = [reach[r] if isinstance(r, fx.Node) else frozenset() for r in results]
        return cls(frozenset().union(*gradients), tuple(gradients))

    @property
    def is_partial_possible(self) -> bool:
        """Whether some backward can leave out outputs that some gradient depends on."""
        return len(self.outputs) > 1 and -1 not in self.outputs

    def apply_to(self, outputs: Sequence[Any]) -> None:
        """Have the backward of this call know which outputs received a gradient.

        A hook that runs before the compiled backward notes it; one that ran after it would hold the gradients of the
        outputs until then.
        """
        node = compiled_node_of(outputs)
        if node is None:
            return

        def before(gradients: tuple[Any, ...]) -> None:
            self.received.outputs = frozenset(i for i, g in enumerate(gradients) if g is not None)

        node.register_prehook(before)

    def only_reached(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients of a backward, with ``None`` where no output that received a gradient reaches them."""
        received = getattr(self.received, "outputs", None)
        if received is None:
            return gradients
        self.received.outputs = None
        if not self.is_partial_possible:
            return gradients
        pairs = zip(gradients, self.gradients, strict=True)
        return tuple(g if depends & received else None for g, depends in pairs)

    def none_received(self) -> list[None] | None:
        """The gradients of a backward none of whose outputs received one, or ``None``: it has to run."""
        if getattr(self.received, "outputs", None) != frozenset():
            return None
        self.received.outputs = None
        return [None] * len(self.gradients)
