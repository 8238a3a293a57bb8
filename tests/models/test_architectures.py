"""A fast part of `docs/models.md`: architectures that differ in their ops, on two and on four ranks.

The whole table is `python -m tests.models.table`; its floor and its tolerance are those of `comparison.py`.
"""

from pathlib import Path

import pytest
import torch

from tests.models.architectures import ARCHITECTURES, GROUPS, TOLERANCE
from tests.models.comparison import FLOOR, compared, verdicts_of
from tests.models.table import Outcome, as_markdown, remark, worst_verdict

MESHES = ((1, 2), (2, 2))

WITHOUT_GATHER = (
    "Swin",  # windows, shifted by roll
    "Swinv2",
    "ViT",  # a class token beside split tokens
    "VitDet",  # windows and relative positions
    "MobileViT",  # unfolding into pixels of patches
    "CvT",  # a class token and strided keys
    "DPT depth",  # tokens back to maps at four scales
    "DETR",
    "MaskFormer",
    "3D U-Net",
    "EDSR (pixel shuffle)",
    "Token encoder (nn.TransformerEncoder)",
    "Stereo with convex upsampling",
    "RAFT",  # all-pairs correlation, looked up by grid_sample
    "Mask2Former, its loss",  # deformable and masked attention, matching, points chosen by topk
    "Deformable DETR, its loss",  # two stages
    "Lift-splat BEV, scatter",
    "FCOS, its loss",  # boolean masks
    "Mask R-CNN, its losses",  # nms, regions of maps and of masks
    "Monodepth2, its loss",  # grid_sample by depth and pose
    "EoMT",  # a split mask is written into a whole one
)


@pytest.mark.parametrize("name", WITHOUT_GATHER)
def test_exact_and_nothing_is_gathered(name: str) -> None:
    for mesh, outcome in verdicts_of(name, MESHES).items():
        assert outcome.verdict == "exact", (mesh, outcome)
        assert outcome.error <= TOLERANCE
        assert outcome.split > 0.5, (mesh, outcome)


def test_a_volume_network_with_its_depth_split() -> None:
    for mesh, outcome in verdicts_of("3D U-Net", ((1, 1, 2), (1, 1, 3), (1, 2, 2))).items():  # height, width, depth
        assert outcome.verdict == "exact" and outcome.error <= TOLERANCE, (mesh, outcome)
        assert outcome.split > 0.9, (mesh, outcome)


def test_the_architectures_know_nothing_of_splitting() -> None:
    folder = Path(__file__).parent
    for source in (
        "architectures",
        "from_transformers",
        "detectors",
        "dense_networks",
        "matching_networks",
        "elsewhere",
        "perception_inputs",
        "perception_networks",
        "prompted",
    ):
        assert "fullframe" not in (folder / f"{source}.py").read_text(), source


def test_names_are_unique() -> None:
    assert len(ARCHITECTURES) == sum(len(group) for group in GROUPS.values())


def step_of(gradient: list[float], noise: list[float]) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {"large": torch.tensor(gradient).double(), "cancels": torch.tensor(noise).double()}
    return {"loss": {"loss": torch.ones((), dtype=torch.float64)}, "gradient": tensors, "buffer": {}}


def test_the_comparison_finds_what_is_wrong_and_no_noise() -> None:
    expected = step_of([4.0, -2.0], [0.0, 1e-20])
    assert compared(expected, step_of([4.0, -2.0], [1e-16, 0.0]), TOLERANCE) == ([], pytest.approx(1e-16 / (4 * FLOOR)))
    for wrong in (
        step_of([4.0, -2.0 + 1e-6], [0.0, 0.0]),
        step_of([4.0, -2.0], [1e-10, 0.0]),
        step_of([4.0, float("nan")], [0.0, 0.0]),
        step_of([4.0], [0.0, 0.0]),
    ):
        assert len(compared(expected, wrong, TOLERANCE)[0]) == 1
    del expected["gradient"]["cancels"]
    assert compared(expected, step_of([4.0, -2.0], [0.0, 0.0]), TOLERANCE)[0] == ["other gradients: ['cancels']"]


def test_the_document_says_what_was_gathered_and_counts_the_worse_mesh() -> None:
    outcomes = {
        (1, 2): Outcome("exact", 2e-15, split=0.9),
        (2, 2): Outcome(
            "exact with gather", 3e-15, tuple(f"torch.nn.functional.fold (a.{n} (Fold))" for n in range(4)), split=0.5
        ),
    }
    assert worst_verdict(outcomes) == "exact with gather"
    assert remark(outcomes) == "`F.fold` in `a.0`, `a.1` and 2 more"
    text = as_markdown(GROUPS, {"Swin": outcomes}, {"timm": "ModuleNotFoundError: No module named 'timm'"})
    assert "| Swin | 60x92 | exact 2e-15 | with gather 3e-15 | 50% | `F.fold` in `a.0`, `a.1` and 2 more |" in text
    assert "1 architectures: 0 exact, 1 exact with gather, 0 refused, 0 wrong" in text
    assert "timm models are left out here: `ModuleNotFoundError" in text
