"""unfold and fold."""

import torch.nn.functional as F

from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.corners import Corners, corners_as_in_torch, noise

CASES: dict[str, Case] = {
    "unfold": one(lambda x: F.unfold(x, 3, padding=1)),
    "unfold with stride": one(lambda x: F.unfold(x, (2, 3), (1, 2), (0, 1), (2, 1))),
    "unfold with split samples": one(lambda x: F.unfold(x.transpose(0, 2), 2)),
    "fold of unfold": one(lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2).sin(), x.shape[2:], 3, 1, 1, 2)),
    "unfold and fold of one image": one(
        lambda x: F.fold(F.unfold(x[0], 3, padding=1, stride=2).sin(), x.shape[2:], 3, 1, 1, 2)),
    "fold of split channels": one(lambda x: F.fold(x[:, 0, : x.shape[2] // 4 * 4], (2, x.shape[3] + 1), 2)),
    "Tensor.unfold": one(lambda x: x.unfold(3, 5, 2).sin().sum(-1)),
}  # fmt: skip
CORNERS = Corners()
CORNERS.add("no images", lambda x: F.unfold(x, (2, 3), 1, (1, 2), (1, 2)), [noise(0, 1, 5, 6)])


test_corners = corners_as_in_torch(__name__)
test_as_in_one_process = as_in_one_process(__name__, CASES)
