"""Every command: what it prints, its JSON, the files it writes, and what it says where it cannot."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import pickle
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scheduler.cli import app
from scheduler.errors import Infeasible
from scheduler.plan import Plan
from tests.scheduler.toy import MB, make_plan

STEP = "tests.scheduler.cli.steps:make_step"


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def as_json(*arguments, code=0):
    found = json.loads(run(*arguments, "--json", code=code).stdout)
    assert found["kind"] == str(arguments[0])
    assert found["schema_version"] == 1
    return found


@pytest.fixture
def saved(tmp_path):
    """A plan that recomputes in two blocks, saved."""
    path = tmp_path / "plan.json"
    make_plan({1, 2}, budget=205 * MB).save(path)
    return path


def test_version():
    assert run("--version").stdout.strip() == importlib.metadata.version("checkpoint-scheduler")


def test_plan_of_a_factory(tmp_path):
    path = tmp_path / "plan.json"
    found = as_json("plan", STEP, "--budget", "1MB", "--optimizer", "AdamW", "-o", path)
    plan = Plan.load(path)
    assert found["peak_bytes"] == plan.peak_bytes <= 10**6
    assert found["fingerprint"] == plan.graph.fingerprint
    parameters = 4 * (16 * 64 + 64 + 64 * 16 + 16)
    assert plan.static["parameters"] == parameters
    assert plan.static["optimizer"] > 2 * parameters  # two moments, and a counter each
    larger = as_json("plan", STEP, "--budget", "1MB", "--batch", "128")
    assert larger["static"]["inputs"] == 128 * 16 * 4


def test_a_file_finds_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_step.py").write_text("WIDTH = 8\n")
    (tmp_path / "steps_of_mine.py").write_text(
        "import torch\n"
        "import beside_the_step\n"
        "def make_step():\n"
        "    model = torch.nn.Linear(beside_the_step.WIDTH, 4)\n"
        "    return model, (torch.ones(2, beside_the_step.WIDTH),), {}\n"
    )
    found = as_json("plan", f"{tmp_path / 'steps_of_mine.py'}:make_step", "--budget", "1MB")
    assert found["static"]["inputs"] == 2 * 8 * 4


def test_plan_that_is_impossible():
    found = as_json("plan", STEP, "--budget", "20kB", code=1)
    assert found["status"] == "infeasible"
    assert found["floor_lower_bound_bytes"] > 20_000
    done = CliRunner().invoke(app, ["plan", STEP, "--budget", "20kB"])
    assert isinstance(done.exception, Infeasible)
    named = as_json("plan", STEP, "--budget", "64kB", "--keep", "layers", code=1)
    assert named["binding_constraints"] == ["keep='layers'"]


def test_plan_under_constraints_and_with_a_link(tmp_path):
    path = tmp_path / "plan.json"
    options = ("--link", "1000GB/s", "--host-budget", "1GB", "-o", path)
    once = ("--keep", "layers.0", "--never-recompute", "aten.gelu", "--never-offload", "layers.2")
    found = as_json("plan", STEP, "--budget", "1MB", *once, *options)
    plan = Plan.load(path)
    assert plan.link.to_host_bytes_per_s == 1e12
    assert plan.host_bytes == 10**9
    wanted = {"keep": ["layers.0"], "never_recompute": ["aten.gelu"], "never_offload": ["layers.2"]}
    assert found["constraints"] == plan.constraints.to_dict() == wanted
    assert {op.target for op in plan.graph.ops if "never_recompute" in op.reason} == {"aten.gelu.default"}


def test_plan_of_a_hugging_face_config(tmp_path):
    fields = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 101, "n_positions": 64}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    options = (
        "--hf",
        config,
        "--batch",
        "2",
        "--seq",
        "16",
        "--budget",
        "1",
        "--device",
        "h100",
        "--dtype",
        "bfloat16",
    )
    found = as_json("plan", *options, "--set", "n_layer=1")
    assert found["device"] == "h100-sxm"
    assert found["static"]["inputs"] == 2 * 16 * 8
    assert {row["label"] for row in found["modules"]} >= {"transformer.h.0"}
    assert not any("h.1" in row["label"] for row in found["modules"])
    parameters = 101 * 32 + 64 * 32 + (12 * 32 * 32 + 13 * 32) + 2 * 32  # embeddings, one layer, last norm
    assert found["static"]["parameters"] == 2 * parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--budget", "1GB"), "MODULE:FACTORY, or --hf"),
        (("plan", STEP, "--hf", "GPT2Config", "--budget", "1GB"), "not both"),
        (("plan", "--hf", "GPT2Config", "--set", "n_hed=4", "--budget", "1GB"), "did you mean 'n_head'?"),
        (("plan", STEP, "--budget", "-3"), "not a positive amount"),
        (("plan", STEP, "--budget", "3 stones"), "unknown unit"),
        (("plan", STEP, "--budget", "1GB", "--device", "h1000"), "Did you mean"),
        (("plan", STEP, "--budget", "1GB", "--seq", "4"), "takes no argument seq"),
        (("plan", STEP, "--budget", "1GB", "--dtype", "bfloat16"), "need --hf"),
        (("plan", STEP, "--budget", "1GB", "--optimizer", "Adamm"), "no optimizer 'Adamm'"),
        (("plan", "tests.scheduler.cli.steps:make_nothing", "--budget", "1GB"), "must return (model, args, kwargs)"),
        (("plan", "tests.scheduler.cli.steps:make_it", "--budget", "1GB"), "no function 'make_it'"),
        (("plan", "nowhere.at.all:make", "--budget", "1GB"), "cannot be imported"),
        (("plan", "make_step", "--budget", "1GB"), "is not MODULE:FACTORY"),
        (("plan", "--hf", "GPT2", "--budget", "1GB"), "neither a config.json nor a config class"),
        (("plan", "--hf", "ViTConfig", "--budget", "1GB"), "no language model"),
        (("plan", "--hf", "GPT2Config", "--seq", "2048", "--budget", "1GB"), "allows 1024 tokens"),
        (("plan", STEP, "--budget", "1GB", "--host-budget", "1GB"), "give --link with it"),
        (("plan", STEP, "--budget", "1GB", "--link", "25"), "25"),
        (("show", "absent.json"), "there is no file"),
        (("policy", "--layers", 2, "--hidden", 100, "--heads", 3, "--seq", 8, "--memory", "1GB"), "do not divide"),
    ],
)
def test_what_cannot_be_meant(arguments, message):
    done = run(*arguments, code=2)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert message in said


def test_show(saved):
    text = run("show", saved).stdout
    assert "predicted peak" in text
    assert "h.1–2 ×2" in text
    found = as_json("show", saved, "--module", "h.1")
    actions = {t["name"]: t["action"] for t in found["tensors"]}
    assert actions["mm_1"] == "recomputed"
    assert "mm_0" not in actions
    table = run("show", saved, "--module", "h.*.linear").stdout
    assert "mm_0" in table
    assert "mm_2" in table
    assert "no module 'g' in this step" in " ".join(run("show", saved, "--module", "g", code=2).stderr.split())


def test_show_and_explain_list_the_same_tensors(saved):
    shown = as_json("show", saved, "--module", "h.*")["tensors"]
    explained = as_json("explain", saved, "h.*", "--no-price")["tensors"]
    assert [t["name"] for t in shown] == [t["decision"]["name"] for t in explained]
    assert len(shown) == 4 * 3  # what the backward of these modules makes is not theirs
    temporary = sum(t["action"] == "temporary" for t in shown)
    assert temporary == sum(t["decision"]["action"] == "temporary" for t in explained) > 0
    assert f"and {temporary} temporary ones" in run("show", saved, "--module", "h.*").stdout
    assert f"{temporary} more are temporary" in run("explain", saved, "h.*", "--no-price").stdout


def test_show_writes_the_report(saved, tmp_path):
    page = tmp_path / "report.html"
    run("show", saved, "--html", page)
    assert "</html>" in page.read_text()


def test_explain(saved):
    found = as_json("explain", saved, "h.1")
    (mm,) = (t for t in found["tensors"] if t["decision"]["name"] == "mm_1")
    assert mm["decision"]["action"] == "recomputed"
    assert mm["target"] == "aten.mm.default"
    assert found["price"]["delta_bytes"] == 20_500_000
    text = run("explain", saved, "h.1", "--no-price").stdout
    assert not re.search(r"\d\n *([kMGT]?B|[nµm]?s)\b", text), "a number stands apart from its unit"
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "mm_1" in text
    assert "would save" not in text
    assert "Did you mean" in " ".join(run("explain", saved, "h.11", code=2).stderr.replace("│", " ").split())


def test_compare(saved, tmp_path):
    other, unlike = tmp_path / "other.json", tmp_path / "unlike.json"
    make_plan({2}, budget=215 * MB).save(other)
    make_plan({2}, budget=215 * MB, blocks=3).save(unlike)
    found = as_json("compare", saved, other)
    assert found["same_step"]
    assert found["changes"] == [{"module": "h.1", "a": "recomputed", "b": "kept", "tensors": 1, "bytes": 10 * MB}]
    assert found["a"]["budget_bytes"] == 205 * MB
    assert "10.00 MB" in run("compare", saved, other).stdout
    more = tmp_path / "more.json"
    make_plan({0, 1, 2, 3}, budget=205 * MB).save(more)
    text = run("compare", other, more).stdout
    assert re.search(r"h\.0–1,3 ×3 +│ kept +│ recomputed +│ +3 +│ +30\.00 MB", text)
    assert not as_json("compare", saved, unlike)["same_step"]
    assert "same with every tensor" in run("compare", saved, saved).stdout


def test_sweep_of_a_saved_plan(saved, tmp_path):
    png, table = tmp_path / "curve.png", tmp_path / "curve.csv"
    found = as_json("sweep", saved, "--png", png, "--csv", table, "--budgets", "6", "--time-limit", "0.5")
    plan = Plan.load(saved)
    points = found["points"]
    assert len(points) == 6
    assert points[-1]["budget_bytes"] == plan.keep_all_peak_bytes
    assert points[-1]["overhead"] == 0
    times = [p["step_time_ns"] for p in points]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert all(p["peak_bytes"] <= p["budget_bytes"] for p in points)
    assert all(p["lower_bound_ns"] <= p["step_time_ns"] for p in points)
    assert {b["name"] for b in found["baselines"]} >= {"checkpoint every block", "√n segments"}
    for b in found["baselines"]:
        assert b["plan_overhead"] <= b["overhead"] + 1e-9
    assert png.read_bytes()[:4] == b"\x89PNG"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    peaks = {b["peak_bytes"] for b in found["baselines"]}
    assert {int(row["budget_bytes"]) for row in rows if row["name"] == "plan"} == peaks | {
        p["budget_bytes"] for p in points
    }
    assert [row["knee"] for row in rows].count("1") == (found["knee"] is not None)
    assert "checkpoint every block" in run("sweep", saved, "--budgets", "2", "--time-limit", "0.5").stdout


def test_fit_of_a_factory(tmp_path):
    path = tmp_path / "plan.json"
    found = as_json("fit", STEP, "--budget", "100kB", "-o", path)
    plan = Plan.load(path)
    assert plan.budget_bytes == 100_000
    assert plan.static["inputs"] == found["largest"] * 16 * 4
    assert found["largest"] >= found["largest_without_checkpointing"] > 0
    assert found["refused"] == found["largest"] + 1
    plain = as_json("plan", STEP, "--budget", "100kB", "--batch", found["largest_without_checkpointing"])
    assert plain["overhead"] == 0
    as_json("plan", STEP, "--budget", "100kB", "--batch", found["refused"], code=1)
    assert "floor_bytes" in as_json("fit", STEP, "--budget", "10kB", code=1)


def test_export(saved, tmp_path):
    trace, snapshot = tmp_path / "trace.json", tmp_path / "memory.pickle"
    found = as_json("export", saved, "--perfetto", trace, "--memory-snapshot", snapshot)
    assert set(found["written"]) == {"perfetto", "memory_snapshot"}
    assert json.loads(trace.read_text())["traceEvents"]
    assert pickle.loads(snapshot.read_bytes())["device_traces"]  # noqa: S301 - written by ourselves above
    assert "say what to write" in " ".join(run("export", saved, code=2).stderr.replace("│", " ").split())


def test_as_a_module_errors_are_lines_and_nothing_else_is_printed():
    program = (sys.executable, "-m", "scheduler", "plan", STEP, "--budget", "20kB", "--time-limit", "1")
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: No schedule")
    assert "Raise the budget to --budget 0.0" in done.stderr
    assert "budget_gb" not in done.stderr
    assert "Traceback" not in done.stderr
