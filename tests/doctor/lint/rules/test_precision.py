"""FF14x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import precision
from tests.doctor.lint.samples import Samples, judged


def scaled(*lines: str, make: str = "torch.cuda.amp.GradScaler()", cast: str = "") -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"""
scaler = {make}
for x, y in loader:
    {cast}loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
{body}
    optimizer.zero_grad()
"""


STEP, UPDATE, UNSCALE = "scaler.step(optimizer)", "scaler.update()", "scaler.unscale_(optimizer)"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
BF16 = "with torch.autocast('cuda', dtype=torch.bfloat16):\n        "

HALF = """
for x, y in loader:
    with {block}:
        loss = F.cross_entropy(model(x), y)
    {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
IN_HALF = "torch.autocast('cuda', dtype=torch.float16)"

TABLE = {
    "FF140": Samples(
        bad=[
            HALF.format(block=IN_HALF, backward="loss.backward()  # here"),
            HALF.format(block="torch.amp.autocast('cuda', torch.half)", backward="loss.backward()  # here"),
        ],
        good=[
            HALF.format(block="torch.autocast('cuda', dtype=torch.bfloat16)", backward="loss.backward()"),
            HALF.format(block="torch.autocast('cuda', dtype=torch.float16, enabled=amp)", backward="loss.backward()"),
            HALF.format(block=IN_HALF, backward="accelerator.backward(loss)"),
            HALF.format(block=IN_HALF, backward="scaler.scale(loss).backward()"),
        ],
    ),
    "FF141": Samples(
        bad=[
            "from torch.cuda import amp\nwith amp.autocast():\n    model(x).mean().backward()  # here\n",
            "def go(f, x):\n    f(x).mean().backward()  # here\nwith torch.amp.autocast('cuda'):\n    go(model, x)\n",
            "c = torch.autocast('cuda')\nwith c, open(p):\n    model(x).mean().backward()  # here\n",
            "@torch.autocast('cuda')\ndef go(f, x):\n    f(x).mean().backward()  # here\n",
        ],
        good=[
            "with torch.autocast('cuda'):\n    loss = model(x).mean()\nloss.backward()\n",
            "with torch.autocast('cuda', enabled=False):\n    model(x).mean().backward()\n",
            "with torch.autocast('cuda'):\n    with torch.autocast('cuda', enabled=False):\n        l.backward()\n",
        ],
    ),
    "FF142": Samples(
        bad=[
            scaled(UNSCALE, UNSCALE + "  # here", STEP, UPDATE),
            "def clip(s, o):\n    s.unscale_(o)  # here\n" + scaled(UNSCALE, "clip(scaler, optimizer)", STEP, UPDATE),
        ],
        good=[
            scaled(UNSCALE, "scaler.unscale_(other)", STEP, UPDATE),
            scaled("if a:", "    " + UNSCALE, "else:", "    " + UNSCALE, STEP, UPDATE),
            scaled(UNSCALE, STEP, UPDATE, UNSCALE, STEP, UPDATE),
        ],
    ),
    "FF143": Samples(
        bad=[
            scaled(STEP, STEP + "  # here", UPDATE),
            "def train(s, o, net, x):\n    s.scale(net(x).mean()).backward()\n    s.step(o)\n    s.step(o)  # here\n"
            "    s.update()\n",
        ],
        good=[
            scaled(STEP, "scaler.step(other)", UPDATE),
            scaled(STEP, UPDATE, STEP, UPDATE),
            scaled("if a:", "    " + STEP, "else:", "    " + STEP, UPDATE),
        ],
    ),
    "FF144": Samples(
        bad=[
            scaled(STEP, UPDATE, "scaler.step(other)", UPDATE + "  # here"),
            "def finish(s, o):\n    s.step(o)\n    s.update()  # here\n"
            + scaled("finish(scaler, optimizer)", "finish(scaler, other)"),
        ],
        good=[
            scaled(STEP, "scaler.step(other)", UPDATE),
            scaled(STEP, UPDATE, "scaler.scale(model(y)).backward()", STEP, UPDATE),
            scaled("if a:", "    " + STEP, "    " + UPDATE, "else:", "    " + STEP, "    " + UPDATE),
        ],
    ),
    "FF145": Samples(
        bad=[
            scaled(CLIP + "  # here", STEP, UPDATE),
            scaled("nn.utils.clip_grad_value_(ps, 1.0)  # here", UNSCALE, STEP, UPDATE),
        ],
        good=[
            scaled(UNSCALE, CLIP, STEP, UPDATE),
            scaled("if clip:", "    " + UNSCALE, "    " + CLIP, STEP, UPDATE),
            "for x in loader:\n    model(x).mean().backward()\n    " + CLIP + "\n    optimizer.step()\n",
        ],
    ),
    "FF146": Samples(
        bad=[
            scaled("optimizer.step()  # here", UPDATE),
            "def train(s, optim, net, x):\n    s.scale(net(x).mean()).backward()\n    optim.step()  # here\n"
            "    s.update()\n",
        ],
        good=[
            scaled(STEP, UPDATE),
            scaled(UNSCALE, "optimizer.step()", UPDATE),
            "for x in d:\n    if amp:\n        scaler.scale(model(x).mean()).backward()\n"
            "        scaler.step(optimizer)\n"
            "        scaler.update()\n    else:\n        model(x).mean().backward()\n        optimizer.step()\n",
        ],
    ),
    "FF147": Samples(
        bad=[
            scaled(STEP + "  # here"),
            "class T:\n    def __init__(self, o):\n        self.o, self.s = o, torch.amp.GradScaler()\n"
            "    def fit(self, net, d):\n        for x in d:\n            self.s.scale(net(x).mean()).backward()\n"
            "            self.s.step(self.o)  # here\n",
        ],
        good=[
            scaled(STEP, UPDATE),
            scaled(STEP, "finish(scaler)"),
            scaled("if i % 4 == 0:", "    " + STEP, "    " + UPDATE),
        ],
    ),
    "FF148": Samples(
        bad=[
            "def train(net, o, d):\n    net.to(torch.float16)  # here\n    for x in d:\n"
            "        net(x).mean().backward()\n"
            "        o.step()\n        o.zero_grad()\n",
            "net = nn.Linear(2, 2)\nnet = net.half()  # here\nnet(x).mean().backward()\noptimizer.step()\n",
        ],
        good=[
            "def f():\n    net = nn.Linear(2, 2).half()\n    net(x).mean().backward()\ndef g():\n"
            "    optimizer.step()\n",
            "teacher = nn.Linear(2, 2).half()\nloss = F.mse_loss(model(x), t)\nloss.backward()\noptimizer.step()\n",
            "net = nn.Linear(2, 2).to(torch.bfloat16)\nnet(x).mean().backward()\noptimizer.step()\n",
            "net = nn.Linear(2, 2).half()\nnet.eval()\nprint(net(x))\n",
            "x = x.half()\nmodel(x).mean().backward()\noptimizer.step()\n",
        ],
    ),
    "FF149": Samples(
        bad=[
            scaled(STEP, UPDATE, cast=BF16).replace(".backward()", ".backward()  # here"),
            scaled(STEP, UPDATE, cast=BF16, make="torch.amp.GradScaler('cuda')").replace(
                ".backward()", ".backward()  # here"
            ),
        ],
        good=[
            scaled(STEP, UPDATE, cast="with torch.autocast('cuda'):\n        "),
            scaled(STEP, UPDATE, cast=BF16, make="torch.amp.GradScaler(enabled=False)"),
            scaled(STEP, UPDATE),
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, precision.RULES)
