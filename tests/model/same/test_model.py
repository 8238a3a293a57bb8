"""Models that differ over the ranks in what leaves every shape as it is: refused on all ranks, by name."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fullframe as ff
from fullframe.errors import ShapeError
from fullframe.model.same.model import settings_of, state_in_words, state_of
from tests.rank_group import rank_group


class Scaled(nn.Conv2d):
    """A user's own layer."""

    def __init__(self, scale: int, **options: str):
        super().__init__(3, 3, 3, padding=1, **options)
        self.scale, self.act = scale, F.relu


def test_settings_are_plain_values_in_words() -> None:
    layer = Scaled(2)
    layer.nested, layer.unknown = [1, {"a": partial(F.gelu, approximate="tanh")}], object()
    layer.drawn, layer.device, layer.order, layer.kinds = torch.ones(2), "cuda:3", [2, 1], {2, 1}
    found = settings_of(layer)
    assert {name: found[name] for name in ("scale", "padding", "padding_mode", "act", "device")} == {
        "scale": "2", "padding": "tuple(1, 1)", "padding_mode": "'zeros'", "act": "torch.nn.functional.relu",
        "device": "'cuda'",
    }  # fmt: skip
    assert "'a'" in found["nested"] and "gelu" in found["nested"] and "'tanh'" in found["nested"]
    assert (found["order"], found["kinds"]) == ("list(2, 1)", "set(1, 2)")
    assert found["drawn"].startswith("(2,) torch.float32 ")
    assert not {"unknown", "training", "weight", "_forward_hooks"} & found.keys()


def test_the_state_is_who_trains_what_is_frozen_and_how_one_module_in_turn_is_set() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    states, words = [state_of(model, turn) for turn in range(3)], state_in_words(model, 2)
    assert all(0 <= state < 2**31 for state in states)
    said = "the model is in train()", "0 is in train()", "1 is in train()", "0.weight is trained", "0.bias is trained"
    precision = [f"autocast to nothing on {kind}" for kind in ("cpu", "cuda")]
    precision.append("torch.get_float32_matmul_precision() highest")
    assert words == [*said, "1.inplace = False", "1.p = 0.1", *precision]
    with torch.autocast("cpu", torch.bfloat16):
        assert state_of(model, 0) != states[0]
    model[1].p = 0.2
    assert [state_of(model, turn) for turn in range(3)] == [*states[:2], state_of(model, 2)] != states
    model[1].p = 0.1
    model[1].eval()
    assert all(state_of(model, turn) != states[turn] for turn in range(3))
    model[1].train()
    model[0].bias.requires_grad_(False)
    assert all(state_of(model, turn) != states[turn] for turn in range(3))
    model[1].eval()
    assert state_in_words(model, 2)[:5] == [*said[:2], "1 is in eval()", said[3], "0.bias is frozen"]


def _model(rank: int, kind: str) -> nn.Module:
    torch.manual_seed(0)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "eps": lambda: nn.BatchNorm2d(3, eps=1e-5 * (1 + rank)),
        "momentum": lambda: nn.BatchNorm2d(3, momentum=[None, 0.1][rank]),
        "p": lambda: nn.Dropout(0.1 * rank),
        "activation": lambda: [nn.ReLU(), nn.GELU()][rank],
        "inherited": lambda: Scaled(1, padding_mode=["zeros", "reflect"][rank]),
        "iterations": lambda: ff.unroll(nn.Conv2d(3, 3, 1), 2 + rank),
        "function": lambda: nn.TransformerEncoderLayer(4, 2, 4, activation=[F.relu, F.gelu][rank]),
        "frozen": lambda: nn.Conv2d(3, 3, 1).requires_grad_(rank == 1),
        "attribute": lambda: Scaled(1 + rank),
        "same": lambda: Scaled(1),
    }
    return nn.Sequential(kinds[kind](), nn.Conv2d(3, 2, 1))


def made(kind: str) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ff.parallelize(_model(dist.get_rank(), kind), ff.init_mesh(width=1))
        except ShapeError as error:
            return str(error), []
    return "", [str(one.message) for one in said if "attributes" in str(one.message)]


@pytest.mark.parametrize(
    ("kind", "differs"),
    [
        ("eps", "rank 0 has 0.eps = 1e-05, rank 1 has 0.eps = 2e-05"),
        ("momentum", "rank 0 has 0.momentum = None, rank 1 has 0.momentum = 0.1"),
        ("p", "rank 0 has 0.p = 0.0, rank 1 has 0.p = 0.1"),
        (
            "activation",
            "rank 0 has 0: torch.nn.modules.activation.ReLU, rank 1 has 0: torch.nn.modules.activation.GELU",
        ),
        ("inherited", "rank 0 has 0.padding_mode = 'zeros', rank 1 has 0.padding_mode = 'reflect'"),
        ("iterations", "rank 0 has 0.iterations = 2, rank 1 has 0.iterations = 3"),
        ("frozen", "rank 0 has 0.weight (3, 3, 1, 1) float32, rank 1 has 0.weight (3, 3, 1, 1) float32, trained"),
        ("function", "rank 0 has 0.activation = torch.nn.functional.relu, rank 1 has 0.activation = torch._C._nn.gelu"),
    ],
)
def test_what_torchs_modules_are_set_to_is_the_same_on_all_ranks(kind: str, differs: str) -> None:
    for said, _ in rank_group(2).run(made, kind):
        assert f"the ranks have different models: where {differs}; build the same model" in said


class Counting(nn.Conv2d):
    """Each rank counts by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + dist.get_rank() + 1
        return super().forward(x)


def counted(shard_parameters: bool) -> int:
    mesh = ff.init_mesh(width=2)
    model = ff.parallelize(nn.Sequential(Counting(3, 2, 3)), mesh, shard_parameters=shard_parameters)
    for _ in range(3):
        model(ff.shard(torch.ones(1, 3, 6, 7), mesh)).sum().backward()
    return int(model.module[0].calls)  # type: ignore[index]


@pytest.mark.parametrize("shard_parameters", [False, True])
def test_what_a_users_own_module_keeps_of_its_rank_is_let_be(shard_parameters: bool) -> None:
    assert rank_group(2).run(counted, shard_parameters) == [3, 6]


def with_options_of_its_own(name: str, values: tuple[object, object]) -> str:
    try:
        ff.parallelize(nn.Linear(2, 2), ff.init_mesh(width=1), **{name: values[dist.get_rank()]})
    except ShapeError as error:
        return str(error)
    return ""


def in_a_program_of_its_own() -> str:
    before = torch.get_default_dtype()
    torch.set_default_dtype((torch.float32, torch.float64)[dist.get_rank()])
    try:
        return with_options_of_its_own("unsupported", ("error", "error"))
    finally:
        torch.set_default_dtype(before)


def test_options_and_the_program_are_the_same_on_all_ranks() -> None:
    for said in rank_group(2).run(with_options_of_its_own, "shard_parameters", (False, True)):
        assert "where rank 0 has shard_parameters=False, rank 1 has shard_parameters=True; build the same" in said
    for said in rank_group(2).run(in_a_program_of_its_own):
        assert "rank 0 has torch.get_default_dtype() torch.float32, rank 1 has" in said


def test_a_users_own_attribute_that_differs_is_told() -> None:
    (_, first), (_, second) = rank_group(2).run(made, "attribute")
    assert len(first) == 1 and "where rank 0 has 0.scale = 1, rank 1 has 0.scale = 2; if the model" in first[0]
    assert not second
    assert rank_group(2).run(made, "same") == [("", []), ("", [])]
