"""What a rank leaves behind for its launcher, and what counts as the machine's fault."""

import json
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from fullframe.errors import RunError
from fullframe.processes.exit_reasons import (
    AGAIN,
    StartAgain,
    is_machines_fault,
    of_lost_worker,
    report,
    restart_reason,
    users_words,
)
from fullframe.processes.rank_processes import environment_of

LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9095"
CASES = [
    (RuntimeError(LOST), True),
    (dist.DistNetworkError("the client socket has failed to connect"), True),
    (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), True),
    (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
    (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
    (torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"), False),
    (torch.AcceleratorError("CUDA error: invalid device ordinal"), False),
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
    (torch.AcceleratorError("CUDA error: operation not supported"), False),
    (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
    (dist.DistBackendError("Net: Operation not supported"), True),
    (dist.DistBackendError("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"), False),
    (dist.DistBackendError("watchdog thread terminated with exception: CUDA error: device-side assert"), False),
    (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), True),
    (RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"), True),
    (RuntimeError("[/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nosuch0"), False),
    (dist.DistBackendError("NCCL error: Bootstrap : no socket interface found"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (torch.OutOfMemoryError("CUDA out of memory."), False),
    (KeyError("is killed by signal"), False),
    (RunError("cannot write"), False),
]


@pytest.mark.parametrize(("error", "machine"), CASES, ids=[str(error)[:40] for error, _ in CASES])
def test_what_is_worth_another_try(error, machine):
    assert is_machines_fault(error) is machine


class Deadly(torch.utils.data.Dataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "the system kills so when the host's memory is full"),
        (signal.SIGBUS, "give /dev/shm more"),
        (signal.SIGSEGV, "what the data set calls may have crashed"),
    ],
)
def test_a_worker_that_dies_is_told_of_in_a_sentence(number, why):
    with pytest.raises(RuntimeError) as died:
        list(torch.utils.data.DataLoader(Deadly(number), num_workers=1))
    said = of_lost_worker(died.value)
    assert is_machines_fault(died.value)
    assert said.startswith("a process that reads data has died (DataLoader worker (pid") and why in said
    assert said.endswith("use fewer workers (Recipe(workers=...)), smaller batches or smaller samples")
    assert of_lost_worker(RuntimeError("too large")) == of_lost_worker(ValueError("DataLoader worker")) == ""


def test_the_report_is_read_by_torchs_launcher_too(tmp_path, monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(StartAgain) as again:
        raise StartAgain("out of memory", "--resume")
    assert again.value.code == AGAIN == 75 and capsys.readouterr().err == ""
    details = json.loads(file.read_text())["message"]["extraInfo"]
    assert details["changed"] is True and details["consequence"] is False
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=AGAIN, error_file=str(file))
    text = failure.error_file_data["message"]["extraInfo"]["py_callstack"]  # what torchrun prints
    assert text == "out of memory; where nobody starts the ranks again, go on with --resume"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    report("error: text", "summary")
    assert capsys.readouterr().err == "error: text\n"


def test_why_a_rank_was_started_again(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert restart_reason() == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_reason() == "a rank had failed"
    monkeypatch.setenv("FULLFRAME_RESTART_REASON", "rank 1 died (SIGKILL)")
    assert restart_reason() == "rank 1 died (SIGKILL)"


def test_a_rank_knows_the_words_that_its_launcher_was_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fullframe", "train", "a recipe.py"])
    told = environment_of("job", 1, "a reason")
    monkeypatch.setattr(sys, "argv", ["fullframe", "train", "a recipe.py", "--width", "2", "--stopped-code", "85"])
    assert users_words() == sys.argv[1:]
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert users_words() == ["train", "a recipe.py"] and restart_reason() == "a reason"
