"""One seed for everything drawn: hypothesis repeats the same examples in every run unless `--seed` asks for others."""

import gc
import os
import random
import signal
import sys

import numpy
import pytest
from hypothesis import HealthCheck, settings

from tests.sampled import mark_what_is_left_out

DEFAULT_SEED = 0

# What is equal to the bit, and in float64 to 1e-12, is so on the CPU; and there are more ranks than GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# Ranks share few cores, so an example's time says nothing: no deadline, no complaint about slow drawing.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_SLOW)
settings.register_profile("seeded", derandomize=False, **_SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help=f"draw other examples and random numbers than those every run repeats (seed {DEFAULT_SEED})",
    )
    parser.addoption("--kills", type=int, default=3, help="how many ranks tests/whole/test_faults.py kills in one run")
    parser.addoption("--programs", type=int, default=600, help="how many programs tests/whole/test_fuzz.py draws")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Of a shell's background job, and of nohup; children would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = config.getoption("--seed")  # hypothesis's own plugin reads it after this hook
    settings.load_profile("repeatable" if config.option.hypothesis_seed is None else "seeded")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_what_is_left_out(items)


def pytest_collection_finish() -> None:
    # Nine thousand tests and all that they import: looking through it takes 0.4 s each time that a test collects.
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, for tests that draw their own data on other ranks."""
    chosen = request.config.getoption("--seed")
    return DEFAULT_SEED if chosen is None else chosen


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> int:
    """How many random programs are drawn."""
    return int(request.config.getoption("--programs"))


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    if "torch" in sys.modules:  # a test that needs no torch does not wait for it
        # Of the CPU alone: `torch.manual_seed` keeps a traceback for each kind of device that is not there.
        sys.modules["torch"].default_generator.manual_seed(seed)
