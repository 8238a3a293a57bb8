"""FF17x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import data
from tests.doctor.lint.samples import Samples, judged

IMPORT = "from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset\n"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n"


def train(make: str, loop: str = "loader", epochs: bool = False, move: str = "", first: str = "pass") -> str:
    """A loader, marked, and a training loop over it."""
    body = f"""
for x, y in {loop}:
    {move or "pass"}
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    if epochs:
        body = f"for epoch in range(3):\n    {first}" + body.replace("\n", "\n    ")
    return f"{IMPORT}loader = {make}\n{body}"


HERE = "  # here"

TABLE = {
    "FF171": Samples(
        bad=[
            train("DataLoader(d, 8, True)" + HERE, loop="enumerate(loader)", move="y.cuda()"),
            train("DataLoader(d, num_workers=0)" + HERE, move="x = x.to(self.device)"),
            IMPORT + "class T:\n    def __init__(self):\n        self.d = DataLoader(d)  # here\n"
            "    def fit(self, f, o):\n"
            "        for b in self.d:\n            f(b.to('cuda')).backward()\n            o.step()\n",
        ],
        good=[
            train("DataLoader(d, num_workers=n)", move="x.cuda()"),
            train("DataLoader(d)", move="x = x.to('cpu')"),
            train("DataLoader(d)", move="x = x.to(torch.float16)"),
            train("DataLoader(d, **options)", move="x.cuda()"),
            train("DataLoader(TensorDataset(a, b))", move="x.cuda()"),
            IMPORT + "a = DataLoader(d, num_workers=2)\nb = DataLoader(d)\na, b = accelerator.prepare(a, b)\n"
            "for x in a:\n    model(x.cuda()).backward()\n",
            IMPORT + "for x in DataLoader(d):\n    print(x.cuda())\nloss.backward()\n",
            "from mine import DataLoader\nfor x in DataLoader(d):\n    model(x.cuda()).backward()\n",
        ],
    ),
    "FF172": Samples(
        bad=[
            train("DataLoader(d, num_workers=2)" + HERE, move="x = x.to('cuda')"),
            "place = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
            + train("DataLoader(d, pin_memory=False)" + HERE, move="x = x.to(place)"),
        ],
        good=[
            train("DataLoader(d, pin_memory=True)", move="x = x.cuda()"),
            train("DataLoader(d, pin_memory=gpu)", move="x = x.cuda()"),
            train("DataLoader(d)", move="x = x.to('cpu')"),
            train("DataLoader(d)"),
        ],
    ),
    "FF173": Samples(
        bad=[
            train("DataLoader(d, num_workers=2)" + HERE, epochs=True),
            IMPORT + "def one(f, o, batches):\n    for b in batches:\n        f(b).backward()\n        o.step()\n"
            "loader = DataLoader(d, 8, True, None, None, 4)  # here\nfor e in range(3):\n"
            "    one(model, optimizer, loader)\n",
        ],
        good=[
            train("DataLoader(d, num_workers=2, persistent_workers=True)", epochs=True),
            train("DataLoader(d, num_workers=2)"),
            train("DataLoader(d)", epochs=True),
            IMPORT + "for e in range(3):\n    for x in DataLoader(d, num_workers=e + 1):\n"
            "        model(x).backward()\n",
        ],
    ),
    "FF174": Samples(
        bad=[
            IMPORT + "s = DistributedSampler(d)\nl = DataLoader(d, 8, True, s)  # here\nloss.backward()\n",
            IMPORT
            + "l = DataLoader(d, batch_sampler=BatchSampler(s), shuffle=True)  # here\n".replace(
                "Batch", "torch.Batch"
            ),
        ],
        good=[
            IMPORT + "l = DataLoader(d, shuffle=s is None, sampler=s)\n",
            IMPORT + "l = DataLoader(d, shuffle=True, sampler=None)\n",
            IMPORT + "l = DataLoader(d, shuffle=False, sampler=DistributedSampler(d))\n",
        ],
    ),
    "FF175": Samples(
        bad=[
            train("DataLoader(d, sampler=DistributedSampler(d))" + HERE, epochs=True),
            train("DataLoader(d, sampler=DistributedSampler(d) if many else None)" + HERE, "enumerate(loader)", True),
        ],
        good=[
            train("DataLoader(d, sampler=DistributedSampler(d))", epochs=True, first="loader.sampler.set_epoch(epoch)"),
            train("DataLoader(d, sampler=DistributedSampler(d, shuffle=False))", epochs=True),
            train("DataLoader(d, sampler=DistributedSampler(d))"),
        ],
    ),
    "FF176": Samples(
        bad=[
            DDP + train("DataLoader(d, batch_size=8)" + HERE, "enumerate(loader)").replace(", DistributedSampler", ""),
            DDP + train("DataLoader(d, batch_size=8)" + HERE) + "val = DataLoader(v, sampler=DistributedSampler(v))\n",
            DDP + train("DataLoader(d, 8, True)" + HERE, epochs=True).replace(", DistributedSampler", ""),
            "import torch.distributed as dist\n"
            + (DDP + train("DataLoader(d, batch_size=8)" + HERE)).replace(", DistributedSampler", ""),
        ],
        good=[
            DDP + train("DataLoader(d, sampler=DistributedSampler(d))"),
            DDP + train("DataLoader(d, sampler=DistributedSampler(d)) if w > 1 else DataLoader(d, shuffle=True)"),
            DDP + train("DataLoader(d[rank::8])").replace(", DistributedSampler", ""),
            train("DataLoader(d)").replace(", DistributedSampler", ""),
            DDP + train("DataLoader(d, **options)").replace(", DistributedSampler", ""),
        ],
    ),
    "FF177": Samples(
        bad=[
            IMPORT + "class D(Dataset):\n    def __getitem__(self, i):\n"
            "        return self.x[i].to('cuda:0')  # here\n",
            IMPORT + "class D(Dataset):\n    def load(self, i):\n        return f(i)\n    def __getitem__(self, i):\n"
            "        x = self.load(i)\n        return x.cuda()  # here\n",
        ],
        good=[
            IMPORT + "class D(Dataset):\n    def __getitem__(self, i):\n        return self.x[i].to(torch.float32)\n",
            "class D:\n    def __getitem__(self, i):\n        return self.x[i].cuda()\n",
            IMPORT + "class D(Dataset):\n    def __init__(self, x):\n        self.x = x.cuda()\n"
            "    def __getitem__(self, i):\n        return self.x[i]\n",
        ],
    ),
    "FF178": Samples(
        bad=[
            "def f(d, net, o):\n    while True:\n        x = next(iter(d))  # here\n"
            "        net(x).mean().backward()\n        o.step()\n",
            "def f(d, net, o):\n    for i in range(9):\n"
            "        net(next(iter(d))).mean().backward()  # here\n        o.step()\n",
        ],
        good=[
            "def f(d, net):\n    net(next(iter(d))).mean().backward()\n",
            "def f(d, net):\n    it = iter(d)\n    for i in range(9):\n        net(next(it)).mean().backward()\n",
            "def f(d, net):\n    for b in d:\n        net(next(iter(b.values()))).mean().backward()\n",
        ],
    ),
    "FF179": Samples(
        bad=[
            IMPORT + "import random\ndef seeded(worker):\n    random.seed(0)  # here\n"
            "loader = DataLoader(d, num_workers=2, worker_init_fn=seeded)\n",
            IMPORT + "loader = DataLoader(d, num_workers=2, worker_init_fn=lambda w: np.random.seed(7))  # here\n",
        ],
        good=[
            IMPORT + "def seeded(worker):\n    np.random.seed(torch.initial_seed() % 2**32)\n"
            "loader = DataLoader(d, num_workers=2, worker_init_fn=seeded)\n",
            IMPORT + "np.random.seed(0)\nloader = DataLoader(d, worker_init_fn=lambda w: np.random.seed(7 + w))\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, data.RULES)
