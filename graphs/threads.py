"""Work on a thread of its own: tracing modes, autocast and profilers are bound to the thread that set them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def on_own_thread(
    call: Callable[[], Result], *, name: str, when_interrupted: Callable[[], None] = lambda: None
) -> Result:
    """Run a function on a new thread, with as many of torch's threads as here, and return what it returns.

    Args:
        call: the function. What it raises is raised here.
        name: of the thread.
        when_interrupted: called where an interrupt ends the wait, to have the function stop soon; the wait goes on.

    """
    threads = torch.get_num_threads()  # a new thread starts with one per core, whatever its parent has
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def work() -> None:
        torch.set_num_threads(threads)
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            failure.append(error)

    worker = threading.Thread(target=work, name=name)
    worker.start()
    try:
        worker.join()
    except BaseException:
        when_interrupted()
        worker.join()
        raise
    if failure:
        raise failure[0]
    return outcome[0]
