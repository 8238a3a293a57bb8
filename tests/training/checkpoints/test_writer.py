"""A checkpoint is whole or not there, is checked before it is believed, runs no code, and all ranks agree on it."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import fullframe as ff
from fullframe.errors import CheckpointError
from fullframe.ranks.randomness import kept_random_state, random_state, set_random_state
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.precision import LossScale
from fullframe.training.checkpoints import safetensors_files as tensor_files
from fullframe.training.checkpoints import writer as checkpoint
from fullframe.training.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from fullframe.training.checkpoints.safetensors_files import record_of
from fullframe.training.checkpoints.writer import Checkpoints, checkpoints_in, newest_checkpoint
from tests.rank_group import rank_group
from tests.training.checkpoints.states import (
    assert_equal,
    damage,
    names_in,
    restored,
    state_at,
    train,
    values_of,
    write,
)
from tests.training.tiny import Frames, Network, recipe

# What is in one


def test_other_tools_read_it(tmp_path):
    state = train(state_at(), 7)
    path = write(state, tmp_path / "new" / "checkpoints")
    assert path == tmp_path / "new" / "checkpoints" / "step-00000007"
    assert names_in(path) == [MANIFEST, "rank-0.safetensors"]
    tensors = load_file(path / "rank-0.safetensors")
    model = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    other = Network()
    other.load_state_dict(model)
    assert_equal(other.state_dict(), state.model.state_dict())
    assert torch.equal(
        tensors["optimizer/exp_avg/head.1.bias"], state.optimizer.state[state.model.head[1].bias]["exp_avg"]
    )
    assert json.loads((path / MANIFEST).read_text())["checkpoint"]["step"] == 7


def test_every_number_comes_back(tmp_path):
    scale = LossScale()
    scale.value, scale._good_steps = 512.0, 77
    model = Network()
    state = train(state_at(model=model, scale=scale, average=ParameterAverage(model, 0.9)), 3)
    state.loader.load_state_dict(state.loader.state_dict() | {"epoch": 2, "position": 1})
    write(state, tmp_path)
    model = Network()
    fresh = state_at(seed=1, model=model, scale=LossScale(), average=ParameterAverage(model, 0.9))
    assert restored(tmp_path, fresh) == []
    assert_equal(values_of(fresh), values_of(state))
    assert fresh.facts() == state.facts() and fresh.step == 3
    assert fresh.scale.value == 512.0 and fresh.scale._good_steps == 77
    assert_equal(values_of(train(fresh, 2)), values_of(train(state, 2)))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw, a tensor as rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
}


class Counting(torch.optim.Optimizer):
    """Keeps a whole number, a float, a flag and nothing beside a tensor, and an option that it changes itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "seen": 0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) * group["betas"][0]
                state["odd"] = not state.get("odd", False)
                state["nothing"] = None
                parameter.sub_(parameter.grad * state["decay"] / (state["count"] + state["odd"] + group["seen"]))


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), Counting], ids=[*OPTIMIZERS, "counting"])
def test_every_optimizer_goes_on_to_the_last_bit(make, tmp_path):
    whole = train(state_at(optimizer=make), 4)
    write(train(state_at(optimizer=make), 2), tmp_path)
    parts = state_at(seed=1, optimizer=make)
    assert restored(tmp_path, parts) == []
    assert_equal(values_of(train(parts, 2)), values_of(whole))
    for group, expected in zip(parts.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0}


def test_eight_bit_state_goes_on_to_the_last_bit(tmp_path):
    from torchao.optim import AdamW8bit

    def make():
        torch.manual_seed(0)
        return state_at(model=nn.Linear(80, 64), optimizer=AdamW8bit)  # a weight that is quantized, a bias that is not

    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore"):
        whole = train(make(), 4)
        write(train(make(), 2), tmp_path)
        parts = make()
        restored(tmp_path, parts)
        train(parts, 2)
    first, second = (s.optimizer.state[s.model.weight] for s in (whole, parts))
    assert type(first["exp_avg"]).__name__ == "OptimState8bit"
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(first[key].codes, second[key].codes) and torch.equal(first[key].scale, second[key].scale)
    assert torch.equal(whole.model.weight, parts.model.weight)


def test_before_the_first_step(tmp_path):
    write(state_at(0), tmp_path)
    fresh = state_at(seed=1)
    restored(tmp_path, fresh)
    assert fresh.step == 0 and not fresh.optimizer.state
    assert_equal(values_of(train(fresh, 3)), values_of(train(state_at(0), 3)))


def frozen_body():
    model = Network()
    model.body.requires_grad_(False)
    return model


def test_frozen_parameters_and_parameters_without_a_gradient(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        state = state_at(seed=seed, model=frozen_body())
        state.model.head[1].bias.requires_grad_(False)  # in the optimizer, and without a gradient so far
        return state

    state = train(make(0), 2)
    assert len(state.optimizer.state) == 1
    write(state, tmp_path)
    fresh = make(1)
    restored(tmp_path, fresh)
    assert_equal(values_of(fresh), values_of(state))
    assert len(fresh.optimizer.state) == 1
    for one in (state, fresh):
        one.model.head[1].bias.requires_grad_(True)
    assert_equal(values_of(train(fresh, 2)), values_of(train(state, 2)))


def test_extra_state_of_a_module(tmp_path):
    class Counter(nn.Linear):
        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    model = Counter(2, 2)
    model.seen = {"images": [1, 2.5, None], "name": "x"}
    write(state_at(model=model), tmp_path)
    other = Counter(2, 2)
    other.seen = {}
    restored(tmp_path, state_at(model=other))
    assert other.seen == model.seen
    model.seen = object()
    with pytest.raises(CheckpointError, match=r"the model's extra state _extra_state \(object\) cannot be stored, as"):
        write(state_at(model=model), tmp_path)


def test_random_states_come_back():
    def draw():
        return random.random(), float(np.random.normal()), torch.rand(()).item()

    np.random.seed(0)
    np.random.normal()  # leaves a second number in numpy's cache
    state = random_state()
    first = draw()
    set_random_state(state)
    assert draw() == first
    set_random_state(state)
    with kept_random_state():
        draw()
    assert draw() == first


# What it is refused for


class Grown(Network):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(2, 2)


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}])


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path):
    write(train(state_at(), 2), tmp_path)
    cases = [
        ({"model": Grown()}, "is of another model: the model's extra.bias, extra.weight are not in it; resume with"),
        ({"model": Network().head}, "another model: .*body.0.bias, body.0.weight, body.1.bias, ... .9. are not in the"),
        ({"model": Network(dtype=torch.float32)}, "model/body.0.weight is float64 .6, 3, 3, 3., this run's is float32"),
        ({"optimizer": torch.optim.SGD}, "the checkpoint's optimizer is AdamW, this run's is SGD; resume with the"),
        ({"optimizer": two_groups}, "the optimizer has 2 groups of parameters, the checkpoint's 1, and body.0.bias"),
        (
            {"optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
            "the checkpoint has no optimizer/max_exp_avg_sq/body.0.weight; resume with the recipe",
        ),
    ]
    for changes, message in cases:
        with pytest.raises(CheckpointError, match=message):
            restored(tmp_path, state_at(**changes))
    write(train(state_at(optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True)), 3), tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint's optimizer/max_exp_avg_sq/body.0.bias, .* are not of this"):
        restored(tmp_path, state_at())
    other = state_at()
    other.loader = ff.ShardedLoader(DataLoader(Frames(8), 4, shuffle=True), ff.init_mesh())
    shutil.rmtree(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match="loader had samples 12, this one has 8"):
        restored(tmp_path, other)


def test_a_state_that_cannot_be_stored_is_refused_by_name(tmp_path):
    foreign = nn.Parameter(torch.zeros(1))
    state = state_at(optimizer=lambda parameters: torch.optim.SGD([*parameters, foreign], 0.1))
    with pytest.raises(CheckpointError, match="updates a parameter that is not the model's"):
        write(state, tmp_path)
    state = train(state_at(), 1)
    state.optimizer.state[state.model.head[1].bias]["history"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"optimizer/history/head.1.bias is of type list, which a checkpoint"):
        write(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"model/weight is torch.complex128, torch.strided, which a checkpoint"):
        write(state_at(model=nn.Linear(2, 2, dtype=torch.complex128)), tmp_path)
    assert checkpoints_in(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"model/weight is torch.complex128"):
        ff.fit(recipe(model=lambda: nn.Linear(2, 2, dtype=torch.complex128)), ff.Strategy(), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(CheckpointError, match="0 checkpoints cannot be kept; keep at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_what_the_recipe_changed_since_is_said(tmp_path):
    write(train(state_at(optimizer=lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5)), 1), tmp_path)
    model = frozen_body()
    fresh = state_at(
        model=model,
        optimizer=lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], 0.2),
        average=ParameterAverage(model, 0.5),
    )
    assert restored(tmp_path, fresh) == [
        "the recipe's lr is now 0.2; the optimizer goes on with 0.1",
        "the recipe's weight_decay is now 0.01; the optimizer goes on with 0.5",
        "body.0.bias, body.0.weight, body.1.bias, ... (4) are no longer trained",
        "the checkpoint has no average of the parameters; it begins with their values now",
    ]
    write(fresh, tmp_path)
    assert restored(tmp_path, state_at(model=frozen_body()))[-1] == (
        "the checkpoint's average of the parameters is dropped, as ema_decay is not given"
    )


# Written beside the training


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing stops before its first fsync until the event is set."""
    event = threading.Event()
    original = os.fsync

    def fsync(descriptor):
        assert event.wait(20)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yield event
    event.set()


def test_training_goes_on_while_it_is_written(tmp_path, slow_disk):
    state = train(state_at(), 1)
    expected = values_of(state)
    written = []
    with Checkpoints(tmp_path, 3, written.append) as checkpoints:
        checkpoints.save(state)
        train(state, 2)
        checkpoints.poll()
        assert written == [] and checkpoints_in(tmp_path) == []
        threading.Timer(0.2, slow_disk.set).start()
        checkpoints.save(state)  # waits for the one before
        assert [path.name for path in written] == ["step-00000001"]
    assert [path.name for path in written] == ["step-00000001", "step-00000003"]
    shutil.rmtree(tmp_path / "step-00000003")
    fresh = state_at(seed=1)
    restored(tmp_path, fresh)
    assert_equal(values_of(fresh), expected)


def test_poll_says_when_it_is_written(tmp_path):
    written = []
    with Checkpoints(tmp_path, 3, written.append) as checkpoints:
        checkpoints.save(state_at(1))
        checkpoints._writing.join()
        checkpoints.poll()
        assert len(written) == 1
        checkpoints.poll()
        assert len(written) == 1


def test_what_was_begun_is_finished_when_training_fails(tmp_path, slow_disk):
    threading.Timer(0.2, slow_disk.set).start()
    with pytest.raises(KeyError), Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.save(state_at(1))
        raise KeyError("the recipe's own")
    assert newest_checkpoint(tmp_path)[0].manifest.step == 1


def test_the_newest_few_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 11):
        write(state_at(step), tmp_path)
    assert names_in(tmp_path) == [f"step-{n:08d}" for n in (9, 10, 11)]


# Whole or not there

FILE_OPERATIONS = ("mkdir", "fsync", "rename", "rmdir")

SCRIPT = """
import os, sys
from pathlib import Path
from tests.training.checkpoints import test_writer as here
folder = Path(sys.argv[1])
here.torch.optim.AdamW(here.nn.Linear(1, 1).parameters())  # loads what every child would load
for number in range(1, 100):
    child = os.fork()
    if child == 0:
        here.write(here.large_state(1), folder / str(number), keep=1)
        here.interrupt(number)
        here.write(here.large_state(2), folder / str(number), keep=1)
        print("wrote", number, flush=True)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


def interrupt(number):
    """This process is killed right before the `number`-th file operation from now."""
    left = number

    def counted(original):
        def operation(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return operation

    for name in FILE_OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def test_a_process_killed_at_any_moment_of_writing_loses_nothing(tmp_path):
    """A second checkpoint replaces the first; the process is killed before each file operation in turn."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    trials = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert done.stdout == f"wrote {len(trials)}\n" and len(trials) > 10
    found = []
    for trial in trials:
        newest, problems = newest_checkpoint(trial)
        assert problems == []
        found.append(newest.manifest.step)
        write(large_state(9), trial, keep=1)
        assert names_in(trial) == ["step-00000009"], "what was left is cleared away"
    assert found == sorted(found) and set(found) == {1, 2}


def test_the_order_of_writing(tmp_path, monkeypatch):
    """Nothing gets its name before what it names is on the disk."""
    happened = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor):
        happened.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        fsync(descriptor)

    def move(old, new):
        happened.append(f"name {Path(new).relative_to(tmp_path)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", move)
    write(state_at(1), tmp_path)
    assert happened == [
        "sync step-00000001.partial/rank-0.safetensors",
        "sync step-00000001.partial",
        "sync step-00000001.partial/manifest.json",
        "sync step-00000001.partial",
        "name step-00000001",
        "sync .",
    ]


# Checked before it is believed


KINDS = {
    "an empty file": "rank-0.safetensors has 0 of ",
    "a file cut off": "rank-0.safetensors has ",
    "a file gone": "rank-0.safetensors: No such file or directory",
    "another file": "rank-0.safetensors has 6000 of ",
    "one bit of a weight": "wrong checksum of rank-0.safetensors",
    "one bit of a name": "wrong checksum of rank-0.safetensors",
    "a file too long": "rank-0.safetensors has ",
    "no manifest": "it has no manifest.json",
    "an empty manifest": "manifest.json is damaged: JSONDecodeError",
    "a manifest cut off": "manifest.json is damaged: JSONDecodeError",
    "another number in the manifest": "wrong checksum of manifest.json",
    "another manifest": "manifest.json is damaged: TypeError",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, kind):
    for step in (1, 2):
        write(state_at(step), tmp_path)
    damage(tmp_path / "step-00000002", kind)
    newest, problems = newest_checkpoint(tmp_path)
    assert newest.manifest.step == 1
    assert len(problems) == 1 and f"{tmp_path}/step-00000002 is unreadable (" in problems[0]
    assert KINDS[kind] in problems[0]


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_newest(tmp_path):
    for step in (1, 5):
        write(state_at(step), tmp_path)
    damage(tmp_path / "step-00000005", "a file cut off")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.forget_after(newest_checkpoint(tmp_path)[0].manifest.step)
        checkpoints.save(state_at(2))
        checkpoints.wait()
        assert names_in(tmp_path) == ["step-00000002", "step-00000005.damaged"]
        checkpoints.save(state_at(5))
    assert names_in(tmp_path) == ["step-00000005"]
    assert newest_checkpoint(tmp_path)[1] == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(state_at(1, seed=0), tmp_path)
    write(state_at(1, seed=1), tmp_path)
    fresh = state_at()
    restored(tmp_path, fresh)
    assert_equal(values_of(fresh), values_of(state_at(1, seed=1)))
    assert names_in(tmp_path) == ["step-00000001"]


def test_no_checkpoint_at_all(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    assert newest_checkpoint(tmp_path / "nowhere") == (None, [])
    (tmp_path / "step-00000001.partial").mkdir()
    assert newest_checkpoint(tmp_path) == (None, [])


def test_another_format_is_named(tmp_path):
    torch.save({}, tmp_path / "step-00000003.pt")
    with pytest.raises(CheckpointError, match=r"step-00000003.pt is of format 1 \(one file by torch.save\), this"):
        newest_checkpoint(tmp_path)
    path = write(state_at(4), tmp_path)
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace("checkpoint 2", "checkpoint 9"))
    with pytest.raises(CheckpointError, match="format is 'fullframe checkpoint 9', this version reads 'fullframe ch"):
        newest_checkpoint(tmp_path)


# Runs no code


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def rewritten(path, change):
    """The manifest with right checksums of whatever the files hold now."""
    manifest = read_manifest(path)
    files = {name: record_of(path / name) for name in manifest.files}
    fields = {"step": manifest.step, "facts": manifest.facts, "tensors": manifest.tensors, "files": files}
    (path / MANIFEST).write_text(Manifest(**(fields | change)).to_json())


def test_a_pickle_is_never_loaded(tmp_path):
    marker = tmp_path / "was run"
    payload = pickle.dumps(Payload(marker))
    path = write(state_at(1), tmp_path / "checkpoints")
    file = path / "rank-0.safetensors"
    intact = file.read_bytes()

    (path / ".metadata").write_bytes(payload)  # where torch.distributed.checkpoint keeps one
    restored(tmp_path / "checkpoints", state_at())

    for contents in (payload, OrderedDict(weight=Payload(marker))):
        if isinstance(contents, bytes):
            file.write_bytes(contents)
        else:
            torch.save(contents, file)
        rewritten(path, {})  # by someone who can compute checksums
        with pytest.raises(CheckpointError, match="cannot be read"):
            restored(tmp_path / "checkpoints", state_at())
    file.write_bytes(intact)

    (path / MANIFEST).write_bytes(payload)
    with pytest.raises(CheckpointError, match="is unreadable"):
        newest_checkpoint(tmp_path / "checkpoints")
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload works"


def test_a_manifest_leads_to_no_other_folder(tmp_path):
    path = write(state_at(1), tmp_path / "checkpoints")
    (tmp_path / "secret").write_bytes(b"secret")
    rewritten(path, {"files": {"../../secret": record_of(tmp_path / "secret")}})
    with pytest.raises(CheckpointError, match=r"manifest.json does not describe a checkpoint: files \['../../secret'"):
        newest_checkpoint(tmp_path / "checkpoints")


# A full disk


def large_state(step):
    return state_at(step, model=nn.Linear(500, 500, bias=False, dtype=torch.float64))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 5 MB: there is room for two checkpoints of `large_state`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5000k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk, monkeypatch):
    for step in (1, 2):
        write(large_state(step), small_disk)
    expected = r"cannot write checkpoint .*step-00000003 \(rank 0\): No space left on device: it needs 2000000 bytes, "
    expected += r"\d+ are free; make room or keep fewer checkpoints \(now 3\); step-00000002 is whole, go on from it"
    with pytest.raises(CheckpointError, match=expected):
        write(large_state(3), small_disk)
    assert names_in(small_disk) == ["step-00000001", "step-00000002"]

    # Other writers: what was free when it began is not there when it is needed.
    original = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: original(path)._replace(free=2**40))
    with pytest.raises(CheckpointError, match="No space left on device: it needs 2000000 bytes"):
        write(large_state(3), small_disk)
    assert names_in(small_disk) == ["step-00000001", "step-00000002"], "the part that was written makes room again"
    newest, problems = newest_checkpoint(small_disk)
    assert newest.manifest.step == 2 and problems == []


class Wide(nn.Module):
    """400 kB with its optimizer's state."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.Conv2d(256, 4, 3, padding=1)).double()

    def forward(self, image):
        return self.layers(image)


def test_a_run_whose_disk_is_full_stops_and_goes_on_when_there_is_room(small_disk, tmp_path):
    def fit(folder, steps, **options):
        ff.fit(
            recipe(model=Wide), ff.Strategy(), folder, steps=steps, checkpoint_every=2, keep_checkpoints=1, **options
        )

    fit(tmp_path / "whole", 5)
    fit(small_disk / "run", 2)
    with open(small_disk / "something else", "wb") as file:
        file.write(bytes(shutil.disk_usage(small_disk).free - 200_000))
    with pytest.raises(CheckpointError, match=r"No space left on device: it needs .* step-00000002 is whole, go on"):
        fit(small_disk / "run", 5, resume=True)
    (small_disk / "something else").unlink()
    fit(small_disk / "run", 5, resume=True)
    whole, parts = (
        read_manifest(folder / "checkpoints" / "step-00000005") for folder in (tmp_path / "whole", small_disk / "run")
    )
    assert whole == parts


def test_a_quota(tmp_path):
    """As seen by a process: a write that fails in the middle of a file."""
    write(large_state(1), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large: it needs 2000000 bytes, \d+ are free"):
            write(large_state(2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names_in(tmp_path) == ["step-00000001"]
    assert newest_checkpoint(tmp_path)[0].manifest.step == 1


# All ranks agree


def loaded(folder, damaged_on_rank):
    """What each rank says about a folder; on one rank a file cannot be opened."""
    original = checkpoint._damage

    def damage(path, manifest):
        if torch.distributed.get_rank() == damaged_on_rank and path.name == "step-00000002":
            return "Permission denied"
        return original(path, manifest)

    checkpoint._damage = damage
    try:
        newest, problems = newest_checkpoint(folder)
        return newest.manifest.step, problems
    except CheckpointError as error:
        return None, str(error)
    finally:
        checkpoint._damage = original


def test_ranks_agree(tmp_path):
    for step in (1, 2):
        write(state_at(step), tmp_path)
    for step, problems in rank_group(2).run(loaded, tmp_path, None):
        assert step == 2 and problems == []
    for step, problems in rank_group(2).run(loaded, tmp_path, 1):
        assert step == 1 and problems == [f"{tmp_path}/step-00000002 is unreadable (rank 1: Permission denied)"]
    damage(tmp_path / "step-00000001", "a file cut off")
    for step, problem in rank_group(2).run(loaded, tmp_path, 1):
        assert step is None
        assert "step-00000002 is unreadable" in problem and "step-00000001 is unreadable" in problem
        assert problem.endswith("no older checkpoint is left: start anew in another run directory")


def failing(folder, where):
    """Every rank's account of a checkpoint that one rank cannot write."""
    state = state_at(2, model=nn.Linear(50, 50))
    original = tensor_files.os.fsync

    def fsync(descriptor):
        if torch.distributed.get_rank() == 1:
            raise OSError(errno.EIO, "Input/output error")
        original(descriptor)

    tensor_files.os.fsync = fsync
    try:
        with Checkpoints(folder, 3) as checkpoints:
            checkpoints.save(state)
            if where == "poll":
                while True:
                    checkpoints.poll()
                    time.sleep(0.01)
            elif where == "save":
                checkpoints.save(state)
    except CheckpointError as error:
        return str(error)
    finally:
        tensor_files.os.fsync = original


@pytest.mark.parametrize("where", ["poll", "save", "end"])
def test_what_one_rank_cannot_write_stops_all(tmp_path, where):
    write(state_at(1, model=nn.Linear(50, 50)), tmp_path)
    for problem in rank_group(2).run(failing, tmp_path, where):
        assert problem == (
            f"cannot write checkpoint {tmp_path}/step-00000002 (rank 1): Input/output error; "
            "step-00000001 is whole, go on from it with --resume"
        )
    assert names_in(tmp_path) == ["step-00000001"]


def written_apart(folder):
    """Every rank has a folder of its own, as machines without a common disk have."""
    try:
        write(state_at(1), folder / str(torch.distributed.get_rank()))
    except CheckpointError as error:
        return str(error)


def test_a_folder_that_only_one_rank_sees(tmp_path):
    first, second = rank_group(2).run(written_apart, tmp_path)
    assert (
        first
        == second
        == (
            f"cannot write checkpoint {tmp_path}/0/step-00000001 (rank 1): No such file or directory; "
            "the run directory must be visible to all ranks"
        )
    )
