"""Every function of torch's tensor API has a rule or a reason for its refusal."""

import warnings

import numpy as np
import pytest
import torch
from torch.overrides import get_overridable_functions, resolve_name

import fullframe as ff
import fullframe.spatial.shard  # fills the registry
from fullframe.errors import UnsupportedOp
from fullframe.spatial.rules.registry import RULES
from fullframe.spatial.rules.unsupported import REASONS
from tests.exactness import mesh
from tests.spatial.fake import spatial


def api() -> dict[object, str]:
    """All functions that torch hands to `__torch_function__`, with their names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {f: resolve_name(f) or str(f) for found in get_overridable_functions().values() for f in found}


def test_every_function_is_in_a_class() -> None:
    nowhere = sorted(name for function, name in api().items() if function not in RULES and function not in REASONS)
    assert not nowhere, f"give these a rule or a reason in rules/unsupported.py: {nowhere}"


def test_the_check_can_fail() -> None:
    assert torch.linalg.svd in REASONS
    assert torch.relu in RULES
    assert len([f for f in api() if f in RULES]) > 700
    assert str not in RULES and str not in REASONS


def test_an_array_beside_a_split_tensor_is_to_be_a_tensor() -> None:
    with spatial(1, 2):
        x = ff.shard(torch.ones(1, 3, 4, 8), mesh(1, 2))
        with pytest.raises(UnsupportedOp, match=r"write torch\.as_tensor\(array\) for an array beside it"):
            x + np.ones((3, 1, 1))
