"""FF16x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import waiting
from tests.doctor.lint.samples import Samples, judged, training


def forward(line: str) -> str:
    return f"class Net(nn.Module):\n    def forward(self, x):\n        {line}\n"


def pinned(line: str, options: str = "pin_memory=True, num_workers=2") -> str:
    return f"loader = torch.utils.data.DataLoader(data, {options})\nfor x, y in loader:\n    {line}\n    model(x)\n"


ANOMALY = "torch.autograd.set_detect_anomaly({})\n"

TABLE = {
    "FF161": Samples(
        bad=[
            training("value = float(loss)  # here"),
            training("def note(v):\n    log(v.item())  # here\nnote(loss)"),
            training("log(out.sum().item())  # here"),
            training("log(loss.detach().item())  # here"),
        ],
        good=[
            training("if step % 100 == 0:\n    log(loss.item())"),
            training("log(x.shape[0].item())"),
            training("y.float()"),
            training("total += loss.detach()", after="print(total.item())\n"),
            "for x in d:\n    print(model(x).mean().item())\n",
            training("log(config.get('a').item())"),
        ],
    ),
    "FF162": Samples(
        bad=[
            training("print(f'loss {loss}')  # here"),
            training("log.info('loss %s', loss)  # here", before="import logging\nlog = logging.getLogger('a')\n"),
        ],
        good=[
            training("print(len(x))"),
            training("if verbose:\n    print(loss)"),
            training(after="print(loss)\n"),
            training("print('step')"),
        ],
    ),
    "FF163": Samples(
        bad=[
            training("torch.cuda.synchronize()  # here"),
            "def wait():\n    torch.accelerator.synchronize()  # here\n" + training("wait()"),
        ],
        good=[
            training("torch.cuda.synchronize()\nseconds = time.perf_counter() - start", before="import time\n"),
            training("if step == 3:\n    torch.cuda.synchronize()"),
            training(after="torch.cuda.synchronize()\n"),
            training("group.synchronize()"),
        ],
    ),
    "FF164": Samples(
        bad=[
            forward("return x * torch.arange(8).to(device=x.device)  # here"),
            forward("return x * torch.ones(8).cuda()  # here"),
            training("mask = torch.full((2,), 1.0).to('cuda:1')  # here"),
        ],
        good=[
            forward("return x * torch.arange(8).to(x.dtype)"),
            forward("return x * torch.arange(8).to(torch.float16)"),
            forward("return x * torch.arange(8, device=x.device)"),
            forward("return x * torch.randn(8).to(x.device)"),
            "table = torch.zeros(8).to(device)\nprint(table)\nmodel.eval()\n",
        ],
    ),
    "FF165": Samples(
        bad=[
            training("if loss > 10:  # here\n    break"),
            training("if not torch.isfinite(out).all():  # here\n    stop()"),
        ],
        good=[
            training("if loss.item() > 10:\n    break"),
            training("if x is not None:\n    pass"),
            training("if len(x) > 3:\n    pass"),
        ],
    ),
    "FF166": Samples(
        bad=[
            pinned("x = x.to('cuda')  # here"),
            pinned("x = x.to(device=torch.device('cuda', 1))  # here"),
        ],
        good=[
            pinned("x = x.to('cuda', non_blocking=True)"),
            pinned("x = x.to(torch.float32)"),
            pinned("x = x.to('cuda')", options="num_workers=2"),
            pinned("x = x.to('cpu')"),
        ],
    ),
    "FF167": Samples(
        bad=[
            ANOMALY.format("True").replace("\n", "  # here\n") + training(),
            "def main():\n    torch.autograd.set_detect_anomaly(mode=True)  # here\n    fit()\ndef fit():\n"
            "    optimizer.step()\n",
        ],
        good=[
            ANOMALY.format("False") + training(),
            "with torch.autograd.set_detect_anomaly(True):\n    model(x).mean().backward()\n    optimizer.step()\n",
            "if debug:\n    " + ANOMALY.format("True") + training(),
            ANOMALY.format("True") + "model(x).mean().backward()\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, waiting.RULES)
