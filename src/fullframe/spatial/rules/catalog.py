"""Every family of rules; importing this module fills the registry."""

from fullframe.spatial.rules import (
    along,
    attention,
    convolution,
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
)

FAMILIES = (
    along,
    attention,
    convolution,
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
)
