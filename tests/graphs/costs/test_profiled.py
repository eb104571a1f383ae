import gc
import json
import logging
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import profile

from graphs.costs import DEVICES, op_signature, profiled, roofline
from graphs.costs.memory_events import memory_deltas
from graphs.costs.samples import Sampler
from tests.graphs.costs.nodes import MODE, call, fake

aten = torch.ops.aten
MODULE = sys.modules["graphs.costs.profiled"]  # the package re-exports the function under the module's name


@torch.library.custom_op("checkpoint_scheduler_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a custom op ran on made-up arguments")


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def product(n=64):
    return call(aten.mm.default, fake(n, n), fake(n, n))


def dropout(n=4096):
    return call(aten.native_dropout.default, fake(n), 0.5, True)


def masked(n=4096):
    return call(aten.mul.Tensor, fake(n), fake(n, dtype=torch.bool))


def not_positive_definite():
    return call(aten.linalg_cholesky_ex.default, fake(8, 8), check_errors=True)


@pytest.fixture
def runs(monkeypatch):
    """Signatures-in-waiting: grows by one with every op that is really measured."""
    measured = []
    real = MODULE.measure_call

    def spy(run, device):
        measured.append(threading.current_thread())
        return real(run, device)

    monkeypatch.setattr(MODULE, "measure_call", spy)
    return measured


def test_costs_are_in_op_order_and_each_distinct_op_runs_once(tmp_path, runs):
    view = call(aten.t.default, fake(4, 6))
    costs = profiled([product(256), None, product(8), view, product(256)], "cpu", cache_dir=tmp_path)
    assert len(runs) == 2
    assert costs.time_ns[0] == costs.time_ns[4] > costs.time_ns[2] > 0  # 32,768 times the work
    assert costs.time_ns[1] == costs.time_ns[3] == 0
    assert costs.workspace_bytes == (0,) * 5
    assert costs.source == "profiled"
    assert costs.device


def test_workspace_of_an_op_that_makes_a_temporary(tmp_path):
    (workspace,) = profiled([masked()], "cpu", cache_dir=tmp_path).workspace_bytes
    assert 4 * 4096 <= workspace <= 4 * 4096 + 64  # the mask in the dtype of the product


def test_second_call_runs_no_op(tmp_path, runs):
    first = profiled([product(), dropout()], "cpu", cache_dir=tmp_path)
    assert len(runs) == 2
    assert profiled([product(), dropout()], torch.device("cpu"), cache_dir=tmp_path) == first
    assert len(runs) == 2
    profiled([product(), product(32)], "cpu", cache_dir=tmp_path)
    assert len(runs) == 3


def test_default_cache_directory_is_the_one_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINT_SCHEDULER_CACHE", str(tmp_path / "cache"))
    node = product()
    costs = profiled([node], "cpu")
    (file,) = (tmp_path / "cache").iterdir()
    assert json.loads(file.read_text())["costs"] == {op_signature(node): [costs.time_ns[0], 0]}


def test_corrupt_cache_is_measured_again(tmp_path, runs, caplog):
    profiled([product()], "cpu", cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-5])
    costs = profiled([product()], "cpu", cache_dir=tmp_path)
    assert len(runs) == 2
    assert "measured again" in caplog.text
    assert list(json.loads(file.read_text())["costs"].values()) == [[costs.time_ns[0], 0]]


def test_random_state_is_left_as_it_was(tmp_path):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    bernoulli = call(aten.bernoulli.p, fake(100), 0.5)
    profiled([dropout(), bernoulli, call(aten.rand_like.default, fake(10))], "cpu", cache_dir=tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_in_place_and_list_valued_ops(tmp_path, caplog):
    nodes = [
        call(aten.copy_.default, fake(1000), fake(1000)),
        call(aten.split_copy.Tensor, fake(10, 4), 5),
        call(aten.native_layer_norm.default, fake(8, 16), [16], fake(16), fake(16), 1e-5),
    ]
    costs = profiled(nodes, "cpu", cache_dir=tmp_path)
    assert all(time_ns > 0 for time_ns in costs.time_ns)
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (not_positive_definite, "not positive-definite"),
        (lambda: call(torch.ops.checkpoint_scheduler_tests.doubled.default, fake(100)), "custom op"),
    ],
)
def test_what_cannot_run_is_estimated_with_a_warning_and_not_cached(tmp_path, caplog, make, reason):
    node = make()
    estimated, base = roofline([node, product()], DEVICES["cpu"]).time_ns
    assert estimated > 0
    for _ in range(2):
        caplog.clear()
        costs = profiled([node, product()], "cpu", cache_dir=tmp_path)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert reason in record.getMessage()
        assert str(node.target) in record.getMessage()
        assert costs.notes == ("the times of 1 of 2 distinct ops are estimates: they were not measured",)
        assert costs.time_ns[0] == pytest.approx(estimated * costs.time_ns[1] / base, abs=1)  # off as what was timed is
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_text())["costs"]) == [op_signature(product())]


def test_assertions_are_never_run(tmp_path, runs, caplog):
    node = call(aten._assert_async.msg, fake(1, dtype=torch.bool), "would fail on made-up values")
    assert profiled([node], "cpu", cache_dir=tmp_path).time_ns == roofline([node], "cpu").time_ns
    assert not runs
    assert not caplog.records


def test_when_the_time_is_up_the_rest_is_estimated(tmp_path, runs, caplog):
    nodes = [product(), dropout()]
    costs = profiled(nodes, "cpu", cache_dir=tmp_path, time_budget_s=-1.0)
    assert not runs
    assert costs.time_ns == roofline(nodes, "cpu").time_ns
    assert costs.notes == ("the times of 2 of 2 distinct ops are estimates: they were not measured",)
    (record,) = caplog.records
    assert "2 of 2" in record.getMessage()
    assert "aten.mm.default" in record.getMessage()
    assert not list(tmp_path.iterdir())


def test_progress_and_its_errors(tmp_path):
    seen = []
    profiled([product(8), product(16)], "cpu", cache_dir=tmp_path, progress=lambda *p: seen.append(p))
    assert seen == [(1, 2), (2, 2)]

    def fail(*_):
        raise RuntimeError("from the caller")

    with pytest.raises(RuntimeError, match="from the caller"):
        profiled([product(24)], "cpu", cache_dir=tmp_path, progress=fail)


def test_one_op_at_a_time_is_in_memory(tmp_path, monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []
    real = Sampler.arguments

    def spy(self, node):
        alive.append(sum(ref() is not None for ref in made))
        args, kwargs = real(self, node)
        made.extend(weakref.ref(a) for a in args if isinstance(a, torch.Tensor))
        return args, kwargs

    monkeypatch.setattr(Sampler, "arguments", spy)
    gc.disable()  # reference counts alone must do
    try:
        profiled([product(8), not_positive_definite(), product(16), dropout()], "cpu", cache_dir=tmp_path)
    finally:
        gc.enable()
    assert alive == [0] * 4
    assert len(made) == 6
    assert not any(ref() is not None for ref in made)


def test_modes_of_the_caller_do_not_reach_the_ops(tmp_path, monkeypatch):
    seen = []
    real = MODULE.measure_call

    def spy(run, device):
        result = run()
        seen.append((type(result), result.dtype, torch.is_grad_enabled()))
        return real(run, device)

    monkeypatch.setattr(MODULE, "measure_call", spy)
    node = product()
    with MODE, torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.enable_grad():
        costs = profiled([node], "cpu", cache_dir=tmp_path)
    assert seen == [(torch.Tensor, torch.float32, False)]
    assert costs.time_ns[0] > 0


def test_a_profile_of_the_user_keeps_its_events(tmp_path):
    x = torch.ones(1000)
    with profile(profile_memory=True) as users:
        before = x + 1
        costs = profiled([masked()], "cpu", cache_dir=tmp_path)
        after = x + 2
    assert before.sum() < after.sum()
    assert memory_deltas(users).count(4000) == 2
    assert costs.workspace_bytes[0] >= 4 * 4096


def test_devices_that_cannot_be_measured_are_refused(tmp_path):
    with pytest.raises(ValueError, match="roofline"):
        profiled([product()], "meta", cache_dir=tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="not there"):
            profiled([product()], "cuda", cache_dir=tmp_path)


class TinyLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens).flatten(0, 1))
        attended = nn.functional.scaled_dot_product_attention(*[x.view(2, 2, 6, 8)] * 3).reshape(12, 16)
        return nn.functional.cross_entropy(self.head(self.drop(attended + x)), tokens.flatten())


class CapturedError(Exception):
    pass


def profile_in_backend(model, tokens, device, cache_dir):
    """Costs of the joint graph of a training step, measured from inside the backend that captures it."""
    caught = {}

    def partition(joint, _inputs, **_):
        caught["nodes"] = [n for n in joint.graph.nodes if n.op == "call_function"]
        caught["costs"] = profiled(caught["nodes"], device, cache_dir=cache_dir)
        raise CapturedError

    def leave(graph, _):
        return graph

    backend = aot_autograd(fw_compiler=leave, bw_compiler=leave, partition_fn=partition)
    with pytest.raises(Exception, match="CapturedError"):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(tokens)
    torch.compiler.reset()
    return caught["nodes"], caught["costs"]


def check_step(nodes, costs):
    times = {str(n.target): t for n, t in zip(nodes, costs.time_ns, strict=True)}
    for op in ("embedding", "embedding_dense_backward", "addmm", "mm", "native_dropout", "nll_loss_backward"):
        assert times[f"aten.{op}.default"] > 0
    views = [t for name, t in times.items() if name in ("aten.view.default", "aten.t.default")]
    assert views == [0, 0]


def test_inside_a_compile_backend(tmp_path, caplog):
    torch.manual_seed(0)
    model, tokens = TinyLanguageModel(), torch.randint(0, 50, (2, 6))
    before = torch.random.get_rng_state()
    nodes, costs = profile_in_backend(model, tokens, "cpu", tmp_path)
    assert not [r for r in caplog.records if r.name.startswith("graphs.")]  # every op ran
    check_step(nodes, costs)
    assert any("flash_attention_for_cpu_backward" in str(n.target) for n in nodes)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert profile_in_backend(model, tokens, "cpu", tmp_path)[1] == costs


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inside_a_compile_backend_on_cuda(tmp_path, caplog):
    torch.manual_seed(0)
    model, tokens = TinyLanguageModel().cuda(), torch.randint(0, 50, (2, 6), device="cuda")
    before, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    nodes, costs = profile_in_backend(model, tokens, "cuda", tmp_path)
    assert not [r for r in caplog.records if r.name.startswith("graphs.")]
    check_step(nodes, costs)
    assert costs.device == torch.cuda.get_device_name()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.cuda.memory_allocated() <= allocated + 64 * 2**20  # workspaces of libraries stay
    large, small = (call(aten.mm.default, fake(n, n), fake(n, n)) for n in (4096, 64))
    measured = profiled([large, small], "cuda", cache_dir=tmp_path)  # captured on CPU, measured on the GPU
    assert measured.time_ns[0] > measured.time_ns[1] > 0
