import time

import torch

from graphs.costs.measure import _batches, measure_call

CPU = torch.device("cpu")


def test_workspace_is_what_is_allocated_beyond_the_result():
    x = torch.ones(1000)

    def call():
        scratch = torch.empty(5000)
        return x + scratch[:1000].zero_()  # 20,000 bytes beside the result

    assert measure_call(call, CPU)[1] == 20_000
    assert measure_call(x.exp, CPU)[1] == 0


def test_what_is_allocated_once_and_kept_is_no_workspace():
    kept = []

    def call():
        if not kept:
            kept.append(torch.empty(1000))

    assert measure_call(call, CPU)[1] == 0


def test_results_are_freed_before_the_next_call():
    count = {"alive": 0, "most": 0}

    class Counted:
        def __init__(self):
            count["alive"] += 1
            count["most"] = max(count["most"], count["alive"])

        def __del__(self):
            count["alive"] -= 1

    measure_call(Counted, CPU)
    assert count == {"alive": 0, "most": 1}


def test_longer_calls_get_fewer_runs():
    assert _batches(1_000) == (50, 7)
    assert _batches(100_000) == (1, 7)
    assert _batches(2_000_000) == (1, 5)
    assert _batches(20_000_000) == (1, 3)


def _read_clocks_from(clock, monkeypatch):
    for name in ("perf_counter_ns", "thread_time_ns"):
        monkeypatch.setattr(f"graphs.costs.measure.time.{name}", lambda: clock[0])


def test_a_very_slow_call_runs_twice_and_a_slow_one_three_times(monkeypatch):
    for call_ns, expected in ((300_000_000, 2), (30_000_000, 3)):
        clock, runs = [0], [0]
        _read_clocks_from(clock, monkeypatch)

        def call(clock=clock, runs=runs, call_ns=call_ns):
            runs[0] += 1
            clock[0] += call_ns

        assert measure_call(call, CPU) == (call_ns, 0)
        assert runs == [expected]


def test_the_fastest_run_counts(monkeypatch):
    clock, durations = [0], iter([90_000_000, 30_000_000, 31_000_000])
    _read_clocks_from(clock, monkeypatch)

    def call():
        clock[0] += next(durations)

    assert measure_call(call, CPU) == (30_000_000, 0)


def test_with_one_thread_only_its_own_processor_time_counts():
    assert torch.get_num_threads() == 1, "the tests run on one thread: see conftest.py"
    spent = x = torch.randn(200_000)

    def call():
        nonlocal spent
        time.sleep(0.02)  # as when another program has the processor
        spent = x.exp()

    assert 0 < measure_call(call, CPU)[0] < 10_000_000
