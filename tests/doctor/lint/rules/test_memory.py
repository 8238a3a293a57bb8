"""FF15x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import memory
from tests.doctor.lint.samples import Samples, judged, training

IMPORT = "from torch.utils.checkpoint import checkpoint, checkpoint_sequential\n"
NET = (
    IMPORT
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.{norm}(3)
    def forward(self, x):
        return self.norm(self.conv(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def part(self, x):
        return self.block(x)
    def forward(self, x):
        return checkpoint({what}, x, use_reentrant=False)
"""
)


def handler(kind: str, body: str, before: str = "") -> str:
    return f"for x in d:\n    try:\n        model(x).mean().backward()\n    except {kind}:\n        {before}{body}\n"


TABLE = {
    "FF151": Samples(
        bad=[
            "import torch.utils.checkpoint as cp\ny = cp.checkpoint(f, x)  # here\n",
            IMPORT + "y = checkpoint_sequential([f, g], 2, x)  # here\n",
            "class A(nn.Module):\n    def forward(self, x):\n        save = torch.utils.checkpoint.checkpoint\n"
            "        return save(self.f, x)  # here\n",
        ],
        good=[
            IMPORT + "y = checkpoint(f, x, use_reentrant=True)\n",
            IMPORT + "y = checkpoint(f, x, **options)\n",
            "from fairscale.nn import checkpoint\ny = checkpoint(f, x)\n",
            "y = self.checkpoint(f)\n",
        ],
    ),
    "FF152": Samples(
        bad=[
            NET.format(norm="BatchNorm2d", what="self.block").replace("=False)", "=False)  # here"),
            NET.format(norm="BatchNorm2d", what="self.part").replace("=False)", "=False)  # here"),
            IMPORT + "n = nn.BatchNorm1d(3)\n"
            "y = checkpoint(lambda x: x, checkpoint(n, x, use_reentrant=False))  # here\n",
        ],
        good=[
            NET.format(norm="GroupNorm", what="self.block"),
            NET.format(norm="BatchNorm2d", what="self.other"),
            IMPORT + "norm = nn.BatchNorm2d(3)\ny = checkpoint(f, norm(x), use_reentrant=False)\n",
        ],
    ),
    "FF153": Samples(
        bad=[
            IMPORT + "for x, y in data:\n    F.mse_loss(net(checkpoint(stem, x.cuda())), y).backward()  # here\n",
            IMPORT + "for b in data:\n"
            "    checkpoint_sequential([f], 1, b['x'], use_reentrant=True).backward()  # here\n",
        ],
        good=[
            IMPORT + "for x, y in data:\n    checkpoint(f, stem(x), use_reentrant=True).sum().backward()\n",
            IMPORT + "for x, y in data:\n    x.requires_grad_()\n    checkpoint(f, x, use_reentrant=True).backward()\n",
            IMPORT + "for x, y in data:\n    checkpoint(f, x, use_reentrant=False).backward()\n",
        ],
    ),
    "FF154": Samples(
        bad=[
            training("torch.cuda.empty_cache()  # here"),
            "from torch.cuda import empty_cache as free\ndef after():\n    free()  # here\n" + training("after()"),
            "@torch.no_grad()\ndef f(net, d):\n    net.eval()\n    for x in d:\n        print(net(x))\n"
            "        torch.cuda.empty_cache()  # here\n",
        ],
        good=[
            training("if step % 100 == 0:\n    torch.cuda.empty_cache()"),
            training(after="torch.cuda.empty_cache()\n"),
            "for e in es:\n    for x in d:\n        model(x).mean().backward()\n    torch.cuda.empty_cache()\n",
            "for name in names:\n    load(name)\n    torch.cuda.empty_cache()\n",
        ],
    ),
    "FF155": Samples(
        bad=[
            handler("torch.OutOfMemoryError", "model(x[:1]).mean().backward()  # here"),
            handler(
                "RuntimeError as e",
                "model(x[:1]).mean().backward()  # here",
                "if 'out of memory' in str(e): pass\n        ",
            ),
            "def step(x):\n    model(x).mean().backward()  # here\n"
            + handler("(ValueError, torch.cuda.OutOfMemoryError)", "step(x[:1])"),
        ],
        good=[
            handler("torch.OutOfMemoryError", "failed = True") + "    if failed:\n"
            "        model(x[:1]).mean().backward()\n",
            handler("ValueError", "model(x[:1]).mean().backward()"),
            handler("RuntimeError", "model(x[:1]).mean().backward()"),
        ],
    ),
    "FF156": Samples(
        bad=[
            "def f(o):\n    o.zero_grad(set_to_none=False)  # here\n    o.step()\n",
            "net = nn.Linear(2, 2)\nnet.zero_grad(False)  # here\n",
        ],
        good=[
            "def f(o, keep):\n    o.zero_grad(set_to_none=keep)\n    o.step()\n",
            "def f(o, keep):\n    o.zero_grad(set_to_none=keep)\n    o.step()\nf(optimizer, False)\n",
            "def f(o):\n    o.zero_grad(True)\n    o.step()\n",
        ],
    ),
    "FF157": Samples(
        bad=[
            training().replace("out = model(x)", "out = model(x)  # here"),
            "def f(net, opt, d):\n    for x in d:\n        y = net(x)  # here\n        y.mean().backward()\n"
            "        opt.step()\n",
        ],
        good=[
            training("del out"),
            "def one(net, o, x):\n    y = net(x)\n    y.mean().backward()\n    o.step()\nfor x in d:\n"
            "    one(n, opt, x)\n",
            training("out = None"),
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, memory.RULES)
