"""Every family of rules; importing this module fills the registry and puts dispatch and guard in place."""

from fullframe.spatial import dispatch as _dispatch  # noqa: F401  the general way, which all rules are called by
from fullframe.spatial import function_guard as _guard  # noqa: F401  in place as soon as there are split tensors
from fullframe.spatial.rules import (  # noqa: F401
    attention,
    composed,
    convolution,
    embedding,
    extremes,
    gradient_hooks,
    grid_sample,
    indexing,
    joining,
    loss,
    matmul,
    moments,
    normalization,
    order,
    padding,
    pointwise,
    pooling,
    quantiles,
    random,
    reduction,
    resampling,
    reshape,
    scan,
    scattering,
    softmax,
    transposed_convolution,
    unfolding,
    whole_dim,
)
