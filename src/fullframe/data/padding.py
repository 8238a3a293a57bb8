"""A batch from samples with unequally many boxes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fullframe.errors import ShapeError


@dataclass(frozen=True)
class Padded:
    """A `collate_fn`: the tensors `keys`, whose first dims differ from sample to sample, are filled up with zeros.

    They become (N, most, ...), and `mask` (N, most) is true where there is a box. Within a sample all of them have
    the same first dim. Everything else is collated as torch does. All tensors have the samples in the first dim, so
    that a batch can be cut into microbatches. Raises ShapeError when the keys of a sample disagree.
    """

    keys: tuple[str, ...]
    mask: str = "boxes_mask"

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of `samples`."""
        counts = [self._count(sample) for sample in samples]
        most = max(counts)
        rest = [{key: value for key, value in sample.items() if key not in self.keys} for sample in samples]
        batch: dict[str, Any] = default_collate(rest)
        for key in self.keys:
            batch[key] = torch.stack([_filled(sample[key], most) for sample in samples])
        batch[self.mask] = torch.arange(most) < torch.tensor(counts)[:, None]
        return batch

    def _count(self, sample: Mapping[str, Any]) -> int:
        counts = {key: len(sample[key]) for key in self.keys}
        if len(set(counts.values())) != 1:
            raise ShapeError(f"a sample has unequally many {', '.join(f'{key} ({n})' for key, n in counts.items())}")
        return next(iter(counts.values()))


def _filled(rows: Tensor, most: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
