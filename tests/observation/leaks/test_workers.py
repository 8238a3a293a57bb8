"""Which lines of a data set keep something in its workers."""

from torch.utils.data import Dataset

from fullframe.observation.leaks.workers import WorkerMemory, lines_that_add

SEEN = []


class Base(Dataset):
    def __init__(self):
        self.names = []
        self.names.append("a")

    def __len__(self):
        return 3


class Keeps(Base):
    def __getitem__(self, index):
        rows = []
        rows.append(index)
        self.cache[index] = rows
        self.count = self.count + 1
        self.names.append(index)  # adds
        SEEN.extend(rows)  # adds
        self.bytes += b"x"  # adds
        return {"rows": rows}


class Honest(Base):
    def __getitem__(self, index):
        rows = {index}
        rows.add(3)
        return rows


def of_a_function():
    class Inner(Base):
        names = """
of no indent
"""

        def __getitem__(self, index):
            self.names.append(index)  # adds

    return Inner()


def test_lines_that_add_to_what_stays():
    assert all(line.text.endswith("# adds") for line in lines_that_add(Keeps()))
    assert len(list(lines_that_add(Keeps()))) == 3
    assert [line.text.split("  ")[0] for line in lines_that_add(of_a_function())] == ["self.names.append(index)"]
    assert list(lines_that_add(Honest())) == []
    assert list(lines_that_add([1])) == [], "a list's source is Python's own"


def test_without_workers_nothing_is_found():
    memory = WorkerMemory(Keeps())
    assert [memory.look(step) for step in range(50)] == [None] * 50
