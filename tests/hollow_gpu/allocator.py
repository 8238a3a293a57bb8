"""`python -m tests.hollow_gpu --gpus 1 --bytes 4294967296 -- -m tests.hollow_gpu.allocator [SEEDS]`

Random requests to torch's own allocator on a GPU that is soon full, and to the simulation's: what is reserved after
each, how often what is unused goes back, and which request fails are the same.
"""

import random
import sys

import torch

from fullframe.simulation.memory.allocator import CachingAllocator

_REQUESTS = 400


def differs(seed: int) -> str:
    """What differs in the requests of a seed; "" where nothing does."""
    drawn = random.Random(seed)
    torch.cuda.empty_cache()
    there, _ = torch.cuda.mem_get_info()
    ours, retried = CachingAllocator(there), torch.cuda.memory_stats()["num_alloc_retries"]
    live = []
    for number in range(_REQUESTS):
        if live and (drawn.random() < 0.45 or sum(tensor.nbytes for tensor, _ in live) > 0.8 * there):
            tensor, piece = live.pop(drawn.randrange(len(live)))
            del tensor
            ours.free(piece)
        else:
            bytes = int(2 ** drawn.choice([drawn.uniform(9, 20), drawn.uniform(20, 28), drawn.uniform(24, 29)]))
            try:
                tensor = torch.empty(bytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                tensor = None
            try:
                piece = ours.malloc(bytes)
            except MemoryError:
                return "" if tensor is None else f"request {number}: only ours fails"
            if tensor is None:
                return f"request {number}: only torch's fails"
            live.append((tensor, piece))
        returns = torch.cuda.memory_stats()["num_alloc_retries"] - retried
        if (torch.cuda.memory_reserved(), returns) != (ours.reserved_bytes, ours.returns):
            return f"request {number}: {torch.cuda.memory_reserved()} reserved, {returns} returns; ours {vars(ours)}"
    return ""


if __name__ == "__main__":
    torch.empty(1, device="cuda")
    found = {seed: differs(seed) for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60)}
    wrong = {seed: said for seed, said in found.items() if said}
    for seed, said in wrong.items():
        print(f"seed {seed}, {said}")
    print(f"{len(found) - len(wrong)} of {len(found)} programs alike")
    sys.exit(bool(wrong))
