"""From joint graphs to training graphs: storages, phases, effects, snapshots, randomness, module paths."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.constraints import Constraints
from graphs.errors import UnsupportedModelError
from graphs.ir import Phase, StorageKind
from graphs.joint import RNG_STATE_TARGET, TANGENTS_TARGET
from tests.capturing import capture_of


class Applied(nn.Module):
    """A module that applies a function to its layers and inputs."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, *args):
        return self.function(self.layers, *args)


def batch(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def storage_named(capture, name):
    return next(s for s in capture.graph.storages if s.name == name)


def op_with(capture, target, phase=Phase.FORWARD):
    return next(o for o in capture.graph.ops if target in o.target and o.phase is phase)


def test_views_share_the_storage_of_what_they_look_at():
    capture = capture_of(Applied(lambda m, x: m[0](x).t().reshape(2, -1)[:, 1:].sin(), nn.Linear(3, 4)), batch(2, 3))
    graph = capture.graph
    sine = op_with(capture, "aten.sin")
    producer = graph.storages[sine.inputs[0]].producer
    # t() of the product, then a reshape that must copy: the copy is an op, the transposition is not
    assert graph.ops[producer].target == "aten.clone.default"
    assert [o.target for o in graph.ops[:3]] == ["aten.addmm.default", "aten.clone.default", "aten.sin.default"]


def test_each_result_of_an_op_is_a_storage():
    capture = capture_of(Applied(lambda m, x: m[0](x).exp(), nn.LayerNorm(8)), batch(4, 8))
    norm = op_with(capture, "native_layer_norm")
    assert [capture.graph.storages[s].bytes for s in norm.outputs] == [4 * 8 * 4, 4 * 4, 4 * 4]
    assert capture.graph.storages[norm.outputs[1]].name.endswith("[1]")


def test_kinds_of_storages():
    capture = capture_of(Applied(lambda m, x: m[1](m[0](x)), nn.Linear(3, 4), nn.BatchNorm1d(4)), batch(5, 3))
    kinds = [s.kind for s in capture.graph.storages]
    assert kinds.count(StorageKind.PARAMETER) == 4
    assert kinds.count(StorageKind.BUFFER) == 3
    assert kinds.count(StorageKind.INPUT) == 1
    assert kinds.count(StorageKind.OUTPUT) == 1
    assert kinds.count(StorageKind.TANGENT) == 1
    assert kinds.count(StorageKind.GRADIENT) == 4


def test_backward_starts_with_the_arrival_of_the_tangents():
    capture = capture_of(Applied(lambda m, x: m[0](x).exp(), nn.Linear(3, 4)), batch(2, 3))
    first = capture.graph.ops[capture.graph.forward_ops]
    assert first.target == TANGENTS_TARGET
    assert first.index == capture.tangents_op
    assert not first.recomputable
    assert all(o.phase is Phase.FORWARD for o in capture.graph.ops[: first.index])
    assert all(o.phase is Phase.BACKWARD for o in capture.graph.ops[first.index :])


def test_buffers_are_written_in_the_forward_and_read_through_a_snapshot():
    capture = capture_of(Applied(lambda m, x: m[0](x).exp(), nn.BatchNorm1d(4)), batch(5, 4))
    writes = [o for o in capture.graph.ops if "copy_" in o.target]
    assert len(writes) == 3
    assert {o.phase for o in writes} == {Phase.FORWARD}
    assert not any(o.recomputable for o in writes)
    assert len(capture.snapshots) == 3
    snapshots = {capture.graph.ops[op].outputs[0] for op in capture.snapshots}
    norm = op_with(capture, "batch_norm")
    assert len(snapshots & set(norm.inputs)) == 2
    buffers = {s.index for s in capture.graph.storages if s.kind is StorageKind.BUFFER}
    readers = {o.index for o in capture.graph.ops if buffers & set(o.inputs)}
    assert readers == set(capture.snapshots) | {o.index for o in writes}
    assert capture.overwritten_inputs


def test_random_ops_read_a_recorded_state():
    capture = capture_of(Applied(lambda m, x: functional.dropout(m[0](x), 0.5).exp(), nn.Linear(3, 4)), batch(2, 3))
    dropout = op_with(capture, "dropout")
    assert dropout.recomputable
    state = capture.graph.ops[capture.rng_state_ops[dropout.index]]
    assert state.target == RNG_STATE_TARGET
    assert state.outputs[0] in dropout.inputs
    assert capture.graph.storages[state.outputs[0]].bytes == torch.get_rng_state().numel()
    assert not state.recomputable


def test_dropout_of_nothing_is_not_random():
    capture = capture_of(Applied(lambda m, x: functional.dropout(m[0](x), 0.0).exp(), nn.Linear(3, 4)), batch(2, 3))
    assert not capture.rng_state_ops


def test_a_draw_that_nothing_uses_is_kept():
    def draws(layers, x):
        torch.rand(7)
        return layers[0](x).exp()

    capture = capture_of(Applied(draws, nn.Linear(3, 4)), batch(2, 3))
    assert any("rand" in o.target for o in capture.graph.ops)


@pytest.mark.parametrize("select", [lambda x: x.topk(2)[0], lambda x: x.sort()[0], lambda x: x.max(-1)[0]])
def test_selections_run_once(select):
    capture = capture_of(Applied(lambda m, x: select(m[0](x)), nn.Linear(3, 4)), batch(2, 3))
    once = [o for o in capture.graph.ops if not o.recomputable and "selects by value" in o.reason]
    assert len(once) == 1


def test_never_recompute_by_op_and_by_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    by_module = capture_of(model, batch(2, 3), constraints=Constraints(never_recompute=("1",))).graph
    assert {o.module_path for o in by_module.ops if "never_recompute" in o.reason} == {"1.0", "1.1"}
    by_op = capture_of(model, batch(2, 3), constraints=Constraints(never_recompute=("aten.tanh",))).graph
    assert [o.target for o in by_op.ops if "never_recompute" in o.reason] == ["aten.tanh.default"]


def test_the_caller_holds_the_outputs():
    capture = capture_of(Applied(lambda m, x: m[0](x).exp(), nn.Linear(3, 4)), batch(2, 3))
    output = next(s for s in capture.graph.storages if s.kind is StorageKind.OUTPUT)
    assert not capture.graph.ops[output.producer].recomputable


def test_module_paths_of_forward_and_backward():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    graph = capture_of(model, batch(2, 3)).graph
    assert {o.module_path for o in graph.ops if o.phase is Phase.FORWARD} == {"0", "1.0", "1.1", "2"}
    assert {"0", "1.0", "1.1", "2"} <= {o.module_path for o in graph.ops if o.phase is Phase.BACKWARD}


def test_sources_name_the_line():
    capture = capture_of(Applied(lambda m, x: m[0](x).exp(), nn.Linear(3, 4)), batch(2, 3))
    assert op_with(capture, "aten.exp").source.rpartition(":")[0].endswith("test_joint.py")


def test_tied_parameters_are_one_storage():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    capture = capture_of(Applied(lambda m, x: m[1](m[0](x).exp()), first, second), batch(2, 4))
    assert [s.kind for s in capture.graph.storages].count(StorageKind.PARAMETER) == 3


def test_same_step_same_fingerprint():
    def model():
        torch.manual_seed(0)
        return Applied(lambda m, x: functional.dropout(m[1](m[0](x)), 0.1).exp(), nn.Linear(3, 4), nn.BatchNorm1d(4))

    first, second = (capture_of(model(), batch(5, 3)).graph.fingerprint for _ in range(2))
    assert first == second
    assert capture_of(model(), batch(6, 3)).graph.fingerprint != first


def test_data_dependent_shapes_are_refused_with_the_reason():
    model = Applied(lambda m, x: m[0](x)[x[:, 0] > 0].exp(), nn.Linear(3, 4))
    with pytest.raises((UnsupportedModelError, RuntimeError), match=r"data|nonzero|dynamic"):
        capture_of(model, batch(4, 3))
