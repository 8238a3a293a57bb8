"""Random programs of a few ops against one process, split many ways: never wrong, never a crash, never a hang.

They write into views, merge dims, meet infinities, run in 16 bit and under autocast, and some end in what torch
refuses. `pytest tests/whole/test_fuzz.py --seed N` draws other programs, `--programs N` as many; the failing
program's own seed is in the message.
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from fullframe.errors import UnsupportedOp
from tests.exactness import InDouble, mesh, on_mesh, one_process, relative, roundings
from tests.rank_group import rank_group
from tests.whole.idioms import IDIOMS

TOLERANCE = 1e-9  # relative, of outputs and gradients; programs divide and take roots, so a few digits may go
FLOOR = 1e-4  # what is smaller all over is zero but for the rounding of longer programs (a mean taken off a constant)
ROUNDINGS = 5  # below float64: times as far from float64's numbers as plain torch; a wrong border is 14 and more
MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]
BATCH = 30
NUDGES = 8  # of the inputs of a program that looks wrong
PENALISED = 0.15  # of the programs in float64

Step = tuple[str, Callable[[Tensor], Tensor]]
Distances = Callable[[dict[str, Tensor]], dict[str, float]]


class Outcome(NamedTuple):
    verdict: (
        str  # exact, refused, unstable or wrong; a crash of one rank fails at once, as the others would wait for it
    )
    seed: int
    program: str
    detail: str


def _weight(*shape: int) -> Tensor:
    """The same on all ranks, and far from symmetric."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).mul(7).sin().view(shape)


def _like(x: Tensor, *shape: int) -> Tensor:
    return _weight(*shape).to(x.dtype)


def _convolution(r: random.Random, x: Tensor) -> Step:
    k, s, d = (r.randint(1, 5), r.randint(1, 5)), (r.randint(1, 3), r.randint(1, 3)), (r.randint(1, 2), r.randint(1, 2))
    s = s if x.dtype == torch.float64 else (1, 1)  # plain torch's may be wrong in 16 bit (narrow_bf16.py)
    p = (r.randint(0, 3), r.randint(0, 3))
    groups = r.choice([1, 1, x.shape[1]])
    w = _like(x, r.choice([1, 2]) * x.shape[1], x.shape[1] // groups, *k)
    return f"conv2d {k} {s} {p} {d} {groups}", lambda x: F.conv2d(x, w, None, s, p, d, groups)


def _transposed(r: random.Random, x: Tensor) -> Step:
    k, s, p = r.randint(1, 4), r.randint(1, 3), r.randint(0, 2)
    s = s if x.dtype == torch.float64 else 1
    w = _like(x, x.shape[1], 2, k, k)
    return f"conv_transpose2d {k} {s} {p}", lambda x: F.conv_transpose2d(x, w, None, s, p)


def _pool(r: random.Random, x: Tensor) -> Step:
    k, s = r.randint(2, 4), r.randint(1, 3)
    p, ceil = r.randint(0, k // 2), r.random() < 0.3
    if r.random() < 0.5:
        return f"max_pool2d {k} {s} {p} {ceil}", lambda x: F.max_pool2d(x, k, s, p, 1, ceil)
    include = r.random() < 0.5
    return f"avg_pool2d {k} {s} {p} {ceil} {include}", lambda x: F.avg_pool2d(x, k, s, p, ceil, include)


def _adaptive(r: random.Random, x: Tensor) -> Step:
    size = (r.randint(1, 9), r.randint(1, 9))
    pool = r.choice([F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
    return f"{pool.__name__} {size}", lambda x: pool(x, size)


def _resize(r: random.Random, x: Tensor) -> Step:
    mode = r.choice(["nearest", "bilinear", "bicubic", "area", "nearest-exact"])
    corners = r.random() < 0.4 if mode in ("bilinear", "bicubic") else None
    if r.random() < 0.5:
        size = (r.randint(1, 30), r.randint(1, 30))
        return f"interpolate {mode} {size} {corners}", lambda x: F.interpolate(
            x, size, mode=mode, align_corners=corners
        )
    scale = r.choice([0.5, 2, 3, 1.5, (2, 0.7)])
    return (
        f"interpolate {mode} x{scale} {corners}",
        lambda x: F.interpolate(x, scale_factor=scale, mode=mode, align_corners=corners),
    )


def _norm(r: random.Random, x: Tensor) -> Step:
    kind, c = r.choice(["batch", "instance", "group", "layer", "normalize"]), x.shape[1]
    w, b, groups = _like(x, c) + 2, _like(x, c), 1 + (c % 2 == 0)
    if kind in ("batch", "instance") and x.shape[0] == 1:
        kind = "group"  # torch's own backward is wrong for one sample and a gradient that lies channels last
    return f"{kind} norm", {
        "batch": lambda x: F.batch_norm(x, None, None, w, b, True),
        "instance": lambda x: F.instance_norm(x, None, None, w, b),
        "group": lambda x: F.group_norm(x, groups, w, b),
        "layer": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (c,), w, b).permute(0, 3, 1, 2),
        "normalize": lambda x: F.normalize(x, dim=1),
    }[kind]


def _slice(r: random.Random, x: Tensor) -> Step:
    h, w = x.shape[2:]
    rows = slice(r.randint(0, h // 2), r.randint(h // 2 + 1, h), r.randint(1, 2))
    columns = slice(r.randint(0, w // 2), -r.randint(0, w // 3) or None, r.randint(1, 3))
    return f"slice {rows} {columns}", lambda x: x[:, :, rows, columns]


def _pad(r: random.Random, x: Tensor) -> Step:
    mode = r.choice(["constant", "reflect", "replicate", "circular"])
    least = 0 if mode == "circular" else -1  # torch itself reads unset memory where a circular pad crops all rows
    pad = [r.randint(least, 3) for _ in range(4)]
    return f"pad {pad} {mode}", lambda x: F.pad(x, pad, mode=mode)


def _shape(r: random.Random, x: Tensor) -> Step:
    kind = r.choice(["tokens", "transpose", "flip", "roll", "shuffle", "unshuffle", "windows", "chunk"])
    shift = (r.randint(-4, 4), r.randint(-4, 4))
    return f"{kind} {shift}", {
        "tokens": lambda x: (x.flatten(2).transpose(1, 2) * 2).transpose(1, 2).view(x.shape),
        "transpose": lambda x: x.transpose(2, 3),
        "flip": lambda x: x.flip(2, 3),
        "roll": lambda x: x.roll(shift, (2, 3)),
        "shuffle": lambda x: F.pixel_shuffle(x.repeat_interleave(4, 1), 2),
        "unshuffle": lambda x: F.pixel_unshuffle(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)), 2),
        "windows": _windows,
        "chunk": lambda x: torch.cat(x.chunk(3, 3)[::-1], 3),
    }[kind]


def _windows(x: Tensor) -> Tensor:
    x = F.pad(x, (0, -x.shape[3] % 3, 0, -x.shape[2] % 3))
    n, c, h, w = x.shape
    tiles = x.view(n, c, h // 3, 3, w // 3, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 9, c)
    tiles = tiles - tiles.mean(1, keepdim=True)
    return tiles.view(n, h // 3, w // 3, 3, 3, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


def _pointwise(r: random.Random, x: Tensor) -> Step:
    kind = r.choice(["shifted", "excite", "where", "bias", "inplace", "self", "whole", "column"])
    return kind, {
        "shifted": lambda x: x[:, :, 1:] * x[:, :, :-1].sigmoid(),
        "excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
        "where": lambda x: torch.where(x > x.mean(), x, x.tanh()),
        "bias": lambda x: x + _like(x, x.shape[1])[:, None, None],
        "inplace": lambda x: (x * 1).mul_(x.sigmoid()).add_(1),
        "self": lambda x: F.gelu(x) - x.abs(),
        "whole": lambda x: x * _like(x, x.shape[2], x.shape[3]),
        "column": lambda x: x - x[..., :1] + x.amax(3, keepdim=True),
    }[kind]


def _mix(r: random.Random, x: Tensor) -> Step:
    kind = r.choice(["softmax", "spatial softmax", "linear", "attention", "gram", "cat", "stack", "cumsum", "unfold"])
    c, dim = x.shape[1], r.choice([1, 2, 3])
    return kind, {
        "softmax": lambda x: x.softmax(1),
        "spatial softmax": lambda x: x.softmax(3) * x,
        "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), _like(x, c, c)).permute(0, 3, 1, 2),
        "attention": _attention,
        "gram": lambda x: x + (x.flatten(2) @ x.flatten(2).transpose(1, 2)).tanh().mean((1, 2))[:, None, None, None],
        "cat": lambda x: torch.cat([x[:, :1, :, :], x * 2], 1),
        "stack": lambda x: torch.stack([x, x.sin()], 2).flatten(1, 2),
        "cumsum": lambda x: x.cumsum(dim) * 0.1,
        "unfold": lambda x: F.unfold(x, 3, padding=1).view(x.shape[0], -1, *x.shape[2:])[:, ::3],
    }[kind]


def _attention(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens.sin(), tokens).transpose(1, 2).view(x.shape)


def _last(r: random.Random, x: Tensor) -> Step:
    kind = r.choice(["none", "mean", "norm", "cross_entropy", "smooth_l1", "var", "logsumexp"])
    return kind, {
        "none": lambda x: x,
        "mean": lambda x: x.mean((1, 2)),
        "norm": lambda x: x.norm(dim=2),
        "cross_entropy": lambda x: F.cross_entropy(x, (x[:, 0].detach().abs() * 5).long() % x.shape[1]),
        "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach().sin()),
        "var": lambda x: x.var((2, 3)),
        "logsumexp": lambda x: x.logsumexp((1, 3)),
    }[kind]


def _write(r: random.Random, x: Tensor) -> Step:
    h, w = x.shape[2:]
    a, b = sorted(r.sample(range(w + 1), 2)) if w > 1 else (0, 1)
    c, step, number = r.randrange(h), r.randint(1, 3), r.choice([0.0, 1.5, -2.0])
    kinds = "columns row every chunk nested flat assign shift turned base relu copied gaps data mT canvas held"
    kind = r.choice(kinds.split())
    return f"write {kind} {a}:{b}:{step} {c} {number}", lambda x: _written(x * 1, kind, a, b, c, step, number)


def _written(x: Tensor, kind: str, a: int, b: int, c: int, step: int, number: float) -> Tensor:
    y = x[..., a:b]
    if kind == "columns":
        y.mul_(number).add_(1)
    elif kind == "row":
        x[:, :, c].fill_(number)
    elif kind == "every":
        x[..., a::step].add_(number)
    elif kind == "chunk":
        x.narrow(2, 0, c + 1).sub_(number)
    elif kind == "nested":
        y[:, :1, c:].clamp_(max=number)
        x[:, :, :, a:b].add_(y.detach())
    elif kind == "flat":
        x.view(x.shape[0], x.shape[1], -1)[:, 0].mul_(number)
    elif kind == "assign":
        x[..., a:b] = x[..., x.shape[3] - b : x.shape[3] - a].detach() * 2
    elif kind == "shift":
        x[:, :, c:] += x[:, :, : x.shape[2] - c].detach() * 1  # torch itself leaves open what overlaps
    elif kind == "turned":
        x.transpose(2, 3)[:, :, a:b].neg_()
    elif kind == "base":
        x.add_(1)
        return x + y.mean()
    elif kind == "copied":  # what torch copies, for the gaps between strides
        x[:, :, c:, a].reshape(-1).add_(number)
        return x + x[:, :1, c, a:b].contiguous().mul_(number).sum()
    elif kind == "gaps":
        x.detach()[..., a:b].flatten().add_(number)
    elif kind == "data":
        x.detach().view(-1).data[c:].mul_(number)
        return x + y.mean()
    elif kind == "mT":
        x[:, 0, c:, a:b].mT[:1] *= number
    elif kind == "canvas":
        out = torch.full((*x.shape[:2], x.shape[2] + c, x.shape[3]), number, dtype=x.dtype)
        out[:, :, c:] += x
        out[..., a:b] = y * 2
        return out
    elif kind == "held":  # several views of what becomes split, as where a batch of images is put together
        out = torch.full((*x.shape[:2], x.shape[2] + c, x.shape[3]), number, dtype=x.dtype)
        rows, columns = out[:, :, c:], out[..., a::step]
        for image, part in zip(x.detach(), out, strict=True):
            part[:, c:, a:b].copy_(image[..., a:b])
        rows += x
        return out + columns.mean()
    else:
        F.relu_(y)
    return x


def _side_by_side(r: random.Random, x: Tensor) -> Step:
    """The samples as one wide image, something done to it, and back: a width merged from split and whole dims."""
    kind = r.choice(["resize", "pool", "conv", "flip", "pad", "slice", "softmax", "sum"])
    w = _like(x, x.shape[1], x.shape[1], 3, 3)
    inner: dict[str, Callable[[Tensor], Tensor]] = {
        "resize": lambda y: F.interpolate(y, scale_factor=2),
        "pool": lambda y: F.max_pool2d(y, 3, 1, 1),
        "conv": lambda y: F.conv2d(y, w, None, 1, 1),
        "flip": lambda y: y.flip(3),
        "pad": lambda y: F.pad(y, (1, 1, 0, 0)),
        "slice": lambda y: y[..., 1:],
        "softmax": lambda y: y.softmax(3),
        "sum": lambda y: y - y.sum(3, keepdim=True) / y.shape[3],
    }
    return f"side by side {kind}", lambda x: inner[kind](x.permute(1, 2, 0, 3).flatten(2)[None])


def _holes(r: random.Random, x: Tensor) -> Step:
    count, value = r.randint(1, 3), r.choice([float("inf"), float("-inf"), float("nan")])
    places = [tuple(r.randrange(n) for n in x.shape) for _ in range(count)]

    def put(x: Tensor) -> Tensor:
        hole = torch.zeros(x.shape, dtype=torch.bool)
        for place in places:
            hole[place] = True
        return x.masked_fill(hole, value)

    return f"holes {value} {places}", put


STEPS = [_convolution, _transposed, _pool, _adaptive, _resize, _norm, _slice, _pad, _shape, _pointwise, _mix, _write]
STEPS += [_side_by_side, *IDIOMS]


def _misuse(r: random.Random, x: Tensor) -> Step:
    """Something that plain torch refuses."""
    n, c, h, w = x.shape
    return r.choice([
        ("index past the end", lambda x: x[..., w]),
        ("write past the end", lambda x: x.__setitem__((0, 0, h), 1.0)),
        ("off by one", lambda x: x + F.pad(x, (0, 1))),
        ("off by one, whole", lambda x: x * _like(x, h, w + 1)),
        ("cat", lambda x: torch.cat([x, F.pad(x, (0, 0, 0, 1))], 3)),
        ("channels", lambda x: F.conv2d(x, _like(x, 2, c + 1, 1, 1))),
        ("labels", lambda x: F.cross_entropy(x, torch.zeros(n, h + 1, w).long())),
        ("matmul", lambda x: x @ _like(x, w + 1, 2)),
        ("dim", lambda x: x.mean(4)),
        ("view", lambda x: x.reshape(n, c, h * w + 1)),
        ("kernel", lambda x: F.avg_pool2d(x, (h + 1, w + 1))),
        ("narrow", lambda x: x.narrow(3, w, 1)),
        ("norm", lambda x: F.layer_norm(x, (w + 1,))),
        ("target", lambda x: F.binary_cross_entropy_with_logits(x, F.pad(x, (0, 1)))),
        ("value", lambda x: x.masked_fill(x > 0, _like(x, 2))),
    ])  # fmt: skip


class Program(NamedTuple):
    """A batch of images and up to 4 steps, each with a few thousand elements at most."""

    x: Tensor
    steps: list[Step]
    refused: bool  # by plain torch, in the last step
    autocast: bool
    penalised: bool  # its gradient is a result too, so that it is differentiated again


def _program(seed: int) -> Program:
    r = random.Random(seed)
    x = _weight(2, r.choice([2, 4]), r.randint(5, 22), r.randint(5, 26)) + 0.1 * _weight(1, 1, 1, 1)
    x = x.to(r.choice([torch.float64] * 8 + [torch.float32, torch.bfloat16]))
    x = x.to(memory_format=torch.channels_last) if seed % 5 == 4 else x
    autocast = x.dtype == torch.float32 and r.random() < 0.7
    holes, misuse = r.random() < 0.15, r.random() < 0.12
    steps: list[Step] = []
    value = x
    for number in range(r.randint(1, 4) * 3):
        step = r.choice([*STEPS, *STEPS, _last] if number else STEPS + [_holes] * 20 * holes)(r, value)
        result = _tried(step, value, autocast)
        if result is None or not 0 < result.numel() < 60_000 or not (holes or result.isfinite().all()):
            continue  # not valid on this size
        if holes and "fft" in step[0]:
            continue  # what of its numbers is infinite and what NaN hangs on the order of the sums
        steps, value = [*steps, step], result
        if value.dim() != 4 or len(steps) == 4:
            break
    refused = misuse and value.dim() == 4
    if refused:
        steps.append(_misuse(r, value))
    program = Program(x, steps, refused, autocast, False)
    if x.dtype == torch.float64 and not (refused or holes) and r.random() < PENALISED:
        return program._replace(penalised=_is_twice_differentiable(program))
    return program


def _is_twice_differentiable(program: Program) -> bool:
    """Whether plain torch differentiates the program's gradient, and gives numbers."""
    x = program.x.clone().requires_grad_()
    try:
        found = torch.stack([t.sin().sum() for t in _run(program._replace(penalised=True), x)])
        (second,) = torch.autograd.grad(found.sum(), x)
    except RuntimeError:
        return False
    return bool(second.isfinite().all())


def _run(program: Program, x: Tensor) -> Any:
    given = x
    with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
        for _, step in program.steps:
            x = step(x)
    if not program.penalised:
        return x
    (gradient,) = torch.autograd.grad(x.sin().sum(), given, create_graph=True)
    return [x, gradient]


def _tried(step: Step, value: Tensor, autocast: bool) -> Tensor | None:
    """What plain torch makes of it, forward and backward; None where it refuses."""
    leaf = value.detach().clone().requires_grad_()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = step[1](leaf * 1)
        result.sum().backward()
    except (RuntimeError, ValueError, IndexError):
        return None
    return result.detach()


def _outcome(seed: int, height: int, width: int) -> Outcome:
    return _judged(_program(seed), seed, height, width)


def _judged(program: Program, seed: int, height: int, width: int) -> Outcome:
    kind = f"{tuple(program.x.shape)} {program.x.dtype}{' autocast' * program.autocast}"
    text = " -> ".join([kind, *(name for name, _ in program.steps), *["gradient"] * program.penalised])
    run = partial(_run, program)
    if program.refused:
        return _refusal(run, program.x, seed, text, height, width)
    try:
        distances = _distances(program)
        found = distances(on_mesh(run, [program.x], [], height, width))
    except UnsupportedOp as refused:
        return Outcome("refused", seed, text, f"{refused.function}: {refused.reason}")
    except Exception as error:
        raise RuntimeError(f"seed {seed} crashed: {text}") from error
    worst = max(found.values())
    allowed = TOLERANCE if program.x.dtype == torch.float64 else ROUNDINGS
    verdict = "exact" if worst <= allowed else "unstable" if _is_unstable(program, distances, worst) else "wrong"
    return Outcome(verdict, seed, text, str(found))


def _distances(program: Program) -> Distances:
    """How far other answers are from plain torch's: `relative`, or below float64 in `roundings`."""
    run, dtype = partial(_run, program), _coarsest(program)
    here = exact = one_process(run, [program.x], [])
    if dtype != torch.float64:
        with InDouble():
            exact = one_process(run, [program.x.double()], [])

    def distances(there: dict[str, Tensor]) -> dict[str, float]:
        assert here.keys() == there.keys(), (here.keys(), there.keys())
        if dtype == torch.float64:
            return {name: relative(here[name], there[name], FLOOR) for name in here}
        return {name: roundings(exact[name], here[name], there[name], dtype, FLOOR) for name in here}

    return distances


def _coarsest(program: Program) -> torch.dtype:
    return torch.bfloat16 if program.autocast else program.x.dtype


def _is_unstable(program: Program, distances: Distances, worst: float) -> bool:
    """Whether inputs that are off by last bits change plain torch's own numbers: another choice among ties.

    Below float64 rounding alone changes them; then they must come to be as far off as the split ones.
    """
    run, dtype = partial(_run, program), _coarsest(program)
    far, bits = (TOLERANCE, 4) if dtype == torch.float64 else (worst, 1)
    for number in range(NUDGES):
        nudge = torch.randn(program.x.shape, generator=torch.Generator().manual_seed(number), dtype=program.x.dtype)
        there = one_process(run, [program.x * (1 + bits * torch.finfo(dtype).eps * nudge)], [])
        if max(distances(there).values()) >= far:
            return True
    return False


def _refusal(run: Callable[[Tensor], Any], x: Tensor, seed: int, text: str, height: int, width: int) -> Outcome:
    """Plain torch raises: so does every rank, with its exception or by name."""
    types: list[Any] = []
    for given in (x, ff.shard(x, mesh(height, width))):
        try:
            run(given)
            types.append(None)
        except Exception as error:
            types.append(type(error))
    right = types[1] in (types[0], UnsupportedOp)  # with one row or column left torch may broadcast it
    return Outcome("exact" if right else "wrong", seed, text, str(types))


def _outcomes(seeds: list[int], height: int, width: int) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_outcome(seed, height, width) for seed in seeds]


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_random_programs(height: int, width: int, seed: int, programs: int) -> None:
    count = programs // len(MESHES)
    first = seed * 1_000_000 + MESHES.index((height, width)) * 100_000
    outcomes = []
    for start in range(0, count, BATCH):
        seeds = list(range(first + start, first + start + min(BATCH, count - start)))
        answers = rank_group(height * width).run(_outcomes, seeds, height, width)
        outcomes += answers[0]
        assert all([o.verdict for o in other] == [o.verdict for o in answers[0]] for other in answers), answers
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    bad = [outcome for outcome in outcomes if outcome.verdict == "wrong"]
    print(f"seed {seed}, mesh {height}x{width}: {dict(verdicts)}")
    assert not bad, "\n".join(map(str, bad))
    assert verdicts["exact"] >= 0.97 * count, [o for o in outcomes if o.verdict == "refused"]


def _borderless(x: Tensor) -> Tensor:
    """A convolution that sees zeros where a neighbour's columns are."""
    w = _like(x, x.shape[1], x.shape[1], 3, 3)
    if isinstance(x, ff.SpatialTensor):
        return ff.from_local(F.conv2d(x.local, w, None, 1, 1), x.device_mesh, like=x)
    return F.conv2d(x, w, None, 1, 1)


def _verdict(dtype: torch.dtype, autocast: bool) -> str:
    x = _weight(2, 4, 9, 40).to(dtype)
    steps: list[Step] = [("sigmoid", torch.sigmoid), ("borderless", _borderless)]
    return _judged(Program(x, steps, False, autocast, False), 0, 1, 2).verdict


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float64, False), (torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
)
def test_a_wrong_border_is_wrong_in_every_precision(dtype: torch.dtype, autocast: bool) -> None:
    assert rank_group(2).run(_verdict, dtype, autocast) == ["wrong"] * 2


@pytest.mark.parametrize(
    "seed",
    [
        90312200702,  # bf16: a nearly constant row is normalized, and nothing but rounding is left of it
        41711200331,  # fractional pooling of a merged width drew twice
    ],
)
def test_a_program_that_was_called_wrong_is_exact(seed: int) -> None:
    outcomes = rank_group(4).run(_outcomes, [seed], 2, 2)
    assert [answer[0].verdict for answer in outcomes] == ["exact"] * 4
