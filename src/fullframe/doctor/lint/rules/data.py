"""FF17x: loaders that starve the device, and data that not all ranks see."""

import ast
from collections.abc import Callable, Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind
from fullframe.doctor.lint.roles import Role, prepared
from fullframe.doctor.lint.rule import ERROR, NOTE, WARNING, Found, is_false, is_true, rule, said
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone


def loaders(training: Training) -> Iterator[Call]:
    """Calls that make a torch DataLoader."""
    for call in training.program.calls("DataLoader", "StatefulDataLoader"):
        if call.value.path.startswith(("torch.utils.data", "torchdata.")):
            yield call


def loops_over(training: Training, loader: Value) -> Iterator[Frame]:
    """Loops that take their elements from the loader, through `enumerate`, a progress bar or a wrapper."""
    for frame in training.program.frames:
        if frame.kind is FrameKind.LOOP and frame.value is not None and _comes_from(frame.value, loader):
            yield frame


def _comes_from(iterable: Value, loader: Value) -> bool:
    stack, seen = [iterable], set[int]()
    while stack and len(seen) < 60:
        value = stack.pop()
        if value is loader:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            inner = prepared(value)
            stack += value.inputs if inner is None else (inner,)
    return False


def _is_trained_with(training: Training, loader: Value) -> bool:
    return any(any(training.backwards_in(loop)) for loop in loops_over(training, loader))


def _is_open(call: Call) -> bool:
    """Whether options may hide in a `**` or a `*`."""
    return "**" in call.value.keywords or any(a.text == "starred" for a in call.value.arguments)


@rule(
    "FF171", NOTE, "loader without workers",
    "Samples are read and decoded by the training process itself, while the device waits.",
    "Pass `num_workers=` (a few for each device) and `persistent_workers=True`.",
    """
      from torch.utils.data import DataLoader

    - loader = DataLoader(data, batch_size=8, shuffle=True)
    + loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=4, persistent_workers=True)
      for x, y in loader:
          F.cross_entropy(model(x.to(device)), y.to(device)).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def no_workers(training: Training) -> Iterator[Found]:
    """A training loop reads from a loader with no `num_workers` or 0, and moves what it gives to a device."""
    for call in loaders(training):
        workers = call.value.argument(5, "num_workers")
        has_none = (workers is None or workers.constant == 0) and not _is_open(call) and not _is_in_memory(call)
        if has_none and _is_trained_with(training, call.value) and _is_moved(training, call.value, is_device):
            yield Found(call.node, "the training process reads the samples itself")


def _is_in_memory(call: Call) -> bool:
    """Whether the data set is made of tensors that are in memory already."""
    data = call.value.argument(0, "dataset")
    return data is not None and any(v.path.endswith(".TensorDataset") for v in cone([data], 40))


@rule(
    "FF172", NOTE, "loader without pinned memory",
    "A copy to the GPU from pageable memory goes through a second buffer, and cannot run beside computation.",
    "Pass `pin_memory=True`, and `non_blocking=True` to the copies.",
    """
      from torch.utils.data import DataLoader

    - loader = DataLoader(data, num_workers=4)
    + loader = DataLoader(data, num_workers=4, pin_memory=True)
      for x, y in loader:
    -     F.cross_entropy(model(x.cuda()), y.cuda()).backward()
    +     F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def not_pinned(training: Training) -> Iterator[Found]:
    """What a loader without `pin_memory` gives is moved to a GPU in a training loop."""
    for call in loaders(training):
        pinned = call.value.argument(7, "pin_memory")
        if _is_open(call) or (pinned is not None and pinned.constant is not False):
            continue
        if _is_trained_with(training, call.value) and _is_moved(training, call.value, is_gpu):
            yield Found(call.node, "its batches go to a GPU from pageable memory")


def _is_moved(training: Training, loader: Value, is_meant: Callable[[Value], bool]) -> bool:
    calls = (call for call in training.program.calls("cuda", "to") if call.value.receiver is not None)
    return any(loader in cone([call.receiver], 60) and _moves_to(call, is_meant) for call in calls)


def _moves_to(move: Call, is_meant: Callable[[Value], bool]) -> bool:
    place = move.value.argument(0, "device")
    return move.value.method == "cuda" or (place is not None and is_meant(place))


def is_device(place: Value) -> bool:
    """Whether a device is named, be it known which or not."""
    is_named = place.text.lower().endswith("device") or place.path == "torch.device"
    return is_gpu(place) or (is_named and not any(v.constant == "cpu" for v in place.inputs))


def is_gpu(place: Value) -> bool:
    """Whether it is, or may be, a GPU that is named."""
    return any(isinstance(v.constant, str) and v.constant.startswith("cuda") for v in cone([place], 12))


@rule(
    "FF173", NOTE, "workers are started again for every epoch",
    "Each epoch forks the workers, imports and opens everything anew, and the device waits for the first batch.",
    "Pass `persistent_workers=True`.",
    """
      from torch.utils.data import DataLoader

    - loader = DataLoader(data, num_workers=4)
    + loader = DataLoader(data, num_workers=4, persistent_workers=True)
      for epoch in range(9):
          for x, y in loader:
              F.cross_entropy(model(x), y).backward()
              optimizer.step()
              optimizer.zero_grad()
    """,
)  # fmt: skip
def not_persistent(training: Training) -> Iterator[Found]:
    """A loader with workers that an inner loop reads from."""
    for call in loaders(training):
        workers = call.value.argument(5, "num_workers")
        has_workers = workers is not None and isinstance(workers.constant, int) and workers.constant > 0
        if not has_workers or "persistent_workers" in call.value.keywords or _is_open(call):
            continue
        for loop in loops_over(training, call.value):
            if loop.parent is not None and any(training.backwards_in(loop)) and _epochs(loop, call):
                yield Found(call.node, "its workers end and start with every epoch")


def _epochs(loop: Frame, call: Call) -> Frame | None:
    """The loop around `loop` that the loader is made outside of."""
    outer = loop.parent.innermost(FrameKind.LOOP) if loop.parent is not None else None
    return outer if outer is not None and not call.frame.inside(outer) else None


@rule(
    "FF174", ERROR, "shuffle beside a sampler",
    "A sampler decides the order itself; torch refuses both with a ValueError.",
    "Leave `shuffle=True` out; DistributedSampler shuffles by itself.",
    """
      from torch.utils.data import DataLoader, DistributedSampler

    - loader = DataLoader(data, sampler=DistributedSampler(data), shuffle=True)
    + loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=True))
    """,
)  # fmt: skip
def shuffled_twice(training: Training) -> Iterator[Found]:
    """`shuffle=True` and a sampler that is not None in one call."""
    for call in loaders(training):
        for name, position in (("sampler", 3), ("batch_sampler", 4)):
            sampler = call.value.argument(position, name)
            is_given = sampler is not None and sampler.origin in (Origin.CALL, Origin.INSTANCE)
            if is_given and is_true(call.value.argument(2, "shuffle")):
                yield Found(call.node, f"shuffle=True and {name} exclude each other")


@rule(
    "FF175", WARNING, "DistributedSampler without set_epoch",
    "The order is drawn from the epoch's number; without it every epoch has the order of the first.",
    "Call `sampler.set_epoch(epoch)` at the start of every epoch.",
    """
      from torch.utils.data import DataLoader, DistributedSampler

      sampler = DistributedSampler(data)
      loader = DataLoader(data, sampler=sampler, num_workers=4, persistent_workers=True)
      for epoch in range(9):
    +     sampler.set_epoch(epoch)
          for x, y in loader:
              F.cross_entropy(model(x), y).backward()
              optimizer.step()
              optimizer.zero_grad()
    """,
)  # fmt: skip
def same_order(training: Training) -> Iterator[Found]:
    """A loader with a shuffling DistributedSampler, read in an inner loop, and no `set_epoch` in the file."""
    if any(training.program.calls("set_epoch")):
        return
    for call in loaders(training):
        sampler = call.value.argument(3, "sampler")
        if sampler is None or not training.is_a(sampler, Role.SAMPLER):
            continue
        shuffles = any(not is_false(m.keywords.get("shuffle")) for m in sampler.members())
        for loop in loops_over(training, call.value) if shuffles else ():
            if any(training.backwards_in(loop)) and _epochs(loop, call) is not None:
                yield Found(call.node, "every epoch has the same order: nothing calls set_epoch")


@rule(
    "FF176", ERROR, "every rank reads all samples",
    "Without a DistributedSampler each rank draws from the whole data set: an epoch is as many times as long as there "
    "are ranks.",
    "Pass `sampler=DistributedSampler(dataset)`.",
    """
      from torch.nn.parallel import DistributedDataParallel
    - from torch.utils.data import DataLoader
    + from torch.utils.data import DataLoader, DistributedSampler

      model = DistributedDataParallel(model)
    - loader = DataLoader(data, shuffle=True, num_workers=4)
    + loader = DataLoader(data, sampler=DistributedSampler(data), num_workers=4)
      for x, y in loader:
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def not_distributed(training: Training) -> Iterator[Found]:
    """A DistributedDataParallel model is trained from a loader that was given no sampler."""
    words = ("split_dataset_by_node", "prepare", "distributed", "shard", "Subset", "random_split")
    paths = training.program.paths.keys() - {"torch.distributed"}  # which divides nothing
    if any(path.rpartition(".")[2] in words for path in paths) or any(training.program.calls(*words)):
        return
    for call in loaders(training):
        given = call.value.keywords
        data = call.value.argument(0, "dataset")
        if {"sampler", "batch_sampler"} & set(given) or len(call.value.arguments) > 3 or _is_open(call) or data is None:
            continue
        if any("rank" in v.text.lower() for v in cone([data], 100)) or _iterates(data):
            continue
        sampled = [c.value for c in loaders(training) if {"sampler", "batch_sampler"} & set(c.value.keywords)]
        for loop in loops_over(training, call.value):
            if any(_comes_from(loop.value, other) for other in sampled if loop.value is not None):
                continue  # another branch has one
            used = {id(v) for b in training.backwards_in(loop) for v in cone(b.losses)}
            calls = (c.value for c in training.model_calls_in(loop) if id(c.value) in used)
            if any(training.is_a(call.function, Role.PARALLEL) for call in calls):
                yield Found(call.node, "no sampler divides the samples among the ranks")


def _iterates(data: Value) -> bool:
    definition = data.definition
    return definition is not None and any("Iterable" in path for path in definition.base_paths())


@rule(
    "FF177", ERROR, "a GPU is used in a data set",
    "A worker is a forked process and cannot use the parent's GPU: it fails with num_workers > 0, and is slow without.",
    "Give CPU tensors and move whole batches in the training loop.",
    """
      class Data(torch.utils.data.Dataset):
          def __getitem__(self, index):
    -         return torch.as_tensor(self.images[index]).cuda()
    +         return torch.as_tensor(self.images[index])
    """,
)  # fmt: skip
def gpu_in_data(training: Training) -> Iterator[Found]:
    """`.cuda()` or `.to("cuda")` in `__getitem__` of a torch data set."""
    for call in training.program.calls("cuda", "to"):
        function = call.frame.innermost(FrameKind.FUNCTION)
        definition = function.definition if function is not None else None
        if definition is None or definition.name != "__getitem__" or definition.owner is None:
            continue
        if not any(p.startswith("torch.utils.data.") for p in definition.owner.base_paths()):
            continue
        if call.value.receiver is not None and _moves_to(call, is_gpu):
            yield Found(call.node, f"{said(call.node)} runs in the loader's workers")


@rule(
    "FF178", WARNING, "iterator made anew for each batch",
    "`next(iter(loader))` starts the loader from its beginning, workers included, and reads one batch of it.",
    "Make the iterator before the loop, and again where it ends.",
    """
      from torch.utils.data import DataLoader

      loader = DataLoader(data, num_workers=4)
    + batches = iter(loader)
      for step in range(1000):
    -     x, y = next(iter(loader))
    +     x, y = next(batches)
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def begun_again(training: Training) -> Iterator[Found]:
    """`next(iter(loader))` in a training loop, where the loader is made outside of it."""
    for call in training.program.calls("next"):
        given = call.value.arguments[0] if call.value.arguments else None
        loop = training.in_loop(call.frame)
        if given is None or given.path != "builtins.iter" or loop is None or not call.frame.is_always_run_in(loop):
            continue
        if isinstance(call.node.args[0], ast.Call) and given.arguments and given.arguments[0].born <= loop.start:
            yield Found(call.node, f"{said(call.node)} starts from the first batch each time")


@rule(
    "FF179", ERROR, "all workers draw the same numbers",
    "A worker_init_fn that sets a fixed seed gives every worker, in every epoch and on every rank, the same random "
    "augmentations.",
    "Leave it out: torch seeds random and numpy in each worker by itself; or seed by `torch.initial_seed() % 2**32`.",
    """
    - import numpy as np
      from torch.utils.data import DataLoader

    - loader = DataLoader(data, num_workers=4, worker_init_fn=lambda worker: np.random.seed(42))
    + loader = DataLoader(data, num_workers=4)
    """,
)  # fmt: skip
def seeded_alike(training: Training) -> Iterator[Found]:
    """A function of this file that is given as worker_init_fn calls `seed` or `manual_seed` with a literal number."""
    for call in loaders(training):
        given = call.value.argument(9, "worker_init_fn")
        for member in given.members() if given is not None else ():
            body = member.definition.node if member.definition is not None else ast.Module([], [])
            for node in ast.walk(body):
                if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                    continue
                if isinstance(node.func, ast.Attribute) and node.func.attr in ("seed", "manual_seed"):
                    yield Found(node, f"{said(node)} is the same in every worker")


RULES = (
    no_workers, not_pinned, not_persistent, shuffled_twice, same_order, not_distributed, gpu_in_data, begun_again,
    seeded_alike,
)  # fmt: skip
