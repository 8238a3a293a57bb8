"""FF135 to FF139 on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import accumulation
from tests.doctor.lint.samples import Samples, judged


def loop(loss: str, backward: str = "loss.backward()", due: str = "(i + 1) % 4 == 0", before: str = "") -> str:
    return f"""{before}
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = {loss}
        {backward}
        if {due}:
            optimizer.step()
            optimizer.zero_grad()
"""


MEAN = "F.cross_entropy(model(x), y)"

TABLE = {
    "FF135": Samples(
        bad=[
            loop("criterion(model(x), y)", "loss.backward()  # here", before="criterion = nn.CrossEntropyLoss()"),
            loop(MEAN, "scaler.scale(loss).backward()  # here"),
            loop("model(x)['loss']", "loss.backward()  # here"),
            loop(MEAN, "loss = loss + loss; loss.backward()  # here"),
            loop(MEAN, "loss.backward()  # here").replace("loss.backward", "average.mul_(0.9); loss.backward"),
            loop(f"{MEAN} + F.l1_loss(model(x), y)", "loss.backward()  # here", due="not (i % steps)"),
        ],
        good=[
            loop(MEAN, "loss.backward(); p.grad.div_(4)"),
            loop(MEAN, "loss.backward(); p.grad = p.grad / 4"),
            loop(MEAN, "loss.backward(); torch._foreach_div_(grads, 4)"),
            loop(MEAN, "(loss / 4).mean().backward()"),
            loop("sum(model(x))"),
            loop("F.cross_entropy(model(x), y, reduction='none').sum()"),
            loop(f"{MEAN} / 4"),
            loop(MEAN, "loss /= 4; loss.backward()"),
            loop(MEAN, "(0.25 * loss).backward()"),
            loop(MEAN, "loss.div(4).backward()"),
            loop(MEAN, "scaler.scale(loss / 4).backward()"),
            loop(MEAN, "accelerator.backward(loss)"),
            loop("F.cross_entropy(model(x), y, reduction='sum')"),
            loop(MEAN, "loss.backward()", due="is_last"),
            loop("self.compute_loss(x, y)"),
        ],
    ),
    "FF136": Samples(
        bad=[
            loop("F.cross_entropy(model(x), y, ignore_index=255) / 4", "loss.backward()  # here"),
            loop("c(model(x), y) / 4", "loss.backward()  # here", before="c = nn.NLLLoss(weight=w)"),
            loop("F.l1_loss(model(x)[y > 0], y[y > 0]) / 4", "loss.backward()  # here"),
            loop("F.cross_entropy(model(x)[:, valid], y) / 4", "loss.backward()  # here"),
            loop("c(model(x['image'])[x['mask']].log(), y) / 4", "loss.backward()  # here", before="c = nn.MSELoss()"),
            loop("(model(x) - y)[~y.isnan() & (y < 9)].abs().mean() / 4", "loss.backward()  # here"),
            loop("((model(x) - y)[y > 0] + 1).abs().mean() / 4", "loss.backward()  # here"),
        ],
        good=[
            loop("F.cross_entropy(model(x), y, ignore_index=255, reduction='sum') / n"),
            loop(f"{MEAN} / 4"),
            loop("F.l1_loss(model(x)[y > 0], y[y > 0], reduction='sum') / n"),
            loop("F.l1_loss(model(x)[:, 1:, 0], y[order]) / 4"),
            loop("F.l1_loss(model(x[x > 0]), y) / 4"),
            "for x, y in loader:\n    F.cross_entropy(model(x), y, ignore_index=1).backward()\n    optimizer.step()\n",
        ],
    ),
    "FF137": Samples(
        bad=[
            loop(f"{MEAN} / 4").replace("optimizer.step()", "optimizer.step()  # here"),
            loop(f"{MEAN} / 4", due="i % 2 == 1").replace("optimizer.step()", "optimizer.step()  # here"),
        ],
        good=[
            loop(f"{MEAN} / 4", due="(i + 1) % 4 == 0 or (i + 1) == len(loader)"),
            loop(f"{MEAN} / 4") + "    optimizer.step()\n",
        ],
    ),
    "FF138": Samples(
        bad=[
            """
            def train(net, data, opt, plan):
                lr = plan.get_last_lr()
                for epoch in range(3):
                    plan.step()  # here
                    for x in data:
                        opt.zero_grad()
                        net(x).mean().backward()
                        opt.step()
            """,
            """
            def train_one_epoch(model, loader, opt):
                for x, y in loader:
                    opt.zero_grad()
                    model(x).mean().backward()
                    opt.step()

            def main(model, loader):
                opt = torch.optim.SGD(model.parameters(), 0.1)
                plan = torch.optim.lr_scheduler.StepLR(opt, 10)
                for epoch in range(10):
                    plan.step()  # here
                    train_one_epoch(model, loader, opt)
            """,
            """
            from transformers import get_cosine_schedule_with_warmup
            schedule = get_cosine_schedule_with_warmup(optimizer, 1, 2)
            for x in data:
                model(x).mean().backward()
                schedule.step()  # here
                optimizer.step()
            """,
        ],
        good=[
            """
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
            for epoch in range(3):
                for x in data:
                    model(x).mean().backward()
                    optimizer.step()
                scheduler.step()
            """,
            """
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
            optimizer.step()
            for x in data:
                scheduler.step()
                model(x).mean().backward()
                optimizer.step()
            """,
            """
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
            for i, x in enumerate(data):
                if i:
                    scheduler.step()
                model(x).mean().backward()
                optimizer.step()
            """,
        ],
    ),
    "FF139": Samples(
        bad=[
            """
            import torchvision
            net = torchvision.models.resnet18().cuda()
            opt = torch.optim.SGD([{"params": net.parameters()}], 0.1)
            net.fc = nn.Linear(512, 3)  # here
            for x in data:
                net(x).mean().backward()
                opt.step()
            """,
            """
            def build(net):
                opt = torch.optim.SGD(net.parameters(), 0.1)
                net.head = nn.Conv2d(3, 3, 1)  # here
                return opt
            opt = build(model)
            model(x).mean().backward()
            opt.step()
            """,
        ],
        good=[
            """
            net.fc = nn.Linear(512, 3)
            opt = torch.optim.SGD(net.parameters(), 0.1)
            opt.step()
            """,
            """
            opt = torch.optim.SGD(net.parameters(), 0.1)
            net.fc = nn.Linear(512, 3)
            opt.add_param_group({"params": net.fc.parameters()})
            opt.step()
            """,
            """
            opt = torch.optim.SGD(net.parameters(), 0.1)
            other.fc = nn.Linear(512, 3)
            net.epoch = 3
            opt.step()
            """,
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, accumulation.RULES)
