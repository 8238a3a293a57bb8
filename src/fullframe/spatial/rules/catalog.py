"""Every family of rules; importing this module fills the registry."""

from fullframe.spatial import dispatch as _dispatch  # noqa: F401  the general way, which all rules are called by
from fullframe.spatial import function_guard as _guard  # noqa: F401  in place as soon as there are split tensors
from fullframe.spatial.rules import (
    along,
    attention,
    composed,
    convolution,
    extremes,
    indexing,
    joining,
    loss,
    matmul,
    moments,
    normalization,
    padding,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    reshape,
    scattering,
    transposed_convolution,
    unfolding,
)
from fullframe.spatial.rules import gradient_hooks as hooks
from fullframe.spatial.rules import grid_sample as sampling

FAMILIES = (
    along,
    attention,
    composed,
    convolution,
    extremes,
    hooks,
    indexing,
    joining,
    loss,
    matmul,
    moments,
    normalization,
    padding,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    reshape,
    sampling,
    scattering,
    transposed_convolution,
    unfolding,
)
