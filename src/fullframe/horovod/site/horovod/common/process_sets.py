"""`horovod.common.process_sets`."""

from fullframe.horovod.context import add_process_set, get_process_set_ids_and_ranks, remove_process_set
from fullframe.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "global_process_set", "remove_process_set"]
