"""FF19x on texts that have the fault and texts that only look like it."""

from fullframe.doctor.lint.rules import old_forms
from tests.doctor.lint.samples import Samples, judged

MEMORY = "import io\ndef f(b: io.BytesIO):\n    return torch.load(b)\n"
RANDOM = "x = torch.load(p)\ntorch.random.set_rng_state(x['cpu'])\n"
TABLE = {
    "FF190": Samples(
        bad=[
            "import apex\nm, o = apex.amp.initialize(m, o)  # here\n",
            "from apex import amp\nwith amp.scale_loss(loss, o) as l:  # here\n    l.backward()\n",
        ],
        good=[
            "from torch import amp\nwith amp.autocast('cuda'):\n    pass\n",
            "amp.initialize(m, o)\nloss.backward()\n",
        ],
    ),
    "FF191": Samples(
        bad=[
            "m = torch.nn.DataParallel(m, [0, 1])  # here\n",
            "from torch.nn import DataParallel as DP\nm = DP(m)  # here\n",
        ],
        good=["m = isinstance(m, nn.DataParallel)\n", "from mine import DataParallel\nm = DataParallel(m)\n"],
    ),
    "FF192": Samples(
        bad=[
            "from torch.cuda.amp import autocast\nwith autocast(enabled=fp16):  # here\n    pass\n",
            "from torch.cuda import amp\ns = amp.GradScaler()  # here\n",
            "@torch.cuda.amp.autocast()  # here\ndef f(x):\n    return x\n",
        ],
        good=[
            "s = torch.amp.GradScaler('cuda')\n",
            "s = torch.amp.GradScaler() if new else torch.cuda.amp.GradScaler()\n",
            "if version < 2:\n    s = torch.cuda.amp.GradScaler()\n",
            "with torch.autocast('cuda'):\n    pass\n",
        ],
    ),
    "FF193": Samples(
        bad=[
            "import apex\nm = apex.parallel.convert_syncbn_model(m)  # here\n",
            "from apex.optimizers import FusedAdam\no = FusedAdam(ps)  # here\n",
        ],
        good=[
            "from apex.normalization import FusedRMSNorm\nn = FusedRMSNorm(8)\n",
            "o = torch.optim.Adam(ps, fused=True)\n",
        ],
    ),
    "FF194": Samples(
        bad=[
            "y = F.upsample(x, scale_factor=2)  # here\n",
            "nn.init.xavier_uniform(net.weight)  # here\nloss.backward()\n",
        ],
        good=["y = F.interpolate(x, scale_factor=2)\n", "y = nn.Upsample(2)(x)\n", "y = net.upsample(x)\n"],
    ),
    "FF195": Samples(
        bad=[
            "x = torch.autograd.Variable(x, volatile=True)  # here\n",
            "from torch.autograd import Variable as V\nfor x in d:\n    y = model(V(x))  # here\n",
        ],
        good=[
            "from tensorflow import Variable\nx = Variable(x)\n",
            "from torch.autograd import Variable\ny: Variable = x\n",
        ],
    ),
    "FF196": Samples(
        bad=["x = torch.load(p)  # here\n", "load = torch.load\nx = load(f, weights_only=True)  # here\n"],
        good=[
            "import io\nb = io.BytesIO()\nx = torch.load(b)\n",
            "x = torch.load(p, 'cpu')\n",
            "x = torch.load(p, map_location=d)\n",
            "x = torch.load(p, **options)\n",
            RANDOM,
            MEMORY,
        ],
    ),
    "FF197": Samples(
        bad=[
            "x = torch.load(p, map_location='cpu', weights_only=False)  # here\n",
            "def f(p, safe=False):\n    return torch.load(p, weights_only=safe)  # here\nf(1)\n",
        ],
        good=[
            "x = torch.load(p)\n",
            "x = torch.load(p, weights_only=safe)\n",
            "torch.save(x, p)\ntorch.load(p, weights_only=False)\n",
        ],
    ),
    "FF198": Samples(
        bad=["x = torch.load(p)  # here\n", "x = torch.load(p, 'cpu')  # here\n"],
        good=["x = torch.load(p, weights_only=False)\n", "x = torch.load(p, **options)\n"],
    ),
    "FF199": Samples(
        bad=[
            "parser.add_argument('--local-rank', default=0)  # here\n",
            "def f(p):\n    p.add_argument('-r', '--local_rank')  # here\n",
        ],
        good=[
            "parser.add_argument('--local_rank', default=int(os.environ['LOCAL_RANK']))\n",
            "parser.add_argument('--rank')\n# local_rank\n",
        ],
    ),
}

test_what_is_found, test_every_rule_has_samples = judged(TABLE, old_forms.RULES)
