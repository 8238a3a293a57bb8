"""FF12x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import evaluation
from tests.doctor.lint.samples import Samples, judged

TRAIN = """
def train(net, data, opt):
    {first}
    for x, y in data:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
EPOCHS = """
net = nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(3):
    train(net, data, opt)
    validate(net, val)
"""


def story(validate: str, first: str = "pass", loop: str = EPOCHS) -> str:
    return TRAIN.format(first=first) + validate + loop


EVALUATES = """
def validate(f, data):
    f.eval()
    with torch.no_grad():
        return [f(x).argmax(1) for x, y in data]
"""

TABLE = {
    "FF121": Samples(
        bad=[
            """
            class Trainer:
                def __init__(self, net):
                    self.net = net
                def validate(self, data):
                    self.net.eval()
                    return [self.net(x).argmax(1) for x, y in data]  # here
            """,
            """
            net = nn.Sequential(nn.Linear(2, 2))
            net.eval()
            total = 0
            for batch in data:
                total += F.mse_loss(net(batch["x"]), batch["y"]).item()  # here
            """,
            """
            def score(f, batch):
                return f(batch[0]).argmax(1)  # here
            def evaluate(f, data):
                f.eval()
                for batch in data:
                    print(score(f, batch))
            """,
        ],
        good=[
            EVALUATES,
            "def validate(f, data):\n    f.eval()\n    torch.set_grad_enabled(False)\n"
            "    return [f(x) for x in data]\n",
            "@torch.no_grad()\ndef validate(f, data):\n    f.eval()\n    return [f(x) for x in data]\n",
            "@quick\ndef validate(f, data):\n    f.eval()\n    return [f(x) for x in data]\n",
            "def validate(f, data):\n    f.eval()\n    f.train()\n    for x in data:\n        f(x).mean().backward()\n",
            "def attack(f, data):\n    f.eval()\n    for x in data:\n        g = torch.autograd.grad(f(x).sum(), x)\n",
            "def once(f, x):\n    f.eval()\n    return f(x)\n",
            "def g(f, data):\n    f.eval()\n    with torch.no_grad():\n        g2(f, data)\n"
            "def g2(f, data):\n    for x in data:\n        print(f(x))\n",
        ],
    ),
    "FF122": Samples(
        bad=[
            story(
                "def validate(f, data):\n    with torch.no_grad():\n        for x, y in data:\n"
                "            print(f(x).argmax(1))  # here\n"
            ),
            """
            class Trainer:
                def __init__(self, net, opt):
                    self.net, self.opt = net, opt
                def fit(self, data):
                    for x, y in data:
                        loss = F.cross_entropy(self.net(x), y)
                        self.opt.zero_grad()
                        loss.backward()
                        self.opt.step()
                    self.check(data)
                @torch.inference_mode()
                def check(self, data):
                    for x, y in data:
                        print(self.net(x))  # here
            """,
        ],
        good=[
            story(EVALUATES),
            story(
                "def validate(f, data):\n    f.train(False)\n    with torch.no_grad():\n        for x, y in data:\n"
                "            print(f(x))\n"
            ),
            story(
                "@torch.no_grad()\ndef validate(f, data):\n    prepare_eval(f)\n    for x, y in data:\n"
                "        print(f(x))\n"
            ),
            story("@torch.no_grad()\ndef validate(f, data):\n    for x, y in data:\n        f(x)\n"),
            """
            for x, y in data:
                with torch.no_grad():
                    target = model(x)
                loss = F.mse_loss(model(x + 1), target)
                loss.backward()
                optimizer.step()
            """,
            "@torch.no_grad()\ndef validate(f, data):\n    for x, y in data:\n        print(f(x))\n",
        ],
    ),
    "FF123": Samples(
        bad=[
            story(EVALUATES.replace("f.eval()", "f.eval()  # here")),
            story(EVALUATES.replace("f.eval()", "f.train(False)  # here")),
        ],
        good=[
            story(EVALUATES, first="net.train()"),
            story(EVALUATES, first="net.train(mode)"),
            story(EVALUATES + "    \n", loop=EPOCHS + "    net.train()\n"),
            story(EVALUATES, loop="\ntrain(n, d, o)\nvalidate(n, d)\n"),
            story("def validate(f, data):\n    f.eval()\n", loop=EPOCHS),
            story(EVALUATES, loop=EPOCHS + "    trainer.set_train_mode()\n"),
        ],
    ),
    "FF124": Samples(
        bad=[
            "@torch.no_grad()\ndef step(f, x):\n    loss = f(x).mean()\n    loss.backward()  # here\n",
            "with torch.inference_mode():\n    loss = model(x).mean() * 2\nscaler.scale(loss).backward()\n"
            "loss.backward()  # here\n",
        ],
        good=[
            "with torch.no_grad():\n    t = model(x)\nloss = F.mse_loss(model(x), t)\nloss.backward()\n",
            "@torch.no_grad()\ndef step(f, x):\n    with torch.enable_grad():\n        loss = f(x).mean()\n"
            "    loss.backward()\n",
            "def step(out, g):\n    with torch.no_grad():\n        g = f(g)\n    out.backward(g)\n",
            "def step(loss):\n    with torch.no_grad():\n        loss.backward()\n",
        ],
    ),
    "FF125": Samples(
        bad=[
            "o = torch.optim.SGD(p)\nloss.backward()\no.step  # here\no.zero_grad()\n",
            "def f(net, x):\n    net.zero_grad()\n    net(x).mean().backward()\n    net.train  # here\n",
        ],
        good=[
            "o = torch.optim.SGD(p)\nstep = o.step\nstep()\n",
            "class A:\n    step = 1\na = A()\na.step\nloss.backward()\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, evaluation.RULES)
