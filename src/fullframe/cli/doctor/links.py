"""One rank of the bandwidth measurement: `python -m fullframe.cli.doctor.links FILE`."""

import sys
from pathlib import Path


def main() -> None:
    """Measure, and end."""
    from fullframe.processes.orphans import die_with_launcher

    die_with_launcher()
    import torch
    import torch.distributed as dist

    from fullframe.doctor.environment.links import measure_links
    from fullframe.ranks import device

    if device.count() > 1:
        mine = torch.device("cuda", device.index_of_rank())
        torch.accelerator.set_device_index(mine.index)
        dist.init_process_group("nccl", device_id=mine)
    else:
        dist.init_process_group("gloo")
    measure_links(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
