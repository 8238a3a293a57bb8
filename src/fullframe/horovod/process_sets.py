"""Process sets: some of the ranks, which run collectives of their own."""

from collections.abc import Sequence


class ProcessSet:
    """Some ranks of the job. Give it to `init(process_sets=...)` or `add_process_set` before you use it.

    `process_set_id` is None before that and after `remove_process_set`.
    """

    def __init__(self, ranks_or_comm: Sequence[int]):
        if not isinstance(ranks_or_comm, Sequence):
            kind = type(ranks_or_comm).__name__
            raise ValueError(f"a process set is made of a list of ranks, got {kind}; there are no MPI communicators")
        self.ranks: list[int] = sorted(int(rank) for rank in ranks_or_comm)
        self.process_set_id: int | None = None
        self.mpi_comm = None
        self._rank = -1

    def attach(self, process_set_id: int, rank: int) -> None:
        """It is usable from now on; `rank`: this process's among all."""
        self.process_set_id = process_set_id
        self._rank = self.ranks.index(rank) if rank in self.ranks else -1

    def detach(self) -> None:
        """It is not usable any more."""
        self.process_set_id, self._rank = None, -1

    def included(self) -> bool | None:
        """Whether this rank belongs to it; None before it is initialized."""
        return None if self.process_set_id is None else self._rank >= 0

    def rank(self) -> int | None:
        """This rank's number in it, -1 outside it; None before it is initialized."""
        return None if self.process_set_id is None else self._rank

    def size(self) -> int | None:
        """How many ranks it has; None before it is initialized."""
        return None if self.process_set_id is None else len(self.ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return False
        return (self.process_set_id, self.ranks) == (other.process_set_id, other.ranks)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])  # all ranks, from `init` on
