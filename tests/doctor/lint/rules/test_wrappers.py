"""FF185 to FF189 on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import wrappers
from tests.doctor.lint.samples import Samples, judged

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
CONVERT = "nn.SyncBatchNorm.convert_sync_batchnorm"
FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard\n"


def loop(line: str, due: str = "if i % 4 == 3:") -> str:
    return f"""
net = DDP(nn.Linear(2, 2))
for i, (x, y) in enumerate(loader):
    {line}
    {due}
        optimizer.step()
        optimizer.zero_grad()
"""


TABLE = {
    "FF185": Samples(
        bad=[
            DDP + f"net = DDP(model)\nnet = {CONVERT}(net, group)  # here\n",
            DDP + f"def wrap(m):\n    return DDP(m)\nnet = {CONVERT}(module=wrap(model))  # here\n",
        ],
        good=[
            DDP + f"net = DDP({CONVERT}(model))\n",
            f"net = {CONVERT}(model)\nnet = nn.DataParallel(net)\n",
        ],
    ),
    "FF186": Samples(
        bad=[
            DDP + loop("net.module(x).mean().backward()  # here"),
            DDP
            + loop("inner = net.module; loss = F.mse_loss(inner(x), y); loss.backward()").replace(
                "backward()", "backward()  # here"
            ),
            DDP
            + "import torch.distributed as dist\n"
            + loop("net.module(x).mean().backward()  # here")
            + "dist.all_reduce(accuracy)\n",
        ],
        good=[
            DDP
            + "import torch.distributed as dist\n"
            + loop("net.module(x).mean().backward(); dist.all_reduce(w.grad)"),
            DDP + loop("net(x).mean().backward()"),
            DDP + "net = DDP(model)\nwith torch.no_grad():\n    print(net.module(x))\nloss.backward()\n",
            loop("net.module(x).mean().backward()").replace("DDP(nn.Linear(2, 2))", "Own()"),
        ],
    ),
    "FF187": Samples(
        bad=[
            FSDP + "net = nn.Linear(2, 2)\no = torch.optim.SGD(net.parameters())\nnet = FSDP(net)  # here\n",
            FSDP + "def f(m):\n    o = torch.optim.SGD([{'params': m.parameters()}])\n"
            "    fully_shard(m)  # here\nf(nn.Linear(2, 2))\n",
        ],
        good=[
            FSDP + "net = FSDP(nn.Linear(2, 2))\no = torch.optim.SGD(net.parameters())\n",
            FSDP + "net = nn.Linear(2, 2)\nother = nn.Linear(2, 2)\n"
            "o = torch.optim.SGD(other.parameters())\nfully_shard(net)\n",
        ],
    ),
    "FF188": Samples(
        bad=[
            DDP + loop("(net(x).mean() / 4).backward()  # here"),
            DDP + loop("loss = F.mse_loss(net(x), y) / 4; loss.backward()  # here"),
        ],
        good=[
            DDP + loop("with net.no_sync():\n        (net(x).mean() / 4).backward()"),
            DDP + loop("net.require_backward_grad_sync = i % 4 == 3; (net(x).mean() / 4).backward()"),
            DDP + loop("(net(x).mean() / 4).backward()", due="if True:"),
            DDP + loop("(net(x).mean() / 4).backward()").replace("DDP(nn.Linear(2, 2))", "nn.Linear(2, 2)"),
        ],
    ),
    "FF189": Samples(
        bad=[
            DDP + "net = DDP(model, find_unused_parameters=True)  # here\n",
            "net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # here\n",
        ],
        good=[
            DDP + "net = DDP(model, find_unused_parameters=False)\n",
            DDP + "net = DDP(model, find_unused_parameters=args.unused)\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, wrappers.RULES)
