"""The places that a walk finds, and their names."""

import collections
import functools
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fullframe.observation.leaks.walk import Variables, is_users, users_modules, walk


class Node:
    __slots__ = ("inner", "other")

    def __init__(self, inner):
        self.inner = inner


def places(**roots):
    return {place.spot.path: (place.kind, place.size) for place in walk(roots, 0)}


def counted(history):
    def count():
        return len(history)

    return count


@functools.cache
def doubled(number):
    return 2 * number


def test_places_have_the_names_that_a_program_would_write():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model[0].cache = {"a": [torch.zeros(4)], 3: np.zeros(2)}
    model[0].register_forward_hook(lambda *_: None)
    found = places(model=model)
    assert found["model.0.cache"] == ("dict", 2)
    assert found["model.0.cache['a']"] == ("list", 1)
    assert found["model.0.cache['a'][0]"] == ("tensor", 16)
    assert found["model.0.cache[3]"] == ("tensor", 16)
    assert found["model.0._forward_hooks"] == ("hooks", 1)
    assert found["model.1.running_mean"] == ("tensor", 8)
    assert "model.0.weight" not in found, "parameters do not grow"
    doubled(1)
    assert places(f=functools.partial(counted([1, 2]), key=Node([0]))) == {
        "f.history": ("list", 2),
        "f.args.inner": ("list", 1),
    }
    assert places(f=doubled) == {"f": ("cache", 1)}
    assert places(f=counted([1]).__call__, g=functools.lru_cache(maxsize=2)(abs)) == {}


def test_a_window_is_bounded_and_a_graph_is_as_old_as_its_oldest_node():
    assert places(x=collections.deque([1], maxlen=3)) == {"x": ("bounded", 1)}
    assert places(x=collections.deque([1])) == {"x": ("list", 1)}
    weight = torch.ones(1, requires_grad=True)
    total = (weight * 2).sum()
    (found,) = walk({"x": total}, total.grad_fn._sequence_nr() + 10)
    assert (found.kind, found.size) == ("graph", 11)


def test_a_walk_does_not_take_longer_the_more_was_kept():
    def count(length):
        rows = [[number] for number in range(length)]
        by_name = {f"row {number}": [number] for number in range(length)}
        return len(places(x=rows, y=by_name))

    assert count(1000) == count(10000) < 200


def test_circles_and_hidden_values_end():
    loop = []
    loop.append(loop)

    class Odd:
        @property
        def value(self):
            raise AssertionError("a property is not called")

    assert places(x=loop, y=Odd(), z=(n for n in [1])) == {"x": ("list", 1)}


def local(number):
    import sys

    kept = [number]
    return kept, Variables(sys._getframe())


def test_variables_of_a_running_function():
    kept, variables = local(3)
    assert places(here=variables)["here.kept"] == ("list", 1) and kept == [3]


def test_whose_files():
    assert is_users(__file__)
    for module in (torch, np, pytest, types):
        assert not is_users(module.__file__)
    import fullframe

    assert not is_users(fullframe.__file__) and not is_users("<frozen importlib>") and not is_users(None)
    assert __name__ in users_modules() and "torch" not in users_modules()


def test_a_link_is_what_it_leads_to(tmp_path):
    own, library = tmp_path / "own", tmp_path / "site-packages"
    for folder in (own, library):
        (folder / "package").mkdir(parents=True)
        (folder / "package" / "module.py").touch()
    (tmp_path / "linked").symlink_to(library / "package")
    (own / "one.py").symlink_to(library / "package" / "module.py")
    (library / "developed").symlink_to(own / "package")
    assert is_users(str(own / "package" / "module.py")) and is_users(str(library / "developed" / "module.py"))
    for path in (library / "package" / "module.py", tmp_path / "linked" / "module.py", own / "one.py"):
        assert not is_users(str(path)), path


def test_files_of_one_folder_are_judged_without_asking_the_disk_for_each(tmp_path, monkeypatch):
    asked = []
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **more: asked.append(path) or real(path, **more))
    folder = Path(torch.__file__).parent / "a folder that is not there"
    assert not any(is_users(str(folder / f"module{number}.py")) for number in range(100))
    assert len(asked) < 30


def _unasked(*_):
    raise AssertionError("a class of the program's was asked")


class LazyTable(dict):
    __len__ = __iter__ = __getitem__ = items = keys = values = _unasked


class LazyList(list):
    __len__ = __iter__ = __getitem__ = __reversed__ = _unasked


def test_classes_of_the_program_s_are_not_asked():
    """`transformers` has tables that import all models when they are read."""
    table, row = LazyTable(), LazyList()
    for number in range(100):
        dict.__setitem__(table, number, [number])
        list.append(row, [number])
    places = {place.spot.path: place.size for place in walk({"table": table, "row": row}, 0)}
    assert places["table"] == places["row"] == 100
    assert places["table[99]"] == places["row[99]"] == 1


def test_of_many_modules_each_is_asked_once_where_it_lies(monkeypatch):
    """A file name is resolved by the file system: thousands of them at each walk would use up the watch's time."""
    resolved = []

    def resolve(path, resolve=Path.resolve):
        resolved.append(path)
        return resolve(path)

    for number in range(5000):
        module = types.ModuleType(f"many_{number}")
        module.__file__ = f"/nowhere/many_{number}.py"
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Path, "resolve", resolve)
    users_modules()
    resolved.clear()
    users_modules()
    assert resolved == []
