"""FF11x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import modules
from tests.doctor.lint.samples import Samples, judged

MODULE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.seen = []
        self.table = {{}}

    def forward(self, x):
{body}
"""


def module(*lines: str, after: str = "") -> str:
    return MODULE.format(body="\n".join(f"        {line}" for line in lines)) + after


TABLE = {
    "FF111": Samples(
        bad=[
            module("y = self.conv(x)", "self.seen.append(y)  # here", "return y"),
            module("y = self.conv(x)", "self.table.update({len(self.table): y})  # here", "return y"),
            module("y = self.conv(x)", "self.keep(y)", "return y", "", "").rstrip()
            + "\n\n    def keep(self, value):\n        self.seen.append(value)  # here\n",
        ],
        good=[
            module("self.seen = []", "y = self.conv(x)", "self.seen.append(y)", "return y"),
            module("y = self.conv(x)", "self.seen.append(y.detach())", "return y"),
            module("y = self.conv(x)", "return self.sum.add(y, y)").replace("self.seen = []", "self.sum = nn.ReLU()"),
            module("ys = []", "ys.append(self.conv(x))", "return ys"),
            module("if not self.training:", "    self.seen.append(self.conv(x))", "return self.conv(x)"),
            module("y = self.conv(x)", "self.seen.append(y)", "self.seen.clear()", "return y"),
        ],
    ),
    "FF112": Samples(
        bad=[
            module("self.last = self.conv(x)  # here", "return self.last"),
            module("y = self.conv(x)", "self.last, size = y, 3  # here", "return y"),
        ],
        good=[
            module("self.last = self.conv(x).detach()", "return x"),
            module("self.size = self.conv(x).shape", "return x"),
            module("self.last = self.conv(x)", "y = self.last + 1", "self.last = None", "return y"),
            module("with torch.no_grad():", "    self.last = self.conv(x)", "return x"),
        ],
    ),
    "FF113": Samples(
        bad=[
            module("y = self.conv(x)  # here", "z = torch.cat((y, x), dim=1)", "return self.conv(z)"),
            module("y = self.conv(x)  # here", "z = F.interpolate(y, scale_factor=2)", "return self.conv(z)"),
        ],
        good=[
            module("y = self.conv(x)", "z = torch.cat((y, x), dim=1)", "del y", "return self.conv(z)"),
            module("y = self.conv(x)", "z = torch.cat((y, x), dim=1)", "return self.conv(z * y)"),
            module("y = self.conv(x)", "return torch.cat((y, x), dim=1)"),
            module("y = self.conv(x)", "y = torch.cat((y, x), dim=1)", "return self.conv(y)"),
        ],
    ),
}

FOUR = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.c3, self.c4 = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.n1, self.n2, self.n3, self.n4 = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.act = nn.ReLU()

    def forward(self, x):
        a = self.n1(self.c1(x))  # here
        b = {0}
        c = self.n2(self.c2(b))
        d = {1}
        e = self.n3(self.c3(d))
        f = {2}
        g = self.n4(self.c4(f))
        return {3}
"""
FUNCTIONS = ["F.relu(a)", "torch.relu(c)", "torch.sigmoid(e)", "F.relu(g)"]
MODULES = ["self.act(a)", "self.act(c)", "self.act(e)", "self.act(g)"]


def unmarked(text: str) -> str:
    return text.replace("  # here", "")


TABLE["FF114"] = Samples(
    bad=[FOUR.format(*FUNCTIONS), FOUR.format(*MODULES)],
    good=[
        unmarked(FOUR.format("F.gelu(a)", *FUNCTIONS[1:])),  # which keeps what it reads
        unmarked(FOUR.format("F.relu(a)", "F.relu(c)", "F.relu(e)", "F.relu(g) + g")),  # of use after it
        unmarked(FOUR.format(*FUNCTIONS).replace("return", "del a\n        return")),
        unmarked(FOUR.format(*FUNCTIONS).replace("        c = ", "        a = ").replace("relu(c)", "relu(a)")),
        unmarked(FOUR.format(*MODULES).replace("n1(self.c1(x))", "act(self.c1(x))")),  # kept by backward anyhow
    ],
)


test_what_is_found, test_every_rule_has_samples = judged(TABLE, modules.RULES)
