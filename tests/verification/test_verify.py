"""A step is proved exact, or the very module is named where split ranks leave the way of one process."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.strategy import Strategy
from fullframe.training.loading.delivery import Delivery, Split
from fullframe.verification import reference
from fullframe.verification.verdict import Verdict
from fullframe.verification.verify import verify
from tests.rank_group import RankFailure, rank_group
from tests.verification.forked import verified_by_a_fork
from tests.verification.job import (
    AGAIN,
    COUNTING,
    DRAWN,
    DROPPING,
    INPLACE,
    KINK,
    LEAK,
    OTHER,
    OTHERWISE,
    PARTS,
    QUERIED,
    RIGHT,
    SCALED,
    SEAM,
    SINGLE,
    SLOPED,
    SPECTRAL,
    TAUGHT,
    UNUSED,
    written,
)


def _verified(path: str, data: int, height: int, width: int, unsupported: str, depth: int, noise: float = 0.0) -> str:
    torch.set_num_threads(1)
    strategy = Strategy(data=data, depth=depth, height=height, width=width)
    return verified_by_a_fork(Path(path), strategy, unsupported=unsupported, noise=noise).to_json()


def _verified_as_on_a_gpu(path: str) -> str:
    """Where batches are copied ahead, unless somebody asks for none."""
    plainly = Delivery.__init__

    def one_ahead(self: Delivery, mesh: DeviceMesh, split: Split = "auto", ahead: int | None = None) -> None:
        plainly(self, mesh, split, 1 if ahead is None else ahead)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Delivery, "__init__", one_ahead)
        return _verified(path, 1, 1, 2, "error", 1)


def verified(
    path: Path,
    data: int = 1,
    height: int = 1,
    width: int = 2,
    unsupported: str = "error",
    depth: int = 1,
    noise: float = 0.0,
) -> Verdict:
    """The verdict, the same on all ranks."""
    ranks = data * depth * height * width
    answers = rank_group(ranks).run(_verified, str(path), data, height, width, unsupported, depth, noise)
    verdicts = [json.loads(answer) for answer in answers]
    for verdict in verdicts:
        verdict.pop("notes")  # a gathered op is named by the first rank alone
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return Verdict.from_json(answers[0])


def largest(verdict: Verdict) -> float:
    assert verdict.loss is not None
    return max([verdict.loss.relative] + [d.relative for d in (*verdict.parameters, *verdict.buffers)])


@pytest.mark.parametrize(("data", "height", "width"), [(1, 1, 2), (2, 1, 2)])
def test_an_exact_recipe(tmp_path: Path, data: int, height: int, width: int) -> None:
    verdict = verified(written(tmp_path), data, height, width)
    assert verdict.exact and verdict.first_difference is None and verdict.exit_code == 0, verdict
    assert 0 < largest(verdict) < 1e-12, "exact to rounding, and not the same sums"
    assert {d.name for d in verdict.parameters} == {
        *("stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"),
        *("middle.weight", "middle.bias", "head.1.weight", "head.1.bias"),
    }
    assert {d.name for d in verdict.buffers} == {f"stem.1.{n}" for n in ("running_mean", "running_var")} | {
        "stem.1.num_batches_tracked"
    }
    # 11 modules, with one input and one output each. Distinct tensors behind the image: the outputs of stem.0, stem.1,
    # stem.2, pool, middle, up and head.1, the sum before up and the slice behind it.
    assert (verdict.values, verdict.gradients) == (22 * data, 9 * data)
    assert verdict.mesh == {"data": data, "height": height, "width": width}
    assert verdict.notes == ("dropout is off for the comparison, in both runs: head.0 (p = 0.3)",)


OF_CLASSES = """
from typing import NamedTuple
import torch
from torch import nn
import fullframe as ff

class Pair(NamedTuple):
    image: torch.Tensor
    target: torch.Tensor

def collate(samples):
    return {"pair": Pair(*(torch.stack(each) for each in zip(*samples)))}

def recipe():
    torch.manual_seed(0)
    data = [(torch.randn(3, 6, 8), torch.randn(2, 6, 8)) for _ in range(4)]
    return ff.Recipe(
        model=lambda: nn.Conv2d(3, 2, 3, padding=1), data=lambda: data, batch_size=2, collate=collate,
        loss=lambda model, batch: (model(batch["pair"].image) - batch["pair"].target).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
"""


def test_a_batch_of_classes_that_the_recipe_defines(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(OF_CLASSES)
    assert verified(tmp_path / "job.py", 1, 1, 2).exact


def test_a_batch_in_a_mapping_that_torch_does_not_know(tmp_path: Path) -> None:
    """As processors and tokenizers of transformers give it."""
    of_images = "lambda model, batch: loss(model, {**batch, 'image': batch.image})"
    text = written(tmp_path).read_text().replace("loss=loss,", f"collate=Features.of, loss={of_images},")
    features = """
from collections import UserDict
class Features(UserDict):
    @property
    def image(self):
        return self["image"]
    @classmethod
    def of(cls, samples):
        return cls(torch.utils.data.default_collate(samples))
"""
    (tmp_path / "job.py").write_text(features + text)
    assert verified(tmp_path / "job.py", data=2).exact


def test_the_batch_of_the_step_is_compared_where_the_next_one_is_read_ahead(tmp_path: Path) -> None:
    answers = rank_group(2).run(_verified_as_on_a_gpu, str(written(tmp_path)))
    assert all(Verdict.from_json(answer).exact for answer in answers), answers


def test_volumes_are_verified_with_depth(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("from tests.training.volumes import recipe")
    verdict = verified(path, width=1, depth=2)
    assert verdict.exact and 0 < largest(verdict) < 1e-12, verdict
    assert verdict.mesh == {"data": 1, "depth": 2, "height": 1, "width": 1}
    assert {"up.weight", "down.0.weight", "down.1.weight"} <= {d.name for d in verdict.parameters}


WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # middle block, its code, what the first difference must be, what the sentence says
    "scaled on one rank": (
        "Scaled()",
        SCALED,
        {"phase": "forward", "module": "middle", "class_name": "Scaled", "tensor": "output", "rank": 1},
        "'middle' (Scaled) is the first module whose output differs",
    ),
    "a rule without halo": (
        "Blurred()",
        SEAM,
        {
            "phase": "forward",
            "module": "middle",
            "class_name": "Blurred",
            "tensor": "input of 'middle.second' (Conv2d)",
        },
        "code in the forward of 'middle' (Blurred) differs first: what it passes to 'middle.second' (Conv2d)",
    ),
    "a gradient that leaks": (
        "Leaking()",
        LEAK,
        {"phase": "backward", "module": "middle", "class_name": "Leaking", "rank": 1},
        "output of 'middle.mix' (Conv2d) is the first that differs: look at the backward of the code in the forward of",
    ),
    "a leak in a child": (
        "nn.Sequential(nn.Conv2d(6, 6, 1), Leaking.Alone(), nn.Conv2d(6, 6, 1))",
        LEAK + "class Alone(Leaking):\n    def __init__(self):\n        super().__init__()\n"
        "        self.mix = nn.Identity()\n\nLeaking.Alone = Alone\n",
        {"phase": "backward", "module": "middle.1", "class_name": "Alone", "rank": 1},
        "gradient at the output of 'middle.0' (Conv2d) is the first that differs: look at the backward of",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_recipe_names_the_module(tmp_path: Path, what: str) -> None:
    middle, code, expected, said = WRONG[what]
    verdict = verified(written(tmp_path, middle, code))
    first = verdict.first_difference
    assert not verdict.exact and verdict.exit_code == 1 and first is not None
    assert {name: getattr(first, name) for name in expected} == expected, first
    assert said in first.message
    assert first.shape == (2, 6, 9, 13) and first.local_shape in ((2, 6, 9, 7), (2, 6, 9, 6))
    assert first.relative > 1e-8
    assert largest(verdict) > 1e-9, "the gradients differ too"


@pytest.mark.parametrize("what", OTHER)
def test_what_is_done_otherwise_is_found_where_all_outputs_agree(tmp_path: Path, what: str) -> None:
    other, expected, said = OTHER[what]
    height = 2 if what == "nothing" else 1  # of a tensor that is split along one of two axes
    verdict = verified(written(tmp_path, "Otherwise()", OTHERWISE.replace("{other}", other)), height=height)
    first = verdict.first_difference
    if what == "nothing":
        assert verdict.exact and largest(verdict) < 1e-12, verdict
        return
    assert not verdict.exact and first is not None and (first.phase, first.module, first.class_name) == expected, first
    assert said in first.message, first.message


def test_values_on_a_kink_differ_and_are_exact_once_the_weights_are_moved(tmp_path: Path) -> None:
    path = written(tmp_path, "Kinked()", KINK)
    verdict = verified(path)
    first = verdict.first_difference
    assert first is not None and first.phase == "parameter" and first.relative > 0.01
    assert verdict.loss is not None and verdict.loss.relative < 1e-13 and "--noise 0.01" in first.message
    verdict = verified(path, noise=0.01)
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert verdict.notes[0] == "the weights are the recipe's with noise of 0.01 times their size, in both runs"


def test_samples_that_are_read_in_parts(tmp_path: Path) -> None:
    path = written(tmp_path, RIGHT, PARTS.format(shift=0))
    sampled = "sampler=lambda data: [2, 2] if hasattr(data, 'read') else 1 / 0, seed=3"  # the data itself is asked
    path.write_text(path.read_text().replace("seed=3", sampled))
    verdict = verified(path)
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    # In another folder: Python takes a file of the same second and length for the one it has compiled.
    (shifted := tmp_path / "shifted").mkdir()
    verdict = verified(written(shifted, RIGHT, PARTS.format(shift=1)))
    first = verdict.first_difference
    assert not verdict.exact and first is not None and (first.phase, first.rank) == ("forward", 0), first


def test_what_has_no_rule_is_refused_or_gathered(tmp_path: Path) -> None:
    path = written(tmp_path, "Spectral()", SPECTRAL)
    verdict = verified(path)
    assert not verdict.exact and verdict.exit_code == 2 and verdict.refused is not None
    assert (verdict.refused.function, verdict.refused.module) == ("torch.linalg.pinv", "middle (Spectral)")
    assert verdict.loss is None and verdict.parameters == ()

    verdict = verified(path, unsupported="gather")
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert any("torch.linalg.pinv (middle (Spectral)) runs on the gathered" in note for note in verdict.notes)


def test_parameters_without_a_gradient_are_named(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Unused()", UNUSED))
    assert {d.name: d.problem for d in verdict.parameters if d.problem} == {
        "middle.spare.weight": "no gradient",
        "middle.spare.bias": "no gradient",
    }
    assert verdict.notes[-1].startswith("2 parameters get no gradient from this batch (middle.spare.weight, ")


def test_a_view_that_is_written_to(tmp_path: Path) -> None:
    assert verified(written(tmp_path, INPLACE)).exact


def test_parameters_that_go_into_modules(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Queried()", QUERIED), data=2)
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert {"middle.query", "middle.weight"} < {d.name for d in verdict.parameters}


def test_noise_of_the_model_is_the_same_in_both(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Drawn()", DRAWN))
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert not any("depends on the seed" in note for note in verdict.notes), verdict.notes


def test_gradients_that_the_model_asks_for_itself(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Sloped(6, 6, 3, padding=1)", SLOPED))
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert not any("depends on the seed" in note for note in verdict.notes), verdict.notes


def test_random_numbers_are_named_as_a_reason(tmp_path: Path) -> None:
    verdict = verified(
        written(tmp_path, "Drawn()", DRAWN.replace("torch.rand_like(x)", "F.rrelu(x - 1, training=True)"))
    )
    first = verdict.first_difference
    assert not verdict.exact and first is not None and (first.phase, first.module) == ("forward", "middle")
    assert any(note.startswith("the loss depends on the seed also without dropout") for note in verdict.notes)


def test_functions_drop_nothing_either(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Dropping()", DROPPING))
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert not any("depends on the seed" in note for note in verdict.notes), verdict.notes


def test_what_a_reentrant_checkpoint_runs_again(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Again()", AGAIN))
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    wrong = verified(written(tmp_path, "nn.Sequential(Again(), Scaled())", AGAIN + SCALED))
    assert not wrong.exact and wrong.first_difference is not None
    assert wrong.first_difference.module == "middle.1", wrong


def test_a_module_that_counts_its_calls_does_not_draw(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Counting()", COUNTING))
    assert not verdict.exact and not any("depends on the seed" in note for note in verdict.notes), verdict.notes


def test_a_frozen_part_in_inference_mode(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Taught()", TAUGHT))
    assert verdict.exact and largest(verdict) < 1e-12, verdict


def test_single_precision_within_a_module_is_named_as_a_likely_reason(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Single()", SINGLE))
    first = verdict.first_difference
    assert not verdict.exact and first is not None and 1e-9 < first.relative < 1e-5, first
    assert "less than double precision ('middle' (Single) in float32), whose rounding may" in first.message


_BLUR = """
import numpy as np
KERNEL = {kernel}
class Blur(nn.Module):
    def forward(self, x):
        bits = torch.ones(6, 1, 3, 3, dtype=torch.uint8)
        return F.conv2d(F.conv2d(x, KERNEL, groups=6, padding=1), bits / 9, groups=6, padding=1)
"""


def test_constants_of_no_named_dtype_follow_into_double_precision(tmp_path: Path) -> None:
    verdict = verified(written(tmp_path, "Blur()", _BLUR.format(kernel="torch.full((6, 1, 3, 3), 0.1)")))
    assert verdict.exact and largest(verdict) < 1e-12, verdict
    assert torch.get_default_dtype() is torch.float32


def test_images_as_a_sensor_counts_them(tmp_path: Path) -> None:
    """Of uint16 torch reads no pickle."""
    code = """
class Counted(Frames):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"image": (sample["image"].abs() * 1000).to(torch.uint16)}
Frames = Counted
"""
    path = written(tmp_path, RIGHT, code)
    path.write_text(path.read_text().replace('batch["image"])', 'batch["image"].to(torch.get_default_dtype()))'))
    assert verified(path).exact


def test_data_are_read_as_in_training(tmp_path: Path) -> None:
    """Torch puts no double into floats through a mask, nor the other way round."""
    drawn = """
class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        image = torch.zeros(3, 6, 8)
        image[image == 0] = torch.arange(144).float().cos()
        return image, torch.zeros(2, 6, 8)
"""
    (tmp_path / "job.py").write_text(OF_CLASSES.replace("data=lambda: data", "data=Drawn") + drawn)
    assert verified(tmp_path / "job.py").exact


BAD = {
    "a constant in single precision": (
        "Blur()",
        _BLUR.format(kernel="torch.from_numpy(np.ones((6, 1, 3, 3), dtype=np.float32))"),
        ["job.py, line", "in forward, module middle (Blur)", "weights.to(prediction)"],
    ),
    "fails in one process": (
        "Needy()",
        "class Needy(nn.Module):\n    def __init__(self):\n        super().__init__()\n        dist.get_world_size()\n",
        ["the step fails already in one process: ValueError: Default process group has not been initialized"],
    ),
    "made single": (
        "Single()",
        "class Single(nn.Conv2d):\n    def __init__(self):\n        super().__init__(6, 6, 1)\n"
        "    def forward(self, x):\n        return super().forward(x.float())\n",
        [
            "the step fails already in one process",
            "job.py, line",
            "in place of .float() write .to(torch.get_default_dtype())",
        ],
    ),
    "loss not finite": (
        "Zero()",
        "class Zero(nn.Module):\n    def forward(self, x):\n        return x * float('nan')\n",
        ["the loss of the first batch is nan over a count of"],
    ),
}


def _fails(path: str) -> None:
    verify(Path(path), Strategy(width=2))


@pytest.mark.parametrize("what", BAD)
def test_a_step_that_fails_in_one_process(tmp_path: Path, what: str) -> None:
    middle, code, said = BAD[what]
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_fails, str(written(tmp_path, middle, code)))
    assert [name for _, name, _, _ in caught.value.errors] == ["RecipeError"] * 2
    for _, _, message, _ in caught.value.errors:
        assert all(words in message for words in said), message


@pytest.mark.parametrize(("drawn", "calls"), [(False, 2), (True, 4)])
def test_one_process_runs_forward_once_more_or_thrice_where_numbers_are_drawn(
    tmp_path: Path, drawn: bool, calls: int
) -> None:
    called = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        called.append(batch)
        return model(batch + torch.rand(1).double() * drawn).square().mean()  # type: ignore[no-any-return]

    model = nn.Linear(3, 1).double()
    recipe = mock.Mock(loss=loss)
    given = {"state": dict(model.state_dict()), "parts": [torch.ones(2, 3).double()], "seeds": [5]}
    answers = reference._answers(recipe, model, torch.device("cpu"), given, tmp_path)
    assert (answers.draws, len(called), answers.narrow) == (drawn, calls, {})
