"""FF106 to FF109 on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import losses
from tests.doctor.lint.samples import Samples, judged

TABLE = {
    "FF106": Samples(
        bad=[
            "loss = torch.tensor(model(x).mean())\nloss.backward()  # here\n",
            "loss = F.mse_loss(model(x), y).detach()\nloss.requires_grad_()\nloss.backward()  # here\n",
            "loss = F.mse_loss(model(x), y).data\nloss.backward()  # here\n",
            "loss = (model(x).detach() - y).square()\nloss.requires_grad_().backward()  # here\n",
        ],
        good=[
            "x = torch.tensor([1.0], requires_grad=True)\n(x * x).backward()\n",
            "loss = F.mse_loss(model(x), target(x).detach())\nloss.backward()\n",
            "x.requires_grad_()\nmodel(x).mean().backward()\n",
        ],
    ),
    "FF107": Samples(
        bad=[
            "p = model(x).softmax(dim=1)\nloss = nn.CrossEntropyLoss()(p, y)  # here\n",
            "criterion = nn.BCEWithLogitsLoss()\nloss = criterion(torch.sigmoid(model(x)), y)  # here\n",
            "soft = nn.Softmax(dim=1)\np = soft(model(x))\nloss = F.nll_loss(p, y)  # here\n",
            "import lightning as L\nclass Net(L.LightningModule):\n    def __init__(self):\n"
            "        self.net, self.criterion = nn.Linear(2, 2), nn.CrossEntropyLoss()\n"
            "    def training_step(self, batch, index):\n"
            "        return self.criterion(self.net(batch[0]).softmax(1), batch[1])  # here\n",
        ],
        good=[
            "loss = F.nll_loss(F.log_softmax(model(x), 1), y)\n",
            "loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)\n",
            "loss = F.cross_entropy(model(x), teacher(x).softmax(1))\n",
            "p = model(x).softmax(1)\nloss = F.nll_loss(torch.log(p), y)\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, losses.RULES)
