"""The kernels into which inductor fuses the ops of a graph: what each of them reads and writes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import BaseSchedulerNode

from fullframe.simulation.fake.replaced import replaced

Nodes = dict[str, Sequence[BaseSchedulerNode]]  # the scheduler's nodes of a kernel, by its name


@contextmanager
def kernels_noted() -> Iterator[Nodes]:
    """Inside, gives the nodes of each kernel that inductor writes."""
    nodes: Nodes = {}
    with ExitStack() as stack:
        for backend in (CppScheduling, TritonScheduling):
            stack.enter_context(replaced(backend, "define_kernel", _noting(backend.define_kernel, nodes)))
        yield nodes


def _noting(original: Any, nodes: Nodes) -> Any:
    def define_kernel(self: Any, source: str, schedule: Any, *rest: Any) -> Any:
        name = original(self, source, schedule, *rest)
        nodes.setdefault(name, [node for node in schedule if isinstance(node, BaseSchedulerNode)])
        return name

    return define_kernel


def bytes_of_kernel(nodes: Iterable[BaseSchedulerNode], graph: Any) -> int:
    """What a kernel must read and write once: of each buffer what it touches, of those that it alone knows nothing.

    `graph` is the GraphLowering, its code written.
    """
    reads, writes = defaultdict[str, set[Any]](set), defaultdict[str, set[Any]](set)
    for node in nodes:
        for deps, found in ((node.read_writes.reads, reads), (node.read_writes.writes, writes)):
            for dep in deps:
                if not isinstance(dep, WeakDep) and dep.name not in graph.removed_buffers:
                    found[dep.name].add(dep)
    return sum(_touched(name, deps, graph) for found in (reads, writes) for name, deps in found.items())


def _touched(name: str, deps: Iterable[Any], graph: Any) -> int:
    whole: int = int(graph.get_numel(name)) * graph.get_dtype(name).itemsize
    if any(isinstance(dep, StarDep) for dep in deps):
        return whole
    touched = sum(int(dep.numbytes_hint()) for dep in deps)
    return min(whole, touched)
