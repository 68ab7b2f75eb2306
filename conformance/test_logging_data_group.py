"""What the logging data tells of a process group of DDP's own."""

import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import linear


@case(
    "logging_data.group",
    level=MUST,
    source="DistributedDataParallel._get_ddp_logging_data",
    world=3,
    catalogue=("A04", "M01"),
)
def test_rank_and_world_size_are_the_groups(rank):
    """In a process group of its own `rank` and `world_size` in the logging data are those in the group, beside what a wrapper of all ranks tells."""
    group = dist.new_group([1, 2])
    everybody = rank.wrap(linear(1))
    if rank.index:
        ddp = rank.wrap(linear(1), process_group=group)
        rank.law("in the group", rank.log(ddp, "rank", "world_size"), {"rank": rank.index - 1, "world_size": 2})
    rank.law("in all", rank.log(everybody, "rank", "world_size"), {"rank": rank.index, "world_size": 3})
