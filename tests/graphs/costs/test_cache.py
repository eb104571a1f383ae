import json
import logging
import multiprocessing
import pathlib

import pytest
import torch

from graphs.costs.cache import CACHE_VARIABLE, CostCache, cache_directory, device_name, environment

HERE = {"device": "Some CPU @ 2 GHz", "torch": "2.13.0", "threads": 1}


def test_directory(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "checkpoint-scheduler"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "checkpoint-scheduler"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"


def test_round_trip_and_merge(tmp_path):
    cache = CostCache(tmp_path / "new" / "directory", HERE)
    assert cache.load() == {}
    cache.add({"a": (1, 2)})
    CostCache(tmp_path / "new" / "directory", HERE).add({"b": (3, 4)})
    assert cache.load() == {"a": (1, 2), "b": (3, 4)}
    assert [p.name for p in cache.path.parent.iterdir()] == [cache.path.name]
    assert cache.path.name.startswith("costs-some-cpu-2-ghz-")


def test_each_environment_has_its_file(tmp_path):
    CostCache(tmp_path, HERE).add({"a": (1, 2)})
    for key, value in (("torch", "2.14.0"), ("threads", 2), ("device", "Other")):
        assert CostCache(tmp_path, {**HERE, key: value}).load() == {}


def test_environment_tells_threads_and_determinism_apart():
    cpu = torch.device("cpu")
    plain, threads = environment(cpu), torch.get_num_threads()
    assert plain["device"] == device_name(cpu) != ""
    try:
        torch.set_num_threads(threads + 1)
        assert environment(cpu) == {**plain, "threads": threads + 1}
    finally:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        assert environment(cpu) == {**plain, "deterministic": True}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00\x00",
        json.dumps({"schema_version": 0, "environment": HERE, "costs": {}}),
        json.dumps({"schema_version": 1, "environment": {**HERE, "threads": 8}, "costs": {"a": [1, 2]}}),
        json.dumps({"schema_version": 1, "environment": HERE, "costs": {"a": [1]}}),
        json.dumps({"schema_version": 1, "environment": HERE, "costs": {"a": [1, -2]}}),
        json.dumps({"schema_version": 1, "environment": HERE, "costs": {"a": [1.5, 2]}}),
        json.dumps({"schema_version": 1, "environment": HERE, "costs": [1]}),
    ],
)
def test_a_foreign_or_broken_file_is_ignored_with_a_warning_and_replaced(tmp_path, caplog, text):
    cache = CostCache(tmp_path, HERE)
    cache.path.write_text(text)
    with caplog.at_level(logging.WARNING, "graphs.costs.cache"):
        assert cache.load() == {}
    assert str(cache.path) in caplog.text
    cache.add({"b": (3, 4)})
    caplog.clear()
    assert cache.load() == {"b": (3, 4)}
    assert not caplog.records


def test_binary_rubbish_is_ignored(tmp_path, caplog):
    cache = CostCache(tmp_path, HERE)
    cache.path.write_bytes(b"\xff\xfe\x80")
    assert cache.load() == {}
    assert "ignoring" in caplog.text


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    CostCache(tmp_path / "file", HERE).add({"a": (1, 2)})
    assert "not kept" in caplog.text


def _add_many(directory: str, prefix: str) -> None:
    for i in range(40):
        CostCache(pathlib.Path(directory), HERE).add({f"{prefix}{i}": (i, i)})


def test_two_processes_at_once_leave_a_whole_file(tmp_path, caplog):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(str(tmp_path), prefix)) for prefix in "ab"]
    for writer in writers:
        writer.start()
    cache = CostCache(tmp_path, HERE)
    while any(writer.is_alive() for writer in writers):
        assert all(isinstance(time_ns, int) for time_ns, _ in cache.load().values())
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert not caplog.records
    assert {"a39", "b39"} & set(cache.load())
    assert [p.name for p in tmp_path.iterdir()] == [cache.path.name]
