"""Which device a rank gets, and who says what where it cannot have one. GPUs are planted: none is needed."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fullframe.errors import DeviceError, FullframeError, MeshError
from fullframe.processes.launch import launch
from fullframe.ranks import device

CUDA = torch.device("cuda")


@pytest.fixture
def planted(monkeypatch):
    """`planted(gpus, driver)`: a torch that was built for CUDA, on a machine with so many GPUs."""
    for variable in (*device._LOCAL_RANKS, *device._HIDING, device._OF_SLURM, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)

    def plant(gpus, driver=True, **module):
        def kind(check_available=False):
            return CUDA if driver or not check_available else None

        names = {"get_device_name": lambda index: f"H100 number {index}", "is_initialized": lambda: True}
        monkeypatch.setattr(torch.accelerator, "current_accelerator", kind)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus if driver else 0)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(**names | module))
        monkeypatch.setattr(device, "_there", lambda: True)

    return plant


@pytest.mark.parametrize(
    ("gpus", "environment", "index"),
    [
        (8, {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 5),
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, 0),  # srun --gpus-per-task=1
        (4, {"SLURM_LOCALID": "2", "WORLD_SIZE": "4"}, 2),
        (4, {"WORLD_SIZE": "1"}, 3),  # what the user has chosen
        (4, {}, 3),
        (2, {"LOCAL_RANK": "0"}, 0),
    ],
)
def test_the_device_of_a_rank(planted, monkeypatch, gpus, environment, index):
    planted(gpus)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert device.index_of_rank() == index
    assert device.name() == f"H100 number {index}"


@pytest.mark.parametrize(
    ("gpus", "environment", "text"),
    [
        (2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, r"^4 ranks on this machine need 4 GPUs, it has 2; start 2, "),
        (2, {"LOCAL_RANK": "2"}, "^3 ranks on this machine need 3 GPUs, it has 2;.* CUDA_VISIBLE_DEVICES='' trains on"),
        (4, {}, "RANK is set and LOCAL_RANK is not, so the 4 GPUs of this machine cannot be given out"),
    ],
)
def test_fewer_devices_than_ranks(planted, monkeypatch, gpus, environment, text):
    planted(gpus)
    for name, value in {"WORLD_SIZE": "4", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=text):
        device.index_of_rank()


def test_a_launcher_says_so_before_it_starts_any(planted):
    planted(1)
    device.require_enough(1)
    with pytest.raises(MeshError, match="2 ranks on this machine need 2 GPUs, it has 1"):
        device.require_enough(2)
    planted(0)
    device.require_enough(2)  # on the CPU


def test_a_gpu_that_torch_cannot_use_is_not_passed_over(planted, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update your GPU")

    planted(2, driver=False)
    monkeypatch.setattr(torch.cuda, "init", init)
    for use in (device.require_usable, device.name, lambda: device.take(dist.HashStore(), 0, 1)):
        with pytest.raises(
            DeviceError, match=r"cannot use: The NVIDIA driver on your system is too old .*newer driver"
        ):
            use()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device.require_usable()
    assert device.name() == "the CPU"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(device, "_there", lambda: False)
    device.require_usable()


def test_a_torch_for_cpus_on_a_machine_with_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(device, "_there", lambda: True)
    assert device.name() == f"the CPU: torch {torch.__version__} was built without GPUs"
    monkeypatch.setattr(device, "_there", lambda: False)
    assert device.name() == "the CPU"


@pytest.mark.parametrize(("built", "text"), [(False, "was built without GPUs"), (True, "finds none")])
def test_gpus_that_slurm_gave_are_not_left_idle(planted, monkeypatch, built, text):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    planted(4)
    device.require_usable()
    planted(0, driver=False)
    if not built:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(device, "_there", lambda: False)
    with pytest.raises(DeviceError, match=rf"\(SLURM_GPUS_ON_NODE=4\), and torch .* {text}\. Install"):
        device.require_usable()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device.require_usable()


@pytest.mark.parametrize("text", ["CUDA error: no kernel image is available for execution on the device", "other"])
def test_a_card_that_torch_has_no_kernels_for(planted, monkeypatch, text):
    def ones(*shape, device):
        raise RuntimeError(text)

    properties = SimpleNamespace(major=7, minor=0, uuid="x")
    planted(
        1,
        get_device_name=lambda device: "Tesla V100-SXM2-16GB",
        get_device_properties=lambda device: properties,
        get_arch_list=lambda: ["sm_75", "sm_80"],
    )
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(RuntimeError if text == "other" else DeviceError) as caught:
        device.take(dist.HashStore(), 0, 1)
    if text != "other":
        assert "no kernels for this GPU (Tesla V100-SXM2-16GB, sm_70), only for sm_75, sm_80; install" in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([("cuda", "a 1"), ("cuda", "a 2"), ("cuda", "b 1")], None),
        ([("cpu", "")] * 3, None),
        ([("cuda", "a 1"), ("cuda", "a 2"), ("cuda", "a 1")], r"ranks 0 and 2 have the same GPU \(a 1\)"),
        ([("cuda", "a 1"), ("cpu", ""), ("cuda", "a 2")], "rank 0 is on cuda and rank 1 on cpu; give every rank a GPU"),
        ([("cuda", "a 1"), ("cuda", "a 2"), DeviceError("too old")], "^rank 2: too old$"),
    ],
)
def test_all_ranks_hear_what_is_wrong_with_one(monkeypatch, found, text):
    said, rank_of, store = {}, threading.local(), dist.HashStore()
    store.set_timeout(timedelta(seconds=100))

    def taken():
        mine = found[rank_of.rank]
        if isinstance(mine, Exception):
            raise mine
        return mine

    def rank_runs(rank):
        rank_of.rank = rank
        try:
            device.take(store, rank, 3)
        except FullframeError as error:
            said[rank] = error

    monkeypatch.setattr(device, "_taken", taken)
    ranks = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if text is None:
        assert said == {}
        return
    assert len(said) == 3 and len({str(error) for error in said.values()}) == 1
    with pytest.raises(MeshError, match=text):
        raise said[1]


JOB = """
import sys
from fullframe.cli.application import run
from fullframe.ranks import device
import fullframe as ff

device._taken = lambda: ("cuda", "host gpu-0")  # both ranks

class Command:
    def run(self):
        ff.init_mesh(width=2)

import tyro
tyro.extras.subcommand_cli_from_dict = lambda *args, **kwargs: Command()
sys.exit(run(["x"]))
"""


def test_two_ranks_on_one_gpu_end_at_once_and_say_it_once(capfd):
    assert launch(2, ["-c", JOB], restarts=3) == 2
    assert capfd.readouterr().err.count("ranks 0 and 1 have the same GPU (host gpu-0)") == 1


def test_a_device_that_waits_for_a_rank_that_is_gone(planted, monkeypatch):
    assert device.is_through(0.0)  # none is in use
    planted(1)
    waited_for = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited_for.append)
    assert device.is_through(60.0) and waited_for == [3], "the thread that waits has a current device of its own"
    ended = threading.Event()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda index: ended.wait(60))
    assert not device.is_through(0.1)
    ended.set()


@pytest.mark.parametrize(("free", "reserved", "is_short"), [(1, 92, True), (20, 70, False), (1, 95, False)])
def test_little_memory_is_what_neither_driver_nor_torch_has_left(planted, monkeypatch, free, reserved, is_short):
    assert not device.is_short_of_memory()
    planted(1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (free, 100))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 85 if reserved == 95 else reserved - 2)
    assert device.is_short_of_memory() is is_short


def test_what_a_group_is_made_of(planted, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert device.backends() == "gloo" and device.own_backend() is None
    assert device.current("cpu") == torch.device("cpu")
    planted(2)
    assert device.backends() == "cpu:gloo,cuda:nccl" and device.own_backend() == "nccl"
    assert device.current("cuda") == torch.device("cuda:3")
