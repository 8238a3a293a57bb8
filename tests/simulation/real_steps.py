"""Real steps, to hold predictions to."""

import gc
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

import fullframe as ff
from fullframe.ranks.mesh import init_mesh
from fullframe.training.session import assemble


def peak_and_left(recipe: ff.Recipe, strategy: ff.Strategy) -> tuple[int, int]:
    """On a rank: the most bytes in two steps by torch.profiler, and what is still counted when all is let go of.

    The latter was freed by a thread of gloo, before the peak or after it, which torch.profiler does not see.
    """
    mesh = init_mesh(strategy.height, strategy.width)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        session = assemble(recipe, strategy, mesh)
        for _, batch in zip(range(2), session.state.loader, strict=False):
            session.step(batch)
        del session, batch
        gc.collect()
    counts = held_bytes(profiled)
    return max(counts), counts[-1]


def held_bytes(profiled: profile) -> list[int]:
    """What torch's allocator has handed out and not got back, after each event that torch.profiler has of it."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
