"""FF101 to FF105 on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import graphs
from tests.doctor.lint.samples import Samples, judged, training

TABLE = {
    "FF101": Samples(
        bad=[
            training("total = total + loss  # here", "total = 0\n"),
            training("total += loss * x.size(0)  # here", "total = 0.0\n"),
            training("renamed = loss\nsums['loss'] += renamed  # here", "sums = {'loss': 0}\n"),
            training("sums[0] = sums[0] + loss  # here", "sums = [0]\n"),
            training("acc = total\nacc = torch.add(acc, loss)\ntotal = acc  # here", "total = 0\n"),
            training("average = 0.9 * average + 0.1 * loss  # here", "average = 0\n"),
            training("error += (out - y).abs().mean()  # here", "error = 0\n"),
            """
            class Trainer:
                def __init__(self, model, optimizer):
                    self.model, self.optimizer, self.total = model, optimizer, 0.0

                def step(self, x, y):
                    loss = F.mse_loss(self.model(x), y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    return loss

                def run(self, batches):
                    for x, y in batches:
                        self.total += self.step(x, y)  # here
            """,
            """
            class Meter:
                def __init__(self):
                    self.sum = 0

                def update(self, value, n=1):
                    self.sum += value * n  # here

            def train(net, data, opt):
                meter = Meter()
                for x, y in data:
                    value = net(x).square().mean()
                    value.backward()
                    opt.step()
                    opt.zero_grad()
                    meter.update(value)
            """,
            """
            from dataclasses import dataclass

            @dataclass
            class State:
                total: float = 0.0

            def train(f, data, opt):
                state = State()
                for x in data:
                    l = f(x)
                    l.backward()
                    opt.step()
                    state.total += l  # here
            """,
            """
            def train(f, data, opt):
                total = 0.0
                def one(x):
                    nonlocal total
                    l = f(x)
                    l.backward()
                    opt.step()
                    total += l  # here
                for x in data:
                    one(x)
            """,
            """
            def train(f, data, opt):
                running = 0.0
                for i, x in enumerate(data):
                    l = f(x)
                    l.backward()
                    opt.step()
                    if i % 10 == 0:
                        running = 0.0
                    running += l  # here
            """,
        ],
        good=[
            training("total += loss.item()", "total = 0\n"),
            training("total += float(loss)", "total = 0\n"),
            training("with torch.no_grad():\n    total += loss * 2", "total = 0\n"),
            training("value = loss.detach()\ntotal = total + value", "total = 0\n"),
            training("total += (out.argmax(1) == y).sum()", "total = 0\n"),
            training("total += len(x)\nseen = loss", "total = 0\n"),
            """
            for x, y in loader:
                loss = 0
                for head in heads:
                    loss += F.mse_loss(head(x), y)
                loss.backward()
                optimizer.step()
            """,
            """
            def rollout(policy, steps, opt):
                total = 0
                for i in range(steps):
                    total = total + policy(i)
                total.backward()
                opt.step()
            """,
            """
            class Meter:
                def update(self, value, n=1):
                    self.sum += value.item() * n

            def train(net, data, opt):
                meter = Meter()
                for x, y in data:
                    value = net(x).square().mean()
                    value.backward()
                    opt.step()
                    meter.update(value)
            """,
        ],
    ),
    "FF102": Samples(
        bad=[
            training("outputs.append(out)  # here", "outputs = []\n"),
            training("history['loss'].append(loss)  # here", "history = {'loss': []}\n"),
            training("kept += [loss]", "kept = []\n").replace("kept += [loss]", "kept.extend([loss, y])  # here"),
            training("losses[step] = loss  # here\nstep += 1", "losses = {}\nstep = 0\n"),
            training("log.append({'loss': loss, 'n': 1})  # here", "log = []\n"),
            """
            class Trainer:
                def __init__(self):
                    self.losses = []

                def fit(self, f, data, opt):
                    for x in data:
                        l = f(x)
                        l.backward()
                        opt.step()
                        self.remember(l)

                def remember(self, value):
                    self.losses.append(value)  # here
            """,
        ],
        good=[
            training("outputs.append(out.detach())", "outputs = []\n"),
            training("outputs.append(out.argmax(1))", "outputs = []\n"),
            training("grads.append(torch.autograd.grad(out, x))", "grads = []\n"),
            training("losses.append(f'{loss}')", "losses = []\n"),
            training("names = []\nnames.append(loss)\nprint(sum(names))"),
            training("logs['loss'] = loss", "logs = {}\n"),
            training("recent.append(loss)", "from collections import deque\nrecent = deque(maxlen=20)\n"),
            training("last.update(loss=loss)", "last = {}\n"),
            training("meter.update(loss)", "import torchmetrics\nmeter = torchmetrics.MeanMetric()\n"),
            """
            for episode in range(9):
                values = []
                for x in data:
                    values.append(model(x))
                torch.stack(values).mean().backward()
                optimizer.step()
            """,
            training("parts.append(out)\nif len(parts) == 4:\n    parts.clear()", "parts = []\n"),
        ],
    ),
    "FF103": Samples(
        bad=[
            """
            hidden = None
            for x, y in loader:
                out, hidden = rnn(x, hidden)  # here
                loss = F.cross_entropy(out, y)
                loss.backward()
                optimizer.step()
            """,
            """
            def train(cell, data, opt):
                h = torch.zeros(8)
                for x in data:
                    h = cell(x, h)  # here
                    h.square().mean().backward(retain_graph=True)
                    opt.step()
            """,
            """
            hidden = torch.zeros(8)
            for x, y in loader:
                hidden = cell(x, hidden)  # here
                F.mse_loss(head(hidden), y).backward()
                optimizer.step()
                if last:
                    hidden = hidden.detach()
            """,
        ],
        good=[
            """
            hidden = None
            for x, y in loader:
                out, hidden = rnn(x, hidden)
                loss = F.cross_entropy(out, y)
                loss.backward()
                optimizer.step()
                hidden = hidden.detach()
            """.replace("out, hidden = rnn(x, hidden)", "out, new = rnn(x, hidden)").replace(
                "hidden.detach", "new.detach"
            ),
            """
            hidden = torch.zeros(8)
            for x, y in loader:
                hidden = cell(x, hidden)
                F.mse_loss(head(hidden), y).backward()
                optimizer.step()
                hidden = hidden.detach()
            """,
            """
            hidden = torch.zeros(8)
            for x, y in loader:
                hidden = cell(x, hidden)
                F.mse_loss(head(hidden), y).backward()
                optimizer.step()
                hidden.detach_()
            """,
            """
            state = None
            for x, y in loader:
                out, state = lstm(x, state)
                F.mse_loss(head(out), y).backward()
                optimizer.step()
                state = tuple(s.detach() for s in state)
            """,
            """
            for x, y in loader:
                out, kept[0] = model(x, kept[0])
                out.mean().backward()
                optimizer.step()
            """,
            """
            for x, y in loader:
                state = torch.zeros(8)
                for t in range(4):
                    state = cell(x[t], state)
                F.mse_loss(state, y).backward()
                optimizer.step()
            """,
        ],
    ),
    "FF104": Samples(
        bad=[
            """
            for x in loader:
                loss = model(x).mean()
                loss.backward(retain_graph=True)  # here
                optimizer.step()
            """,
            """
            def train(g, d, data, opt):
                while True:
                    fake = g(next(data))
                    d(fake.detach()).mean().backward()
                    d(fake).mean().backward(None, True)  # here
                    opt.step()
            """,
            """
            for x in loader:
                torch.autograd.backward(model(x).mean(), None, True)  # here
                optimizer.step()
            """,
        ],
        good=[
            """
            for x in loader:
                out = model(x)
                out.mean().backward(retain_graph=True)
                out.square().mean().backward()
                optimizer.step()
            """,
            """
            y = model(x)
            for i in range(3):
                y[i].backward(retain_graph=True)
            """,
            "loss = model(x).mean()\nloss.backward(retain_graph=True)\n",
        ],
    ),
    "FF105": Samples(
        bad=[
            "loss = model(x).mean()\nloss.backward(create_graph=True)  # here\n",
            "def f(l, g):\n    l.backward(g, None, True)  # here\n",
            "def f(l, g):\n    torch.autograd.backward(l, g, True, True)  # here\n",
        ],
        good=[
            "loss = model(x).mean()\nloss.backward(create_graph=False)\n",
            "def f(l, p):\n    return torch.autograd.grad(l, p, create_graph=True)\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, graphs.RULES)
