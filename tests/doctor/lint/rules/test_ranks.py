"""FF180 to FF184 on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import ranks
from tests.doctor.lint.samples import Samples, judged

DIST = "import torch.distributed as dist\n"
START = DIST + "dist.init_process_group('nccl')\n"
EVALUATE = """
from torch.utils.data import DataLoader, DistributedSampler
net = nn.Linear(2, 2)
loader = DataLoader(d, sampler={sampler})
@torch.no_grad()
def validate(f, data):
    f.eval()
    total = 0
    for x, y in data:
        total += F.mse_loss(f(x), y).item(){mark}
    {after}
    return total
print(validate(net, loader))
"""
OWN = "DistributedSampler(d)"

TABLE = {
    "FF180": Samples(
        bad=[
            DIST + "def f(rank, x):\n    if rank == 0:\n        dist.broadcast(x, 0)  # here\n",
            "import os\nfrom torch.distributed import barrier\nrank = int(os.environ['RANK'])\n"
            "if rank != 0:\n    pass\nelse:\n"
            "    barrier()  # here\n",
            DIST + "def send(x):\n    dist.all_gather(out, x)  # here\ndef f(self, x):\n"
            "    if not self.rank:\n        send(x)\n",
            DIST + "def f(x):\n    rank = dist.get_rank()\n    if rank != 0:\n        return\n    torch.save(x, 'x')\n"
            "    dist.barrier()  # here\n",
            DIST + "def f(self, x):\n    if self.rank == 0:\n        print(x)\n        return x\n"
            "    for y in x:\n        dist.all_reduce(y)  # here\n",
            "from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n"
            "    a.wait_for_everyone()  # here\n",
            "import horovod.torch as hvd\nif hvd.rank() == 0:\n    hvd.allreduce(x)  # here\n",
        ],
        good=[
            "from accelerate import Accelerator\na = Accelerator()\nif a.is_main_process:\n    show(x)\n"
            "a.wait_for_everyone()\n",
            DIST + "def f(rank, x):\n    if rank != 0:\n        dist.barrier()\n        return load()\n"
            "    fetch()\n    dist.barrier()\n",
            DIST + "def f(rank, x):\n    if rank != 0:\n        return wait_for_first()\n    dist.barrier()\n",
            DIST + "def f(rank, x):\n    if x is None:\n        return\n    dist.barrier()\n",
            DIST + "def f(rank, x):\n    if rank != 0:\n        return\n    save(x)\ndef g(rank, x):\n"
            "    f(rank, x)\n    dist.barrier()\n",
            DIST + "def f(rank, x):\n    if rank == 0:\n        prepare()\n    dist.barrier()\n",
            DIST + "def f(rank):\n    load()\n    if world > 1:\n        dist.barrier()\n",
            DIST + "def f(rank, x):\n    if rank == 0:\n        dist.broadcast(x, 0)\n    else:\n"
            "        dist.broadcast(y, 0)\n",
            DIST + "def f(rank, x):\n    if rank == 0:\n        dist.all_reduce(x, group=first)\n",
            DIST + "def f(self):\n    if self.rank != self.MAIN:\n        dist.barrier()\n",
            DIST + "def f(rank, x):\n    if rank == 0:\n        dist.send(x, 1)\n        dist.barrier(some_group)\n",
            DIST + "def f(rank, x):\n    if rank == 0:\n        dist.broadcast(x, 0)\n        return x\n"
            "    dist.broadcast(y, 0)\n",
        ],
    ),
    "FF181": Samples(
        bad=[
            START + "torch.cuda.set_device(0)  # here\n",
            START + "device = torch.device('cuda:0')  # here\nnet = nn.Linear(2, 2).to(device)\n",
            START + "def build():\n    return nn.Linear(2, 2).cuda(0)  # here\nbuild()\n",
        ],
        good=[
            START + "torch.cuda.set_device(local_rank)\n",
            "net = nn.Linear(2, 2).to('cuda:0')\nloss.backward()\n",
            START + "if rank == 0:\n    net = nn.Linear(2, 2).to('cuda:0')\n",
            START + "x = x.to('cpu')\nnet = nn.Linear(2, 2).to(f'cuda:{rank}')\n",
        ],
    ),
    "FF182": Samples(
        bad=[
            START + "net = nn.Linear(2, 2).to('cuda')  # here\n",
            DIST + "def main():\n    dist.init_process_group(backend='cpu:gloo,cuda:nccl')\n"
            "    net = nn.Sequential(nn.ReLU()).cuda()  # here\nmain()\n",
            DIST + "dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')\n"
            "device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')\n"
            "net = nn.Linear(2, 2).to(device)  # here\n",
        ],
        good=[
            START + "net = nn.Linear(2, 2).to(torch.device('cuda', local_rank))\n",
            START + "torch.cuda.set_device(n)\nnet = nn.Linear(2, 2).cuda()\n",
            DIST + "dist.init_process_group('nccl', device_id=d)\nnet = nn.Linear(2, 2).cuda()\n",
            DIST + "dist.init_process_group('gloo')\nnet = nn.Linear(2, 2).cuda()\n",
            START + "net = nn.Linear(2, 2).cuda(local_rank)\n",
        ],
    ),
    "FF183": Samples(
        bad=[
            EVALUATE.format(sampler=OWN, mark="  # here", after="pass"),
            EVALUATE.format(sampler="s", mark="  # here", after="pass").replace("net =", f"s = {OWN}\nnet ="),
        ],
        good=[
            EVALUATE.format(sampler=OWN, mark="", after="torch.distributed.all_reduce(total)"),
            EVALUATE.format(sampler=OWN, mark="", after="total = hvd.allreduce(torch.tensor(total))"),
            EVALUATE.format(sampler="None", mark="", after="pass"),
            EVALUATE.format(sampler=OWN, mark="", after="total = gather(total)"),
        ],
    ),
    "FF184": Samples(
        bad=[
            START + "torch.save(net.state_dict(), 'a.pt')  # here\n",
            START + "import os\ndef save(path):\n    torch.save(x, path)  # here\nsave(os.path.join('a', 'b'))\n",
            "import horovod.torch as hvd\nhvd.init()\ntorch.save(x, 'a.pt')  # here\n",
            "from accelerate import Accelerator\na = Accelerator()\ntorch.save(x, 'a.pt')  # here\n",
        ],
        good=[
            "import horovod.torch as hvd\nhvd.init()\nif hvd.rank() == 0:\n    torch.save(x, 'a.pt')\n",
            START + "if rank == 0:\n    torch.save(x, 'a.pt')\n",
            START + "torch.save(x, f'a{rank}.pt')\n",
            START + "def save():\n    if dist.get_rank() != 0:\n        return\n    torch.save(x, 'a.pt')\n",
            "torch.save(x, 'a.pt')\n",
            START + "def save(trainer):\n    if trainer.is_main:\n        write()\ndef write():\n"
            "    torch.save(x, 'a.pt')\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, ranks.RULES)
