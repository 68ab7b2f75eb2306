"""A parameter that two submodules share, under the options that decide where its gradient lies and when it counts as ready."""

from ddp_conformance import OBSERVED, case
from torch import nn


@case(
    "construction.shared_parameter_options",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: gradient_as_bucket_view",
    each={
        "view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "view_find_unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    },
    world=(2, 3),
    catalogue=("A14",),
    reports=("pytorch/pytorch#51929", "pytorch/pytorch#41324"),
)
def test_options_change_nothing_for_a_shared_parameter(rank, options):
    """Under every option a parameter that two submodules share gets the mean of the sum of both uses, once, in every iteration, whether gradients are cleared or accumulate."""
    first, second, alone = (nn.Linear(1, 1, bias=False) for _ in range(3))
    second.weight = first.weight
    model = nn.ModuleList([first, second, alone])
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1)
    model.forward = lambda x: (first(x) + 2 * second(x) + alone(x)).sum()
    ddp = rank.wrap(model, **options)
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    for times in (1, 1, 2, 3, 1):
        if times == 1:
            ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law("the mean of both uses", first.weight.grad, 3 * times * mean)
        rank.law("its neighbour's mean", alone.weight.grad, times * mean)
    rank.law("it is still shared", second.weight is first.weight, True)
    rank.law("two parameters", len(list(ddp.parameters())), 2)
