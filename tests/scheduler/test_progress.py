import io
import sys
import threading

import pytest

from scheduler.progress import progress, quiet_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_bars_are_drawn_on_terminals_and_nowhere_else(kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", kind())
    with progress("solving", 3) as advance:
        for _ in range(3):
            advance()
    with quiet_progress("timing") as show:
        for done in range(1, 4):
            show(done, 3)
    text = sys.stderr.getvalue()
    if kind is Terminal:
        assert "solving" in text
        assert "timing" in text
        assert "3/3" in text
    else:
        assert text == ""


def test_timing_beside_a_bar_has_no_thread_that_draws(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    before = threading.active_count()
    with quiet_progress("timing") as show:
        assert "timing" not in sys.stderr.getvalue()
        show(1, 2)
        assert "timing" in sys.stderr.getvalue()
        assert threading.active_count() == before
