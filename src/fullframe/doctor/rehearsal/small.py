"""A recipe made small, so that a wrong set-up shows in seconds: small frames, and repeated layers once.

The model's code, the loss, the optimizer and the ranks are the real ones.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from fullframe.data.nested import tensors_in, tensors_replaced
from fullframe.data.slices import SliceReader
from fullframe.recipe import Recipe
from fullframe.training.loading.listing import first_sample

FRAME = 128  # rows and columns of a small frame, at most
_SCALES = (1, 2, 4, 8, 16, 32)  # what a label may be smaller than its frame


class SmallFrames(Dataset[Any]):
    """The first `FRAME` rows and columns of every frame, and of what is smaller by a power of 2 as much."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _small(self._dataset[index])


class SmallStream(IterableDataset[Any]):
    """The same of a stream."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return map(_small, self._dataset)


def made_small(recipe: Recipe, fewer_layers: bool = True) -> Recipe:
    """`recipe` with small frames and, unless layers are to be found by their names or numbers, fewer of them."""
    model, data = recipe.model, recipe.data
    evaluation: Callable[[], Any] | None = recipe.evaluation_data
    return dataclasses.replace(
        recipe,
        model=(lambda: with_fewer_layers(model())) if fewer_layers else model,
        data=lambda: _with_small_frames(data()),
        evaluation_data=None if evaluation is None else lambda: _with_small_frames(evaluation()),
        workers=0,
    )


def with_fewer_layers(model: nn.Module) -> nn.Module:
    """`model`, where of children of a Sequential that follow each other and are alike only the first stays."""
    for module in list(model.modules()):
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            before: object = None
            for name, child in list(module.named_children()):
                kind = type(child), tuple((n, tuple(p.shape)) for n, p in child.named_parameters())
                if kind[1] and kind == before:
                    del module._modules[name]
                before = kind
    return model


def is_small(dataset: Any) -> bool:
    """Whether the frames of a dataset are small as they are."""
    size = tuple(dataset.size(0)) if isinstance(dataset, SliceReader) else _frame(first_sample(dataset))
    return size is None or max(size) <= FRAME


def _with_small_frames(dataset: Any) -> "SmallFrames | SmallStream":
    return (SmallStream if isinstance(dataset, IterableDataset) else SmallFrames)(dataset)


def _small(sample: Any) -> Any:
    frame = _frame(sample)
    return sample if frame is None else tensors_replaced(sample, partial(_crop, frame))


def _frame(sample: Any) -> tuple[int, int] | None:
    """Rows and columns of the largest tensor that has them."""
    found = [tensor for tensor in tensors_in(sample) if tensor.dim() >= 3]
    if not found:
        return None
    largest = max(found, key=Tensor.numel)
    return int(largest.shape[-2]), int(largest.shape[-1])


def _crop(frame: tuple[int, int], tensor: Tensor) -> Tensor:
    for scale in _SCALES:
        rows, columns = frame[0] // scale, frame[1] // scale
        if tensor.dim() >= 2 and tuple(tensor.shape[-2:]) == (rows, columns):
            return tensor[..., : min(FRAME // scale, rows), : min(FRAME // scale, columns)].clone()
    return tensor
