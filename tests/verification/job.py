"""A recipe file for `verify`: a tiny network at an awkward size, with one thing in it that may be wrong."""

from pathlib import Path

RECIPE = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.data import Dataset
import fullframe as ff
from fullframe.spatial.tensor import local_of, wrap

def rank():
    return dist.get_rank() if dist.is_initialized() else 0

class Frames(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 33, 50, generator=generator)
        target = torch.randint(-1, 4, (33, 50), generator=generator)
        target[:, : 5 * index] = -1  # replicas count different numbers of pixels
        return {{"image": image + torch.randn(1), "target": target, "name": str(index)}}

{code}

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.middle = {middle}
        self.up = nn.Upsample(scale_factor=4, mode="bilinear")
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(6, 4, 1))

    def forward(self, image):
        small = self.pool(self.stem(image))
        return self.head(self.up(small + self.middle(small))[..., : image.shape[-2], : image.shape[-1]])

def loss(model, batch):
    used = batch["target"] >= 0
    values = F.cross_entropy(model(batch["image"]), batch["target"].clamp(min=0), reduction="none")
    return torch.where(used, values, 0.0).sum(), used.sum()

def recipe():
    return ff.Recipe(
        model=Network,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        data=Frames,
        batch_size=2,
        seed=3,
    )
"""

RIGHT = "nn.Conv2d(6, 6, 3, padding=1)"

# Each rank scales its part by a number of its own.
SCALED = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        return self.mix(x) * (1 + 1e-6 * rank())
"""

# A function with a rule that forgets the rows beyond the cut.
SEAM = """
def blur(x):
    if has_torch_function_unary(x):
        return handle_torch_function(blur, (x,), x)
    return F.avg_pool2d(x, 3, 1, 1)

@ff.rule(blur)
def blur_of_parts(function, x):
    return wrap(F.avg_pool2d(local_of(x), 3, 1, 1), x.spec)

class Blurred(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return self.second(blur(self.first(x)))
"""

# The forward is right; the gradient loses a share on one rank.
_LEAK = """
class Leak(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - 1e-3 * rank())
"""
LEAK = f"""{_LEAK}
class Leaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = self.mix(x)
        if isinstance(y, ff.SpatialTensor):
            return wrap(Leak.apply(local_of(y)), y.spec)
        return Leak.apply(y)
"""

# Two sums that are equal but for rounding, and a relu that stands or falls with their difference.
KINK = """
class Kinked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 3, padding=1)
        self.one, self.other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.mix(x)
        one, other = x.mean((2, 3)), x.flip(3).sum(2).sum(2) / (x.shape[2] * x.shape[3])
        return x + (self.one * one - self.other * other).relu()[:, :, None, None]
"""

# An op without a rule.
SPECTRAL = """
class Spectral(nn.Module):
    def forward(self, x):
        return x @ torch.linalg.pinv(x) @ x
"""

# The middle block has a parameter that the loss never sees.
UNUSED = """
class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.spare = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)  # of which nobody expects one

    def forward(self, x):
        return self.mix(x)
"""

# Parameters, a complex one among them, go into modules as their inputs; the gradient of one is a mean over replicas.
QUERIED = """
class Spectrum(nn.Module):
    def forward(self, x, weight):
        return torch.fft.ifft(torch.fft.fft(x, dim=1) * weight[:, None, None], dim=1).real

class Queried(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.weight = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6, dtype=torch.cfloat))
        self.embed, self.spectrum = nn.Linear(6, 6), Spectrum()

    def forward(self, x):
        return self.spectrum(x, self.weight) + self.embed(self.query)[:, None, None]
"""

# What is frozen runs in inference mode, which counts no writes; the last layer writes to what it gets.
TAUGHT = """
class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 3, padding=1)
        self.frozen = nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU(inplace=True)).requires_grad_(False)

    def forward(self, x):
        with torch.inference_mode():
            pooled = x.mean((2, 3), keepdim=True)
            known, whole = self.frozen(x), self.frozen(pooled)
        return self.mix(x) + known + whole
"""

# As most of transformers' models do.
DROPPING = """
class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        x = F.dropout(self.mix(x), p=0.2, training=self.training)
        tokens = F.dropout2d(x).flatten(2).transpose(1, 2)[:, None]
        tokens = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.1)
        return x + torch.dropout(tokens[:, 0].transpose(1, 2).unflatten(2, x.shape[2:]), 0.1, self.training)
"""

# A part that backward runs again, by torch's older way: its first pass has no gradients.
AGAIN = """
from torch.utils.checkpoint import checkpoint

class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return checkpoint(lambda x: self.out(F.dropout(self.mix(x).sigmoid(), 0.3)), x, use_reentrant=True)
"""

# Dropout that is no module: every rank draws for its own pixels.
DRAWN = """
class Drawn(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)
"""

# Asks for gradients in its forward pass, as a penalty on them does.
SLOPED = """
class Sloped(nn.Conv2d):
    def forward(self, x):
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + slope
"""

# Softmax in single precision, as many models have it, in numbers that are double otherwise.
SINGLE = """
class Single(nn.Module):
    def forward(self, x):
        return torch.softmax(x.float().flatten(2), dim=2).to(x).view(x.shape)
"""

# In torch an instance norm gives a view, which is written to: of its gradient one process hears nothing.
INPLACE = "nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.LeakyReLU(inplace=True))"

# Called again it gives something else, whatever the seed; and it differs between ranks.
COUNTING = """
class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 1e-3 * self.calls) * (1 + 1e-6 * rank())
"""

# What the second rank, or both of two, do otherwise than one process while all outputs agree.
OTHERWISE = f"""{_LEAK}
class Otherwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.same, self.other = nn.Conv2d(6, 6, 1), nn.Identity(), nn.Parameter(torch.ones(6, 1, 1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        is_split, pooled = isinstance(x, ff.SpatialTensor), self.same(x.mean((2, 3), keepdim=True))
        self.seen += 1
        y = self.mix(x)
        {{other}}
        return y + pooled

    def nothing(self):
        return self.other - self.other.detach()
"""

OTHER: dict[str, tuple[str, tuple[str, str | None, str], str]] = {
    # what is done otherwise; phase, module and its class; what the sentence says
    "nothing": ("pooled = pooled + self.same(x.mean(3, keepdim=True))", ("", None, ""), ""),
    "a call more": (
        "y = self.mix(x) if is_split else y",
        ("forward", "middle.mix", "Conv2d"),
        "call 1 of the module is only made when split",
    ),
    "a call less": (
        "y = y if is_split else self.mix(x)",
        ("forward", "middle", "Otherwise"),
        "the split step never gets there",
    ),
    "another shape": (
        "self.same(F.pad(x, (0, 1)) if is_split else x * 1)",
        ("forward", "middle", "Otherwise"),
        "((2, 6, 9, 14) torch.float64 instead of (2, 6, 9, 13) torch.float64)",
    ),
    "a value's gradient": (
        "z = self.same((x.detach() * 1).requires_grad_()); y = y + (z - z.detach()) if is_split else y",
        ("backward", "middle", "Otherwise"),
        "gradient at the output of 'middle.same' (Identity)",
    ),
    "no gradient of a value": (
        "z = self.same((x.detach() * 1).requires_grad_()); y = y if is_split else y + (z - z.detach())",
        ("backward", "middle", "Otherwise"),
        "gradient at the output of 'middle.same' (Identity)",
    ),
    "a buffer of one rank": ("self.seen += rank()", ("buffer", "middle", "Otherwise"), "buffer 'seen'"),
    "a whole tensor's gradient": (
        "pooled = Leak.apply(pooled)",
        ("backward", "middle", "Otherwise"),
        "gradient at the output of 'middle.same' (Identity)",
    ),
    "no gradient": (
        "pooled = pooled if is_split else pooled + self.nothing()",
        ("parameter", "middle", "Otherwise"),
        "no gradient, though one process has one",
    ),
    "a gradient": (
        "pooled = pooled + self.nothing() if is_split else pooled",
        ("parameter", "middle", "Otherwise"),
        "'other'",
    ),
}

# The data set reads parts; `shift` columns too far to the right they are not the frame that one process reads.
PARTS = """
def read(self, index, rows, columns):
    sample = self[index]
    at = slice(columns.start + {shift}, columns.stop + {shift}) if columns.stop < 50 else columns
    cut = {{name: sample[name][..., rows, at] for name in ("image", "target")}}
    return sample | cut

Frames.read, Frames.size = read, lambda self, index: (33, 50)
"""


def written(folder: Path, middle: str = RIGHT, code: str = "") -> Path:
    """The recipe file, with `middle` as the network's middle block."""
    path = folder / "job.py"
    path.write_text(RECIPE.format(code=code, middle=middle))
    return path
