"""FF130 to FF134 on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import gradients
from tests.doctor.lint.samples import Samples, judged

ACCUMULATE = """
def train(net, data, opt):
    for i, (x, y) in enumerate(data):
        {first}
        loss = F.cross_entropy(net(x), y) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            opt.step()
            {last}
"""

GAN = """
net_d, net_g = nn.Linear(2, 1), nn.Linear(2, 2)
d_opt = torch.optim.Adam(net_d.parameters())
g_opt = torch.optim.Adam(net_g.parameters())
for x in data:
    {first}
    (net_d(x).mean() + net_d(net_g(x)).mean()).backward()
    d_opt.step()
    g_opt.step(){mark}
"""
STEP = "for x in d:\n    model(x).mean().backward()\n    optimizer.step()\n"

REDUCED = """
import torch.distributed as dist
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y){loss}
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            {reduce}
    optimizer.step()
"""

TABLE = {
    "FF130": Samples(
        bad=[
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad)  # here"),
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)  # here"),
        ],
        good=[
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)"),
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad.data); p.grad.data /= size"),
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad); p.grad.div_(size)"),
            REDUCED.format(loss=" / size", reduce="dist.all_reduce(p.grad)"),
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad, group=tensor_parallel)"),
            REDUCED.format(loss="", reduce="dist.all_reduce(p.count)"),
            REDUCED.format(loss="", reduce="dist.all_reduce(p.grad)").replace("optimizer.step()", "show(p.grad / n)"),
        ],
    ),
    "FF131": Samples(
        bad=[
            """
            class Trainer:
                def __init__(self, net):
                    self.net = net
                    self.opt = torch.optim.SGD(net.parameters(), 0.1)
                def fit(self, data):
                    for x, y in data:
                        self.one(x, y)
                def one(self, x, y):
                    F.mse_loss(self.net(x), y).backward()
                    self.opt.step()  # here
            """,
            """
            opt = torch.optim.Adam(net.parameters())
            for epoch in range(3):
                opt.zero_grad()
                for x, y in data:
                    F.mse_loss(net(x), y).backward()
                    opt.step()  # here
            """,
            """
            scaler = torch.amp.GradScaler()
            opt = torch.optim.Adam(net.parameters())
            for x, y in data:
                scaler.scale(F.mse_loss(net(x), y)).backward()
                scaler.step(opt)  # here
                scaler.update()
            """,
            GAN.format(first="d_opt.zero_grad()", mark="  # here"),
            GAN.format(first="net_d.zero_grad()", mark="  # here"),
            """
            from accelerate import Accelerator
            accelerator = Accelerator()
            opt = torch.optim.Adam(net.parameters())
            net, opt, data = accelerator.prepare(net, opt, data)
            for x, y in data:
                with accelerator.accumulate(net):
                    accelerator.backward(F.mse_loss(net(x), y))
                    opt.step()  # here
            """,
            """
            import horovod.torch as hvd
            opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))
            for x, y in data:
                F.mse_loss(net(x), y).backward()
                opt.step()  # here
            """,
        ],
        good=[
            GAN.format(first="d_opt.zero_grad(); g_opt.zero_grad()", mark=""),
            GAN.format(first="both.zero_grad()", mark="").replace(
                "d_opt =", "both = nn.Sequential(net_d, net_g)\nd_opt ="
            ),
            "for x in d:\n    model(x).mean().backward()\n    optimizer.step()\n    model.zero_grad()\n",
            STEP + "    for p in ps:\n        p.grad = None\n",
            STEP + "    for p in ps:\n        p.grad.zero_()\n",
            "for x in d:\n    model(x).mean().backward()\n    finish(optimizer)\n    optimizer.step()\n",
            "class A(Base):\n    def f(self, d):\n        for x in d:\n            self.net(x).mean().backward()\n"
            "            self.optimizer.step()\n            self.after_step()\n",
            "def reset(o):\n    o.zero_grad()\nfor x in d:\n    model(x).mean().backward()\n    optimizer.step()\n"
            "    reset(optimizer)\n",
            ACCUMULATE.format(first="pass", last="opt.zero_grad()"),
            "model(x).mean().backward()\noptimizer.step()\n",
            "def f(env, data):\n    for x in data:\n        model(x).mean().backward()\n        env.step()\n",
        ],
    ),
    "FF132": Samples(
        bad=[
            """
            for x, y in data:
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()  # here
                optimizer.step()
                loss.backward()
            """,
            """
            for x, y in data:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                model.zero_grad()  # here
                optimizer.step()
            """.replace("model.zero_grad", "optimizer.zero_grad"),
            """
            net = nn.Linear(2, 2)
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for x, y in data:
                F.mse_loss(net(x), y).backward()
                net.zero_grad()  # here
                opt.step()
            """,
            """
            def finish(o):
                o.zero_grad()  # here
                o.step()
            for x, y in data:
                F.mse_loss(model(x), y).backward()
                finish(optimizer)
            """,
        ],
        good=[
            """
            for x, y in data:
                d_loss = d(x).mean()
                d_loss.backward()
                opt_d.step()
                opt_g.zero_grad()
                g(x).mean().backward()
                opt_g.step()
            """,
            """
            for x in data:
                g(x).mean().backward()
                opt_d.zero_grad()
                opt_g.step()
                opt_g.zero_grad()
            """,
            """
            for x in data:
                model(x).mean().backward()
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            """,
            """
            for x in data:
                model(x).mean().backward()
                if bad(x):
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
            """,
            "for x in d:\n    model(x).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
            "    model(x).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
        ],
    ),
    "FF133": Samples(
        bad=[
            ACCUMULATE.format(first="opt.zero_grad()  # here", last="pass"),
            """
            net = nn.Linear(2, 2)
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for i, x in enumerate(data):
                is_due = i % 8 == 7
                net.zero_grad()  # here
                (net(x).mean() / 8).backward()
                if is_due:
                    opt.step()
            """,
        ],
        good=[
            ACCUMULATE.format(first="pass", last="opt.zero_grad()"),
            ACCUMULATE.format(first="if i % 4 == 0:\n            opt.zero_grad()", last="pass"),
            ACCUMULATE.format(first="other_optimizer.zero_grad()", last="opt.zero_grad()"),
            """
            for i, x in enumerate(data):
                optimizer.zero_grad()
                model(x).mean().backward()
                if torch.isfinite(x):
                    optimizer.step()
            """,
        ],
    ),
    "FF134": Samples(
        bad=[
            """
            from torch.nn.utils import clip_grad_norm_ as clip
            for x in data:
                optimizer.zero_grad()
                clip(model.parameters(), 1.0)  # here
                model(x).mean().backward()
                optimizer.step()
            """,
            """
            def update(o, m):
                o.step()
                nn.utils.clip_grad_value_(m.parameters(), 1.0)  # here
                o.zero_grad()
            for x in data:
                model(x).mean().backward()
                update(optimizer, model)
            """,
        ],
        good=[
            """
            for x in data:
                model(x).mean().backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            """,
            """
            for i, x in enumerate(data):
                model(x).mean().backward()
                if i % 4 == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            """,
            "def f(m, o):\n    nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n    o.step()\n    o.zero_grad()\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, gradients.RULES)
