"""Real situations, rebuilt from public bug reports: a scheduled training of each gives what the plain one gives."""

from __future__ import annotations

import pytest
import torch

from tests.shared_cases import LEVELS, PATHS, SHARED, load, run_case, run_case_with_copies, run_situation

if not PATHS:
    pytest.skip(f"the shared cases are not beside this checkout ({SHARED})", allow_module_level=True)

# The floor of the first is 99 % of its keep-all peak: half-way up, what little has to go is computed again for nothing.
# The others keep everything there in another order of the ops.
WITHOUT_COPIES = frozenset({"09_dataclass_output_aux", "11_unused_head_none_grad", "13_custom_autograd_function"})


@pytest.fixture(autouse=True)
def settings():
    """One thread, and the deterministic setting that run_cases changes put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


# Each level of a case plans anew, most of the time in tracing: every third one runs every time, at the floor, where
# most is rebuilt.
def _levels_of(names):
    for index, name in enumerate(names):
        for level in LEVELS:
            fast = level == "floor" and index % 3 == 0
            yield pytest.param(name, level, id=f"{name}-{level}", marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "level"), list(_levels_of(PATHS)))
def test_case(name, level):
    assert run_case(name, level) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PATHS))
def test_case_with_copies_to_the_host(name):
    result, copies = run_case_with_copies(name)
    assert result == "ok"
    assert copies or name in WITHOUT_COPIES


@pytest.mark.parametrize(("name", "level"), list(_levels_of(load("situations").CHECKS)))
def test_situation(name, level):
    run_situation(name, level)
