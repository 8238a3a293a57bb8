"""The thread that takes the rounds."""

import threading

import pytest
import torch

from fullframe.horovod.engine import Engine
from fullframe.horovod.request import Request
from fullframe.horovod.settings import Settings
from fullframe.horovod.submission import Submission
from fullframe.horovod.timeline import Timeline


@pytest.mark.parametrize("joins", [False, True])
def test_its_thread_uses_the_gpu_of_who_asks(joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a current GPU of its own, at first number 0: there it would make the zeros of who has joined."""
    noted = list[tuple[str, int]]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: noted.append((threading.current_thread().name, index)))
    engine = Engine(None, 0, 1, Settings(), Timeline())
    try:
        if joins:
            submission = Submission(Request("join", "join"), 0)
            engine.join(submission)
        else:
            tensor = torch.ones(3)
            submission = Submission(Request("allreduce", "x", ((3,),), ("float32",)), 0, [tensor])
            engine.submit(submission)
        engine.wait(submission)
    finally:
        engine.close()
    assert set(noted) == {("horovod", 3)}
