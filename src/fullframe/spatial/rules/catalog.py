"""Every family of rules; importing this module fills the registry."""

from fullframe.spatial import function_guard as _guard  # noqa: F401  in place as soon as there are split tensors
from fullframe.spatial.rules import (
    along,
    attention,
    convolution,
    hooks,
    indexing,
    joining,
    loss,
    matmul,
    normalization,
    padding,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    reshape,
    sampling,
    unfolding,
)

FAMILIES = (
    along,
    attention,
    convolution,
    hooks,
    indexing,
    joining,
    loss,
    matmul,
    normalization,
    padding,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    reshape,
    sampling,
    unfolding,
)
