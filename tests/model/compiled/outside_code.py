"""Functions and classes that read what stands here, for tests that change it."""

import os
from functools import cached_property, lru_cache, partial, partialmethod, singledispatch, wraps
from typing import Any

import numpy as np
import torch

SCALE, FLAGS, TABLE = 2.0, [1.0], {"a": 1.0}


WEIGHTS = np.ones(3)


class Settings:
    gain = 1.0

    def __init__(self) -> None:
        self.bias = 0.0


SETTINGS = Settings()


class Rounding:
    """Its call depends on a class attribute, a property and a global."""

    digits = 3

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    @property
    def factor(self) -> float:
        return self.digits * SCALE

    @cached_property
    def kept(self) -> float:
        return SCALE


class Kind(type):
    rate = 1.0


class OfKind(metaclass=Kind):
    """Has what its class's class has."""


class Called(torch.nn.Module):
    def __call__(self, x: Any) -> Any:
        return x * TABLE["a"]


class Twice(torch.nn.Module):
    def times(self, x: Any, factor: float) -> Any:
        return x * factor * SCALE

    forward = partialmethod(times, factor=2.0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * FLAGS[0]


def scaled(x: Any) -> Any:
    return x * SCALE


def by_flag(x: Any) -> Any:
    return x * FLAGS[0]


def by_table(x: Any) -> Any:
    return (lambda y: y * TABLE["a"])(x)


def by_settings(x: Any) -> Any:
    return x * SETTINGS.gain + SETTINGS.bias


def deep(x: Any) -> Any:
    return scaled(by_flag(x))


def by_default(x: Any, table: Any = TABLE, function: Any = by_flag) -> Any:
    return function(x) * table["a"]


@lru_cache
def remembered(number: int) -> float:
    return number * SCALE


def decorated(function: Any) -> Any:
    @wraps(function)
    def wrapper(x: Any) -> Any:
        return function(x) * TABLE["a"]

    return wrapper


@decorated
def in_wrapper(x: Any) -> Any:
    return x * FLAGS[0]


def closing(factor: Any) -> Any:
    def inner(x: Any) -> Any:
        return x * factor

    def change(value: Any) -> None:
        nonlocal factor
        factor = value

    inner.change = change  # type: ignore[attr-defined]
    return inner


partial_of = partial(by_default, table={"a": 2.0})
BY_NAME = {"deep": deep, "flag": by_flag}


def by_array(x: Any) -> Any:
    return x * WEIGHTS.sum()


def importing(x: Any) -> Any:
    from tests.model.compiled import outside_code

    return outside_code.scaled(x)


def importing_from(x: Any) -> Any:
    from .outside_code import by_flag as flagged

    return flagged(x)


def counting(x: Any) -> Any:
    return x * getattr(counting, "count", 1.0)


def by_kind(x: Any) -> Any:
    return x * OfKind.rate


def by_class(x: Any) -> Any:
    return x * getattr(Settings, "late", 1.0)


@singledispatch
def by_type(x: Any) -> Any:
    return x


@by_type.register
def _(x: torch.Tensor) -> Any:
    return x * FLAGS[0]


def by_environment(x: Any) -> Any:
    return x * float(os.environ.get("FULLFRAME_TEST", "1"))


def seeding(x: Any) -> Any:
    torch.manual_seed(0)
    return x * torch.rand(1)
