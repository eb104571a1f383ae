"""Buffers that only a library's kernel knows: their sizes in a capture, their content while ops are timed."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from graphs import fakes
from graphs.costs.profiled import profiled
from graphs.kernels import call_recording
from tests.capturing import capture_of

FORWARD, BACKWARD = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's LSTM is what is tested")


@pytest.fixture(scope="module")
def capture():
    return capture_of(nn.LSTM(16, 24), torch.zeros(12, 5, 16, requires_grad=True))


def result_of(capture, target, position):
    node = next(n for n in capture.nodes if n is not None and n.target is target)
    return next(u for u in node.users if u.target is operator.getitem and u.args[1] == position)


@needs_onednn
def test_the_buffer_has_the_bytes_that_the_kernel_gives_it(capture):
    zeros = torch.zeros
    weights = (zeros(96, 16), zeros(96, 24), zeros(96), zeros(96))
    state = (zeros(5, 24), zeros(5, 24))
    options = (False, [], 2, 24, 1, True, False, False, True)
    real = call_recording(FORWARD, zeros(12, 5, 16), *weights, *state, *options)[3]
    item = result_of(capture, FORWARD, 3)
    assert capture.graph.storages[capture.storage_of[item]].bytes == real.nbytes > 10_000
    assert item.meta["val"].shape == real.shape


@needs_onednn
def test_gradients_of_both_biases_are_two_storages(capture):
    first, second = (capture.storage_of[result_of(capture, BACKWARD, position)] for position in (3, 4))
    assert first != second


@needs_onednn
def test_the_backward_is_timed_on_a_buffer_that_its_forward_filled(capture, tmp_path, caplog):
    costs = profiled(capture.nodes, "cpu", cache_dir=tmp_path)
    op = next(i for i, n in enumerate(capture.nodes) if n is not None and n.target is BACKWARD)
    assert costs.workspace_bytes[op] > 0
    assert "mkldnn_rnn_layer" not in caplog.text


@needs_onednn
def test_a_kernel_that_fails_on_zeros_leaves_the_step_as_it_was(monkeypatch, caplog):
    monkeypatch.setattr(fakes, "_real_buffer", lambda node, position: 1 // 0)
    captured = capture_of(nn.LSTM(16, 24), torch.zeros(12, 5, 16, requires_grad=True))
    assert captured.graph.storages[captured.storage_of[result_of(captured, FORWARD, 3)]].bytes == 0
    assert "is not known" in caplog.text


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.BatchNorm1d(16)], ids=lambda n: type(n).__name__
)
def test_statistics_of_a_mixed_normalisation_are_in_the_precision_of_its_weight(norm, tmp_path, caplog):
    captured = capture_of(norm, torch.zeros(8, 16, dtype=torch.bfloat16, requires_grad=True))
    node = next(n for n in captured.nodes if n is not None and "norm" in str(n.target))
    rows = {nn.LayerNorm: 8, nn.GroupNorm: 8 * 4, nn.BatchNorm1d: 16}[type(norm)]
    for item in (u for u in node.users if u.target is operator.getitem and u.args[1] in (1, 2)):
        assert captured.graph.storages[captured.storage_of[item]].bytes == rows * 4
    profiled(captured.nodes, "cpu", cache_dir=tmp_path)
    assert "norm" not in caplog.text  # its backward runs on arguments of these types


class WritesToPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)

    def forward(self, x):
        y = self.first(x) * 2
        y[:, :8].mul_(3)
        return y.square().sum()


def test_a_copy_into_part_of_a_tensor_takes_the_bytes_of_the_whole_in_every_capture():
    captures = [capture_of(WritesToPart(), torch.zeros(8, 16)) for _ in range(3)]  # fakes are cached from the second on
    copy = torch.ops.aten.copy.default
    whole = torch.zeros(8, 64)
    real = copy(whole[:, :8], torch.zeros(8, 8)).untyped_storage().nbytes()
    for capture in captures:
        sizes = [
            capture.graph.storages[capture.storage_of[node]].bytes
            for node in capture.nodes
            if node is not None and node.target is copy
        ]
        assert sizes
        assert set(sizes) == {real}
    assert len({capture.graph.fingerprint for capture in captures}) == 1
