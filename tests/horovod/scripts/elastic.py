"""An elastic training script in the form of Horovod's documentation; writes what happened, a line each time.

Arguments: folder, steps, and what happens: "kill" (a rank kills itself once) or "wait" (until hosts have changed).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

folder, steps, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1).double()
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.constant_(model.bias, 0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.randn(12, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def say(**facts: object) -> None:
    with (folder / "said.jsonl").open("a") as out:
        out.write(json.dumps({"rank": hvd.rank(), "size": hvd.size(), "pid": os.getpid(), **facts}) + "\n")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    say(begins=state.batch, resets=state.resets)
    while state.batch < steps:
        mine = data[hvd.rank() :: hvd.size()]  # 12 samples divide over 1, 2, 3 and 4 ranks
        optimizer.zero_grad()
        # Before its gradients are on their way, with which the others could end this step and commit it.
        if what == "kill" and state.batch == 3 and hvd.rank() == hvd.size() - 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(mine).square().mean().backward()
        optimizer.step()
        state.batch += 1
        if what == "wait" and state.batch == 4:
            (folder / "ready").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
        if what == "wait":
            time.sleep(0.1)
        state.commit()


state = hvd.elastic.TorchState(model, optimizer, batch=0, resets=0)


def on_reset() -> None:
    state.resets += 1


state.register_reset_callbacks([on_reset])
train(state)
say(ends=state.batch, weight=model.weight.tolist(), bias=model.bias.tolist())
