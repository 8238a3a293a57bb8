"""Every function of torch's tensor API has a rule or a reason for its refusal."""

import warnings

import torch
from torch.overrides import get_overridable_functions, resolve_name

import fullframe.spatial.shard  # noqa: F401  fills the registry
from fullframe.spatial.rules.registry import RULES
from fullframe.spatial.rules.unsupported import REASONS


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
