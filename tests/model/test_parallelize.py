"""What people put around blocks: recompute, autocast, DDP's unused parameters, channels_last, evaluation."""

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.GELU(),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, recompute: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.recompute, self.dropout = recompute, dropout
        self.stem = nn.Conv2d(3, 8, 4, 2, 1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Conv2d(8, 5, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)  # type: ignore[assignment]
            x = F.max_pool2d(F.dropout(x, self.dropout, self.training), 3, 1, 1)
        return F.interpolate(self.head(x), scale_factor=2, mode="bilinear")


def _net(**options: float) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()  # type: ignore[arg-type]


def _image(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, 26, 38, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def _loss(out: Tensor) -> Tensor:
    return F.mse_loss(out.sin(), out.detach() * 0.5)


def _worst(here: nn.Module, there: nn.Module) -> float:
    pairs = list(zip(here.parameters(), there.parameters(), strict=True))
    return max(relative(p.grad, q.grad) for p, q in pairs if p.grad is not None)  # type: ignore[arg-type]


def _gradients(height: int, width: int, recompute: bool, dropout: float = 0.0) -> list[Tensor]:
    model = ff.parallelize(_net(recompute=recompute, dropout=dropout), mesh(height, width), find_unused_parameters=True)
    torch.manual_seed(3)
    _loss(model(ff.shard(_image(), mesh(height, width)))).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _recomputed(height: int, width: int) -> tuple[float, float]:
    plain = _net()
    _loss(plain(_image())).backward()
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    with_dropout, again = (_gradients(height, width, recompute, 0.3) for recompute in (False, True))
    return (
        max(relative(a, b) for a, b in zip(expected, _gradients(height, width, True), strict=False)),
        max(relative(a, b) for a, b in zip(with_dropout, again, strict=True)),
    )


def test_recompute_is_exact_and_draws_the_same_dropout() -> None:
    for height, width in [(1, 2), (2, 2)]:
        for exact, same_dropout in rank_group(height * width).run(_recomputed, height, width):
            assert exact < 1e-11
            assert same_dropout < 1e-11


def _autocast(height: int, width: int) -> tuple[float, float, bool]:
    """Error of the split step in bf16 against one process in float32, and that of one process in bf16."""
    exact, whole = _net().float(), _net().float()
    split = ff.parallelize(_net().float(), mesh(height, width), find_unused_parameters=True)
    image = _image(torch.float32)
    _loss(exact(image)).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _loss(whole(image)).backward()
        out = split(ff.shard(image, mesh(height, width)))
        _loss(out).backward()
    return _worst(exact, split), _worst(exact, whole), out.dtype == torch.bfloat16


def test_autocast_is_as_precise_as_in_one_process() -> None:
    for height, width in [(1, 2), (2, 2)]:
        for split, whole, low in rank_group(height * width).run(_autocast, height, width):
            assert low
            assert split < 2 * whole


def _channels_last(height: int, width: int) -> tuple[float, bool]:
    plain = _net()
    _loss(plain(_image())).backward()
    model = ff.parallelize(
        _net().to(memory_format=torch.channels_last), mesh(height, width), find_unused_parameters=True
    )
    x = ff.shard(_image().to(memory_format=torch.channels_last), mesh(height, width))
    _loss(model(x)).backward()
    stem = model.module.stem(x)
    return _worst(plain, model), x.local.is_contiguous(memory_format=torch.channels_last) and stem.local.is_contiguous(
        memory_format=torch.channels_last
    )


def test_channels_last_is_kept_and_exact() -> None:
    for height, width in [(1, 2), (2, 1), (2, 2)]:
        for error, kept in rank_group(height * width).run(_channels_last, height, width):
            assert error < 1e-11
            assert kept


def _evaluated(first_inside: str) -> float:
    """What a model in inference mode gives, and its gradients in training after it; `first_inside` is made there."""
    plain, model, split = _net().eval(), _net(), ff.shard(_image(), mesh(1, 2))
    if first_inside == "nothing":
        model = ff.parallelize(model, mesh(1, 2), find_unused_parameters=True)
    with torch.inference_mode():
        if first_inside == "model":
            model = _net()
        if first_inside != "nothing":
            model = ff.parallelize(model, mesh(1, 2), find_unused_parameters=True)
        error = relative(plain(_image()), model.eval()(split).full())
    if first_inside == "model":  # with which torch does not train
        return error
    _loss(plain(_image())).backward()
    _loss(model(split)).backward()
    return max(error, _worst(plain, model))


@pytest.mark.parametrize("first_inside", ["nothing", "parallel model", "model"])
def test_inference_mode(first_inside: str) -> None:
    assert max(rank_group(2).run(_evaluated, first_inside)) < 1e-11


def _accumulated() -> float:
    plain = _net()
    for part in _image().chunk(2):
        (_loss(plain(part)) / 2).backward()
    model = ff.parallelize(_net(), mesh(1, 2), find_unused_parameters=True)
    first, second = (ff.shard(part, mesh(1, 2)) for part in _image().chunk(2))
    with model.no_sync():
        (_loss(model(first)) / 2).backward()
    (_loss(model(second)) / 2).backward()
    return _worst(plain, model)


def test_no_sync_accumulates() -> None:
    assert max(rank_group(2).run(_accumulated)) < 1e-11


def _other_model_on_one_rank(what: str) -> str:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    if torch.distributed.get_rank() == 2:
        if what == "shape":
            model[0] = nn.Conv2d(3, 5, 3)
        elif what == "one more":
            model.append(nn.PReLU())
        elif what == "dtype":
            model[1].double()
        else:
            model[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    try:
        ff.parallelize(model, mesh(1, 3))
    except ff.FullframeError as error:
        return str(error)
    return ""


def test_ranks_with_other_models_are_told_before_anything_is_sent() -> None:
    for what, told in (
        ("shape", "where rank 0 has 0.weight (4, 3, 3, 3) float32, trained, rank 2 has 0.weight (5, 3, 3, 3) float32,"),
        ("one more", "where rank 0 has 1.running_mean (4,) float32, rank 2 has 2.weight (1,) float32, trained; build"),
        ("dtype", "where rank 0 has 1.weight (4,) float32, trained, rank 2 has 1.weight (4,) float64, trained; build"),
        ("frozen", "where rank 0 has 0.bias (4,) float32, trained, rank 2 has 0.bias (4,) float32; build the same"),
    ):
        for said in rank_group(3).run(_other_model_on_one_rank, what):
            assert told in said


class Odd(nn.Module):
    """What DDP alone would not send by NCCL or could not write: 16-bit integers, and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).t())  # its memory has another order
        self.register_buffer("counts", torch.full((3,), 7 + torch.distributed.get_rank(), dtype=torch.int16))
        self.register_buffer("scale", torch.full((1,), 2.0 + torch.distributed.get_rank()).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight.sum() * self.scale.sum()).sum() + self.counts.sum()  # type: ignore[operator]


def _odd() -> tuple[list[float], float]:
    torch.manual_seed(torch.distributed.get_rank())
    model = Odd()
    wrapped = ff.parallelize(model, mesh(1, 2))
    wrapped(ff.shard(torch.ones(1, 1, 4, 6), mesh(1, 2))).backward()
    values = [float(model.counts[0]), *model.scale.tolist(), *model.weight.flatten().tolist()]  # type: ignore[index, operator]
    return values, float(model.weight.grad[0, 0])  # type: ignore[index]


def test_odd_buffers_and_parameters_are_the_first_ranks() -> None:
    first, second = rank_group(2).run(_odd)
    assert first == second
    assert first[0][:5] == [7.0, 2.0, 2.0, 2.0, 2.0] and first[1] == 24 * 8.0


def _whole() -> tuple[list[str], list[str], list[str], float]:
    """Warnings of two steps with a whole image, of evaluation with one, of a step with a split one; the difference."""
    said = []
    on = mesh(1, 2)
    plain = _net()
    _loss(plain(_image())).backward()
    for image, evaluated in ((_image(), False), (_image(), True), (ff.shard(_image(), on), False)):
        model = ff.parallelize(_net(), on, find_unused_parameters=True).train(not evaluated)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                _loss(model(image)).backward()
        said.append([str(each.message) for each in caught if "not split" in str(each.message)])
        if len(said) == 1:
            worst = _worst(plain, model.module)
    return (*said, worst)  # type: ignore[return-value]


def test_images_that_come_in_whole_are_told_once() -> None:
    for whole, evaluated, split, worst in rank_group(2).run(_whole):
        assert len(whole) == 1 and "the model got an image (2, 3, 26, 38) that is not split" in whole[0]
        assert "2 ranks" in whole[0] and "ff.ShardedLoader" in whole[0] and worst < 1e-12
        assert evaluated == split == []


def _copied(height: int, width: int) -> float:
    """A teacher that follows by a moving average, then trains on its own; in one process and split."""
    found = []
    for on in (None, mesh(height, width)):
        x = _image() if on is None else ff.shard(_image(), on)
        student = _net() if on is None else ff.parallelize(_net(), on, find_unused_parameters=True)
        teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(2):
            F.mse_loss(student(x), teacher(x).detach().sin()).backward()
            optimizer.step()
            optimizer.zero_grad()
            teacher.update_parameters(student)
        again = copy.deepcopy(teacher.module)
        assert not again.training
        _loss(again(x)).backward()
        found += [[*student.parameters(), *teacher.parameters(), *(p.grad for p in again.parameters())]]
    return max(relative(a, b) for a, b in zip(*found, strict=True) if a is not None)


def test_a_copy_is_a_parallel_model_of_its_own() -> None:
    for height, width in [(1, 2), (2, 2)]:
        assert max(rank_group(height * width).run(_copied, height, width)) < 1e-11


def _cannot(what: str) -> None:
    if what == "lazy":
        ff.parallelize(nn.Sequential(nn.LazyConv2d(4, 3)), mesh(1, 2))
    if what == "averaged twice":
        nn.parallel.DistributedDataParallel(ff.parallelize(_net(), mesh(1, 2)))(_image())
    if what == "traced":
        torch.jit.trace(ff.parallelize(_net(), mesh(1, 2)), _image())
    if what == "exported":
        torch.export.export(ff.parallelize(_net(), mesh(1, 2)), (_image(),), strict=False)
    model = ff.parallelize(_net(), mesh(1, 2), shard_parameters=True)
    spread = type(model)._replicate_for_data_parallel
    {"sharded": copy.deepcopy, "pickled": pickle.dumps, "spread": spread}[what](model)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("lazy", "0.weight, 0.bias are lazy"),
        ("sharded", "copy the plain model"),
        ("pickled", "save model.module"),
        ("traced", "give model.module and whole tensors"),
        ("exported", "give model.module and whole tensors"),
        ("spread", "start one process for each GPU"),
        ("averaged twice", "a DistributedDataParallel is around the model"),
    ],
)
def test_models_that_cannot_be_copied_or_wrapped_or_have_no_shape_are_told(what: str, told: str) -> None:
    with pytest.raises(RankFailure, match=told):
        rank_group(2).run(_cannot, what)


class Detector(nn.Module):
    """With a loss of its own, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), Block(6), Block(6))
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("anchors", torch.linspace(0.1, 1, 6)[:, None, None])
        self.epoch, self.steps = 0, 0
        self.stages, self.run, self.buckets = [1, 2], "day", (3,)  # names that timm's models and unrolled ones have

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image) * self.scale * self.anchors  # type: ignore[no-any-return]

    def loss(self, batch: dict[str, Tensor], weight: float = 1.0) -> dict[str, Tensor]:
        self.steps += 1
        found = self(batch["image"])
        boxes = (found - batch["target"]).square().mean() * (weight + self.epoch)
        return {"boxes": boxes, "scale": (found * self.scale).tanh().mean()}

    def shape(self) -> tuple[int, ...]:
        return tuple(self.anchors.shape)  # type: ignore[arg-type]


def _by_methods(height: int, width: int, shard_parameters: bool) -> tuple[float, int, bool]:
    """Steps by a model's own loss, in one process and on replicas of a mesh; the largest difference."""
    on = mesh(height, width)
    replicas, replica = torch.distributed.get_world_size() // (height * width), on.get_local_rank("data")
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(replicas, 2, 3, 13, 18, dtype=torch.float64, generator=generator)
    found = []
    for parallel in (False, True):
        torch.manual_seed(1)
        model: nn.Module = Detector().double()
        if parallel:
            model = ff.parallelize(model, on, shard_parameters=shard_parameters)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in range(3):
            model.epoch = epoch  # type: ignore[assignment]
            for each in images[replica : replica + 1] if parallel else images:
                batch = {"image": each, "target": each.repeat(1, 2, 1, 1).sin()}
                batch = {key: ff.shard(value, on) for key, value in batch.items()} if parallel else batch
                losses = model.loss(batch, weight=0.5)  # type: ignore[operator]
                ((losses["boxes"] + losses["scale"]) / (1 if parallel else replicas)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (model.stages, model.run, model.buckets) == ([1, 2], "day", (3,))
        assert model.shape() == (6, 1, 1) and model.anchors.shape == (6, 1, 1)  # type: ignore[operator]
        values = [p.detach() for p in model.parameters()]
        found.append([v.full_tensor() if hasattr(v, "full_tensor") else v for v in values])
    worst = max(relative(a, b) for a, b in zip(*found, strict=True))
    return worst, model.module.steps, hasattr(model, "boxes")  # type: ignore[union-attr, return-value]


def _by_parts(height: int, width: int) -> float:
    """Gradients of a loss that calls parts of the model one by one, in one process and on replicas."""
    on = mesh(height, width)
    replicas, replica = torch.distributed.get_world_size() // (height * width), on.get_local_rank("data")
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(replicas, 2, 3, 13, 18, dtype=torch.float64, generator=generator)
    found = []
    for parallel in (False, True):
        torch.manual_seed(1)
        model: Any = Detector().double()
        if parallel:
            model = ff.parallelize(model, on)
        for image in images[replica : replica + 1] if parallel else images:
            features = model.net[:3](ff.shard(image, on) if parallel else image)
            pooled = model.net[4](features * model.scale).mean((2, 3))
            ((model.net[3](features).square().mean() + pooled.tanh().sum()) / (1 if parallel else replicas)).backward()
        found.append([p.grad for p in model.parameters()])
    # The bias in front of the batch norm has a gradient of rounding alone.
    return max(relative(a, b, 1e-3) for a, b in zip(*found, strict=True))


def test_parts_of_the_model_may_be_called_by_themselves() -> None:
    for ranks, height, width in [(2, 1, 2), (2, 1, 1), (4, 2, 1), (4, 2, 2)]:
        assert max(rank_group(ranks).run(_by_parts, height, width)) < 1e-11


@pytest.mark.parametrize("shard_parameters", [False, True])
def test_methods_and_attributes_are_those_of_the_model(shard_parameters: bool) -> None:
    for ranks, height, width in [(1, 1, 1), (2, 1, 2), (2, 1, 1), (4, 2, 1)]:
        for worst, steps, has_boxes in rank_group(ranks).run(_by_methods, height, width, shard_parameters):
            assert worst < 1e-11 and steps == 3 and not has_boxes


class Background(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.register_buffer("seen", torch.zeros(1, 3, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.5 * self.seen + x.detach()
        return self.conv(x - self.seen)  # type: ignore[no-any-return]


def _background(height: int, width: int, copied: bool) -> None:
    on = mesh(height, width)
    model = ff.parallelize(Background(), on)
    for _ in range(2):
        model(ff.shard(torch.ones(1, 3, 4, 6), on))
    if copied:
        copy.deepcopy(model)


def test_a_buffer_that_is_split_is_for_one_replica_alone() -> None:
    rank_group(2).run(_background, 1, 2, False)
    for ranks, copied in ((2, True), (4, False)):
        with pytest.raises(RankFailure, match="the buffer seen of Background is a split tensor, which replicas"):
            rank_group(ranks).run(_background, 1, 2, copied)


class Held(nn.Module):
    """Stays in forward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.entered, self.let_go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.let_go.wait(60)
        return self.conv(x)  # type: ignore[no-any-return]


def _in_threads(at_once: bool) -> float:
    """The model in a thread, and a mean in this one while it runs, or after it."""
    on = mesh(1, 2)
    model, x, found = Held().double(), ff.shard(_image(), on), list[Tensor]()
    parallel: Any = ff.parallelize(model, on)
    thread = threading.Thread(target=lambda: found.append(parallel(x).detach().full()), daemon=True)
    if not at_once:
        model.let_go.set()
    thread.start()
    assert model.entered.wait(60)
    try:
        if at_once:
            x.mean()
    finally:
        model.let_go.set()
        thread.join()
    return relative(model.conv(_image()).detach(), found[0])


def test_two_threads_at_once_are_refused_and_one_after_another_are_not() -> None:
    with pytest.raises(RankFailure, match="two threads use split tensors at once") as caught:
        rank_group(2).run(_in_threads, True)
    assert [name for _, name, *_ in caught.value.errors] == ["DivergenceError"] * 2
    assert max(rank_group(2).run(_in_threads, False)) < 1e-12
