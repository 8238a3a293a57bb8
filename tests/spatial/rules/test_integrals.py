"""Integrals and slopes along split dims, and slices made no longer than a norm."""

import math

import torch

from tests.spatial.cases import Case, as_in_one_process, small
from tests.spatial.corners import Corners, corners_as_in_torch, noise, spoiled

PLACES = {"whole": ((11,),), "of all": ((2, 4, 7, 11),), "of the image": ((7, 11),)}
CASES: dict[str, Case] = {
    **{f"trapezoid of dim {n}": small(lambda x, n=n: torch.trapezoid(x, dx=0.5, dim=n)) for n in range(4)},
    **{f"trapezoid at places {name}": Case(lambda x, w: torch.trapz(x, w), whole=shape, sizes=((7, 11),))
       for name, shape in PLACES.items()},
    "trapezoid at split places": small(lambda x: torch.trapezoid(x, x.sin(), dim=2)),
    "cumulative_trapezoid": small(lambda x: torch.cumulative_trapezoid(x, dx=2.0)),
    "cumulative_trapezoid at split places": small(lambda x: torch.cumulative_trapezoid(x, x.sin(), dim=2)),
    "gradient": small(lambda x: torch.gradient(x)),
    "gradient of rows": small(lambda x: torch.gradient(x, dim=2, spacing=0.5, edge_order=2)),
    "gradient of both": small(lambda x: torch.gradient(x, dim=(2, 3), spacing=(2.0, 3), edge_order=2)),
    **{f"renorm {p}": small(lambda x, p=p: torch.renorm(x, p, 3, 2.0)) for p in (1, 2, math.inf)},
    "renorm of channels": small(lambda x: x.renorm(2, 1, 3.0)),
    "renorm in place": small(lambda x: (x * 1).renorm_(p=2, dim=0, maxnorm=3.0)),
    "renorm in place of rows": small(lambda x: x.sin().renorm_(1, 2, 2.0).cos()),
}  # fmt: skip
CORNERS = Corners()
for value in (math.inf, math.nan):
    image = spoiled(1, 2, 5, 7, value=value)
    CORNERS.add(f"trapezoid {value}", lambda x: torch.trapezoid(x, dim=3), [image])
    CORNERS.add(f"gradient {value}", lambda x: torch.gradient(x, dim=(2, 3)), [image])
    CORNERS.add(f"renorm {value}", lambda x: torch.renorm(x, 2, 3, 2.0), [image])
CORNERS.add("few", lambda x: torch.gradient(x, dim=(2, 3)), [noise(1, 2, 3, 3)])


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)
