"""Options in a process group of its own: a static graph, views, batched copies."""

import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars

MEMBERS = [1, 2]


@case(
    "sub_groups.options",
    level=MUST,
    source="nn/parallel/distributed.py: The process group to be used for distributed data all-reduction.",
    each={
        "static_graph": {"static_graph": True},
        "view": {"gradient_as_bucket_view": True},
        "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
        "find_unused_view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        "batched": {"batched_grad_copy": True},
    },
    world=3,
    catalogue=("A04", "B01"),
)
def test_options_change_no_value_in_a_group(rank, options):
    """In a sub-group gradients are the group's means under every option, in every iteration, cleared or accumulated."""
    group = dist.new_group(MEMBERS)
    if rank.index == 0:
        return
    model = Scalars("a", "b")
    ddp = rank.wrap(model, process_group=group, **options)
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0], MEMBERS)
    for times in (1, 1, 1, 2, 3):
        if times == 1:
            model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law("the group's mean", [model.a.grad, model.b.grad], [times * mean, times * mean])
