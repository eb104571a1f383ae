"""The built wheel, what importing loads, and the pins."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("graphs", "scheduler", "solvers")


def run(*command, cwd, **env):
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from a copy of the sources, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("tests", "benchmarks"):  # are there, and must not be taken along
        (source / package).mkdir()
        (source / package / "__init__.py").touch()
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_wheel_holds_the_three_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(n.partition("/")[0] for n in names if ".dist-info/" in n)
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert {n.partition("/")[0] for n in names} == {*PACKAGES, info}
    sources = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == sources
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert "[torch_dynamo_backends]\ncheckpoint_scheduler = scheduler.backend:" in entry_points
    assert "Name: checkpoint-scheduler\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


def test_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    ours = next(p for p in (home / "lib").glob("python*/site-packages"))
    theirs = next(p for p in sys.path if p.endswith("site-packages"))
    program = (
        "import importlib.metadata as m, graphs, scheduler, scheduler.backend, solvers;"
        "print(graphs.__file__, scheduler.__file__, solvers.__file__);"
        "e, = m.entry_points(group='torch_dynamo_backends', name='checkpoint_scheduler'); e.load()"
    )
    # Dependencies come from the environment of the tests, by path and after our own: its editable install stays out.
    output = run(python, "-c", program, cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(ours), theirs)))
    files = output.split()
    assert len(files) == 3
    assert all(pathlib.Path(file).is_relative_to(home) for file in files)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("solvers", {"torch", "scheduler"}),
        ("solvers.simulate", {"torch", "scheduler"}),
        ("graphs", {"torch", "scheduler", "solvers"}),
    ],
)
def test_imports_go_one_way(module, forbidden, tmp_path):
    program = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = set(run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(ROOT)).split())
    assert module.partition(".")[0] in loaded
    assert not loaded & forbidden


def test_reports_do_not_load_matplotlib(tmp_path):
    program = "import sys, scheduler.plan, scheduler.report.plots, scheduler.report.text; print(*sys.modules)"
    loaded = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()
    assert "scheduler.report.plots" in loaded
    assert "matplotlib" not in loaded


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {re.match(r"[\w-]+", d)[0].lower() for d in (*project["dependencies"], *extras["dev"], *extras["plot"])}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+(post\d+)?", line) for line in lines)
    assert wanted <= {line.partition("==")[0].lower() for line in lines}
