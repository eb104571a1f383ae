import io
import sys
import threading

import pytest

from scheduler.progress import progress, quiet_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[io.StringIO, Terminal])
def stderr(request, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    made = request.param()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_bars_are_drawn_on_terminals_and_nowhere_else(stderr):
    with progress("solving", 3) as advance:
        for _ in range(3):
            advance()
    with quiet_progress("timing") as show:
        for done in range(1, 4):
            show(done, 3)
    text = stderr.getvalue()
    if stderr.isatty():
        assert "solving" in text
        assert "timing" in text
    else:
        assert text == ""


def test_a_bar_without_steps_shows_nothing(stderr):
    with quiet_progress("timing"):
        pass
    assert "timing" not in stderr.getvalue()


def test_timing_beside_a_bar_has_no_thread_that_draws(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    before = threading.active_count()
    with quiet_progress("timing") as show:
        show(1, 2)
        assert threading.active_count() == before
