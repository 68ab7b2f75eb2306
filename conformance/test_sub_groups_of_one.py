"""A process group of a single rank: everything goes on as without DDP."""

import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import WithBuffers
from ddp_conformance.rank import mean_all_reduce

PROCESS_GROUP = "nn/parallel/distributed.py: The process group to be used for distributed data all-reduction."


@case(
    "sub_groups.of_one",
    level=MUST,
    source=PROCESS_GROUP,
    each={
        "default": {},
        "find_unused": {"find_unused_parameters": True},
        "view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
    },
    world=(1, 2),
    catalogue=("A04", "B01"),
    reports=("NVIDIA/Megatron-LM#6660",),
)
def test_a_group_of_one_rank_trains_as_the_module_alone(rank, options):
    """In a group of one rank parameters, buffers and gradients are the rank's own in every iteration: cleared, accumulated, or after no_sync."""
    groups = [dist.new_group([r]) for r in range(rank.world_size)]
    own = rank.tensor(rank.index + 5)
    model = WithBuffers(b=own.clone())
    model.weight.data.fill_(rank.index + 5)
    ddp = rank.wrap(model, process_group=groups[rank.index], **options)
    rank.law("its own weight", model.weight.data, own)
    gradient = rank.batch(1)[0]
    for times in (1, 1, 2, 3, 1, 2):
        if times == 1:
            model.weight.grad = None
        ddp(rank.batch(1)).backward()
        rank.law("its own gradients, added up", model.weight.grad, times * gradient)
        rank.law("its own buffer", model.seen["b"], own)
    model.weight.grad = None
    with ddp.no_sync():
        for _ in range(2):
            ddp(rank.batch(1)).backward()
    ddp(rank.batch(1)).backward()
    rank.law("its own gradients after no_sync", model.weight.grad, 3 * gradient)


@case("sub_groups.hook_of_one", level=MUST, source=PROCESS_GROUP, world=(1, 2), catalogue=("A04", "I02"))
def test_a_hook_in_a_group_of_one_rank_sees_what_accumulated(rank):
    """In a group of one rank a communication hook is handed the gradients that the rank has accumulated."""
    groups = [dist.new_group([r]) for r in range(rank.world_size)]
    model = WithBuffers()
    ddp = rank.wrap(model, process_group=groups[rank.index])
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().clone())
        return mean_all_reduce(bucket, groups[rank.index])

    ddp.register_comm_hook(None, hook)
    gradient = rank.batch(1)[0]
    for times in (1, 2, 3):
        ddp(rank.batch(1)).backward()
        rank.law("the gradients, added up", model.weight.grad, times * gradient)
    rank.law("the hook saw them", seen, [times * gradient for times in (1, 2, 3)])
