"""Training loops with one fault each, and sound ones: what users write, as small as it can be.

Each is called on every rank of a group and trains a few steps; its name is in `FAULTS` with the code that names it.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

STEPS = 3


class Network(nn.Module):
    """A convolution, a norm, a dropout and a head, for (N, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


def data(samples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(2, (samples,), generator=generator)
    )


def sound_loader(samples: int = 64, batch: int = 4) -> "DataLoader[Any]":
    dataset = data(samples)
    return DataLoader(dataset, batch, sampler=DistributedSampler(dataset), drop_last=True)


def made(seed: int = 0, model: Callable[[], nn.Module] = Network, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The plain model and its DDP."""
    torch.manual_seed(seed)
    plain = model()
    return plain, DistributedDataParallel(plain, **options)


def train(
    model: nn.Module,
    loader: Any = None,
    optimizer: Any = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    clear: bool = True,
    after: Callable[[Any, Tensor], None] = lambda optimizer, loss: None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """The loop that the faults share, with places to put them."""
    loader = sound_loader() if loader is None else loader
    optimizer = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    for image, label in endless(loader):
        found = loss(model(image), label)
        found.backward()
        before()
        optimizer.step()
        after(optimizer, found)
        if clear:
            optimizer.zero_grad()


def endless(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def sound() -> None:
    train(made()[1])


def sound_without_collection() -> None:
    """What is made before the loop is taken out of the collector's sight, as fast loops have it."""
    model = made()[1]
    optimizer = SGD(model.parameters(), lr=0.1)
    gc.freeze()
    try:
        train(model, optimizer=optimizer)
    finally:
        gc.unfreeze()


def sound_with_microbatches() -> None:
    model = made()[1]
    optimizer = Adam(model.parameters(), lr=1e-2)
    for number, (image, label) in enumerate(endless(sound_loader())):
        with model.no_sync() if number % 2 == 0 else nullcontext():
            (F.cross_entropy(model(image), label) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def sound_with_scaler() -> None:
    model = made()[1]
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=128.0)
    for image, label in endless(sound_loader()):
        scaler.scale(F.cross_entropy(model(image), label)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def sound_adversarial() -> None:
    """Two models and two optimizers, each clearing its own gradients before its own backward."""
    generator, critic = made()[1], made(1)[1]
    first, second = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    for image, label in endless(sound_loader()):
        first.zero_grad()
        (F.cross_entropy(generator(image), label) + critic(image).mean()).backward()
        first.step()
        second.zero_grad()
        F.cross_entropy(critic(image), label).backward()
        second.step()


def sound_frozen_generator() -> None:
    """In train mode without gradients for the critic, whose step sends none back to it."""
    generator, critic = made()[1], made(1)[1]
    first, second = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    for image, label in endless(sound_loader()):
        with torch.no_grad():
            factor = generator(image).mean()
        second.zero_grad()
        F.cross_entropy(critic(factor * image), label).backward()
        second.step()
        first.zero_grad()
        F.cross_entropy(generator(image), label).backward()
        first.step()


def sound_critic() -> None:
    """The generator's optimizer steps once in five, and its loss alone is scaled; the critic's gives it gradients."""
    generator, critic = made()[1], made(1)[1]
    first, second = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for number, (image, label) in enumerate(endless(sound_loader())):
        second.zero_grad()
        (F.cross_entropy(critic(image), label) + generator(image).square().mean()).backward()
        second.step()
        if number % 5 == 2:
            first.zero_grad()
            scaler.scale(F.cross_entropy(generator(image), label)).backward()
            scaler.step(first)
            scaler.update()


def sound_with_attack() -> None:
    """Trained on images that are made in eval mode, by gradients that the loop asks for itself."""
    model = made()[1]
    optimizer = SGD(model.parameters(), lr=0.1)
    for image, label in endless(sound_loader()):
        model.eval()
        image = image.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model.module(image), label), image)
        model.train()
        F.cross_entropy(model((image + 0.1 * gradient.sign()).detach()), label).backward()
        optimizer.step()
        optimizer.zero_grad()


def sound_with_two_models() -> None:
    """One scaler, and both passes before both steps."""
    models = made()[1], made(1)[1]
    optimizers, scaler = [SGD(model.parameters(), lr=0.1) for model in models], torch.amp.GradScaler("cpu", 128.0)
    for image, label in endless(sound_loader()):
        for loss in [scaler.scale(F.cross_entropy(model(image), label)) for model in models]:
            loss.backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def sound_with_losses_together() -> None:
    """One pass for both losses, which an iterator gives."""
    models = made()[1], made(1)[1]
    optimizer = SGD([p for model in models for p in model.parameters()], lr=0.1)
    for image, label in endless(sound_loader()):
        torch.autograd.backward(F.cross_entropy(model(image), label) for model in models)
        optimizer.step()
        optimizer.zero_grad()


def sound_with_closure() -> None:
    """Several passes a step, each from other weights."""
    model = made()[1]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for image, label in endless(sound_loader()):

        def loss(image: Tensor = image, label: Tensor = label) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            found = F.cross_entropy(model(image), label)
            found.backward()
            return found

        optimizer.step(loss)


def sound_with_evaluation() -> None:
    plain, model = made()

    def evaluate(optimizer: Any, loss: Tensor) -> None:
        model.eval()
        with torch.no_grad():
            for image, _ in DataLoader(data(8), 4):
                plain(image)
        model.train()

    train(model, after=evaluate)


def no_wrapper() -> None:
    torch.manual_seed(0)
    train(Network())


def past_the_wrapper() -> None:
    train(made()[0])


def no_sync_always() -> None:
    model = made()[1]
    with model.no_sync():
        train(model)


def other_seeds() -> None:
    torch.manual_seed(dist.get_rank())
    model = Network()

    def averaged() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    train(model, before=averaged)


def touched_weights() -> None:
    plain, model = made()

    def noise(optimizer: Any, loss: Tensor) -> None:
        with torch.no_grad():
            plain.head.weight += 1e-3 * dist.get_rank()

    train(model, after=noise)


def local_rates() -> None:
    model = made()[1]
    optimizer = SGD(model.parameters(), lr=0.1)

    def plateau(optimizer: Any, loss: Tensor) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5 if dist.get_rank() else 1.0

    train(model, optimizer=optimizer, after=plateau)


def no_distributed_sampler() -> None:
    train(made()[1], DataLoader(data(), 4, shuffle=True))


def same_stream() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from data()

    train(made()[1], DataLoader(Stream(), 4))


def wrong_replicas() -> None:
    dataset = data()
    train(made()[1], DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 4, dist.get_rank())))


def no_set_epoch() -> None:
    dataset = data(16)
    model, loader = made()[1], DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
    optimizer = SGD(model.parameters(), lr=0.1)
    while True:
        for image, label in loader:
            F.cross_entropy(model(image), label).backward()
            optimizer.step()
            optimizer.zero_grad()


def uneven_batches() -> None:
    dataset = data()
    train(made()[1], DataLoader(dataset, 4 + dist.get_rank(), sampler=DistributedSampler(dataset)))


def detached_loss() -> None:
    train(made()[1], loss=lambda output, label: F.cross_entropy(output.detach(), label))


class WithUnused(Network):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


def unused_layer() -> None:
    train(made(model=WithUnused)[1])


def frozen_layer() -> None:
    torch.manual_seed(0)
    plain = Network()
    plain.conv.requires_grad_(False)
    train(DistributedDataParallel(plain), optimizer=SGD(plain.parameters(), lr=0.1))


def frozen_part(freeze: Callable[[Network], None], after: Callable[[Network], None] = lambda plain: None) -> None:
    torch.manual_seed(0)
    plain = Network()
    freeze(plain)
    model = DistributedDataParallel(plain)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    train(model, optimizer=SGD(trained, lr=0.1), after=lambda optimizer, loss: after(plain))


def frozen_norm() -> None:
    def freeze(plain: Network) -> None:
        plain.conv.requires_grad_(False)
        plain.norm.requires_grad_(False)

    frozen_part(freeze)


def sound_frozen_norm() -> None:
    def freeze(plain: Network) -> None:
        plain.conv.requires_grad_(False)
        plain.norm.requires_grad_(False).eval()

    frozen_part(freeze)


def sound_momentum_encoder() -> None:
    def freeze(plain: Network) -> None:
        plain.momentum = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False)
        plain.register_forward_hook(lambda module, inputs, output: output + 0 * plain.momentum(inputs[0]).mean())

    def move(plain: Network) -> None:
        plain.momentum[0].weight.lerp_(plain.conv.weight.detach(), 1e-3)

    frozen_part(freeze, move)


def late_head() -> None:
    """The optimizer was made before the head was replaced."""
    torch.manual_seed(0)
    plain = Network()
    optimizer = SGD(plain.parameters(), lr=0.1)
    plain.head = nn.Linear(4, 2)
    train(DistributedDataParallel(plain), optimizer=optimizer)


class WithDeadBranch(WithUnused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.relu(self.spare(x.mean((2, 3)).repeat(1, 2)[:, :4]) - 1e6).mean()


def dead_branch() -> None:
    train(made(model=WithDeadBranch)[1])


def rate_of_zero() -> None:
    model = made()[1]
    train(model, optimizer=SGD(model.parameters(), lr=0.0))


def bf16_weights() -> None:
    model = made(model=lambda: Network().bfloat16())[1]

    def loss(output: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), label)

    cast = (((image.bfloat16(), label)) for image, label in endless(sound_loader()))
    optimizer = SGD(model.parameters(), lr=1e-6)
    for image, label in cast:
        loss(model(image), label).backward()
        optimizer.step()
        optimizer.zero_grad()


def never_cleared() -> None:
    train(made()[1], clear=False)


def carried_graph() -> None:
    """Of a single layer, which torch lets through: its weights are not kept for backward."""
    model = made(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))[1]
    optimizer, state = SGD(model.parameters(), lr=1e-3), torch.zeros(())
    for image, label in endless(sound_loader()):
        state = 0.9 * state + F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        state.backward(retain_graph=True)
        optimizer.step()


def kept_losses() -> None:
    history: list[Tensor] = []
    train(made()[1], after=lambda optimizer, loss: history.append(loss))


def summed_loss() -> None:
    total: Any = 0.0
    model = made()[1]
    optimizer = SGD(model.parameters(), lr=0.1)
    for image, label in endless(sound_loader()):
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss


def scaled_loop(order: Callable[[Any, Any, nn.Module], None], scale: float = 128.0, blow: float = 1.0) -> None:
    model = made()[1]
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=scale)
    for image, label in endless(sound_loader()):
        scaler.scale(F.cross_entropy(model(image), label) * blow).backward()
        order(scaler, optimizer, model)
        optimizer.zero_grad()


def bare_step() -> None:
    scaled_loop(lambda scaler, optimizer, model: (optimizer.step(), scaler.update(128.0)))


def clip_scaled() -> None:
    def order(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    scaled_loop(order)


def no_scaler_update() -> None:
    scaled_loop(lambda scaler, optimizer, model: scaler.step(optimizer))


def two_scaler_updates() -> None:
    scaled_loop(lambda scaler, optimizer, model: (scaler.step(optimizer), scaler.update(), scaler.update(128.0)))


def falling_scale() -> None:
    scaled_loop(lambda scaler, optimizer, model: (scaler.step(optimizer), scaler.update()), 2.0**100, 2.0**60)


def not_finite() -> None:
    train(made()[1], loss=lambda output, label: F.cross_entropy(output, label) * float("inf"))


def slow_loader() -> None:
    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            import time

            time.sleep(0.04)  # as long as a step on a busy machine, with the four of a batch
            return torch.randn(3, 8, 8), index % 2

    train(made()[1], DataLoader(Slow(), 4, sampler=DistributedSampler(Slow())))


def small_statistics() -> None:
    class Head(Network):
        def __init__(self) -> None:
            super().__init__()
            self.tail = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(super().forward(x))

    train(made(model=Head)[1])


def evaluation_in_train_mode() -> None:
    plain, model = made()

    def evaluate(optimizer: Any, loss: Tensor) -> None:
        with torch.no_grad():
            plain(data(4)[0][0][None])

    train(model, after=evaluate)


def evaluation_with_graph() -> None:
    plain, model = made()

    def evaluate(optimizer: Any, loss: Tensor) -> None:
        model.eval()
        for image, _ in DataLoader(data(8), 4):
            plain(image)
        model.train()

    train(model, after=evaluate)


def recomputed_norm() -> None:
    class Recomputed(Network):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda x: F.relu(self.norm(self.conv(x))), x, use_reentrant=False)
            return self.head(x.mean((2, 3)))

    train(made(model=Recomputed)[1])


def left_in_eval_mode() -> None:
    model = made()[1]
    model.eval()
    train(model)


def sent_every_microbatch() -> None:
    model = made()[1]
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, (image, label) in enumerate(endless(sound_loader())):
        (F.cross_entropy(model(image), label) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def sought_in_vain() -> None:
    train(made(find_unused_parameters=True)[1])


FAULTS: dict[Callable[[], None], str] = {
    no_wrapper: "FF301",
    past_the_wrapper: "FF301",
    no_sync_always: "FF301",
    other_seeds: "FF302",
    touched_weights: "FF303",
    local_rates: "FF304",
    no_distributed_sampler: "FF305",
    same_stream: "FF305",
    wrong_replicas: "FF306",
    no_set_epoch: "FF307",
    uneven_batches: "FF309",
    detached_loss: "FF310",
    unused_layer: "FF311",
    frozen_layer: "FF312",
    late_head: "FF313",
    dead_branch: "FF314",
    rate_of_zero: "FF315",
    bf16_weights: "FF315",
    never_cleared: "FF316",
    carried_graph: "FF317",
    kept_losses: "FF318",
    summed_loss: "FF318",
    bare_step: "FF319",
    clip_scaled: "FF320",
    no_scaler_update: "FF321",
    two_scaler_updates: "FF321",
    falling_scale: "FF322",
    not_finite: "FF323",
    slow_loader: "FF324",
    small_statistics: "FF328",
    evaluation_in_train_mode: "FF329",
    evaluation_with_graph: "FF332",
    recomputed_norm: "FF330",
    left_in_eval_mode: "FF331",
    sent_every_microbatch: "FF333",
    sought_in_vain: "FF338",
    frozen_norm: "FF341",
}
GROWING = (carried_graph, kept_losses, summed_loss, falling_scale)  # which show after some steps
SOUND = (
    sound, sound_without_collection, sound_with_microbatches, sound_with_scaler, sound_adversarial, sound_critic,
    sound_with_closure, sound_with_two_models, sound_with_losses_together, sound_with_evaluation, sound_frozen_norm,
    sound_momentum_encoder, sound_frozen_generator, sound_with_attack,
)  # fmt: skip
