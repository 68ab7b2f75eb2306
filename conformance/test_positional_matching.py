"""Ranks are matched up by a parameter's position in the model, not by its name; DDP compares counts, shapes and strides only."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from torch import nn

DOCUMENTED = "DistributedDataParallel"
VERIFIED = "include/torch/csrc/distributed/c10d/reducer.hpp: respect to no. of params and matching dtype/size/layout"
COUNTS = (
    r"DDP expects same model across all ranks, but Rank \d+ has \d+ params, while rank \d+ has inconsistent \d+ params"
)


class Named(nn.Module):
    """Scalar float64 parameters, registered in the order given; the forward is half the square of weights 1, 2, ... times input, summed."""

    def __init__(self, order: str, start: dict[str, float] | None = None) -> None:
        super().__init__()
        for name in order:
            value = (start or {}).get(name, 1.0)
            self.register_parameter(name, nn.Parameter(torch.full((1,), value, dtype=torch.float64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((k + 1) * getattr(self, name) * x).square().sum() / 2 for k, name in enumerate("ab"))


START = {"a": 1.0, "b": 2.0}


@case(
    "positional_matching.weights_cross_wired",
    level=HAZARD,
    source=DOCUMENTED,
    world=3,
    catalogue=("A20",),
    reports=("deepspeedai/DeepSpeed#2343",),
)
def test_another_registration_order_swaps_weights_at_construction(rank):
    """A rank that registers same-shaped parameters in another order than rank 0 has their values swapped by the constructor, without an error.

    Position 0 of rank 0 is written into position 0 of every rank, whatever that parameter is called there.
    """
    model = Named("ba" if rank.index == 1 else "ab", START)
    rank.wrap(model)
    rank.show("a_and_b", [model.a, model.b])
    swapped = rank.index == 1
    rank.law(
        "a holds what rank 0 has in its position", model.a, rank.tensor(2.0 if swapped else 1.0, dtype=torch.float64)
    )
    rank.law(
        "b holds what rank 0 has in its position", model.b, rank.tensor(1.0 if swapped else 2.0, dtype=torch.float64)
    )


@case(
    "positional_matching.gradients_cross_wired",
    level=HAZARD,
    source=DOCUMENTED,
    world=(2, 3),
    catalogue=("A20",),
    reports=("deepspeedai/DeepSpeed#2343",),
)
def test_another_registration_order_mixes_gradients_at_every_step(rank):
    """Where one rank registers same-shaped parameters in another order, every step averages the gradient of one with that of the other, without an error.

    By position the replicas stay equal, so nothing looks wrong; by name the ranks train different models, and
    neither parameter gets the mean of its own gradients.
    """
    orders = ["ba" if r == 1 else "ab" for r in range(rank.world_size)]
    model = Named(orders[rank.index], START)
    ddp = rank.wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1 / 256)
    positions = [1.0, 2.0]  # what every rank holds in its first and its second position
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        ddp(rank.batch(1, dtype=torch.float64)).backward()
        means = [0.0, 0.0]
        for r, order in enumerate(orders):
            x = rank.world_size * (r + 1)
            for place, name in enumerate(order):
                means[place] += (("ab".index(name) + 1) * x) ** 2 * positions[place] / rank.world_size
        got = [getattr(model, name).grad for name in orders[rank.index]]
        rank.law(
            f"step {step + 1} averages by position", got, [rank.tensor(mean, dtype=torch.float64) for mean in means]
        )
        optimizer.step()
        positions = [value - mean / 256 for value, mean in zip(positions, means, strict=True)]
    rank.show("a_and_b", [model.a, model.b])
    rank.law(
        "by position replicas are equal",
        list(ddp.parameters()),
        [rank.tensor(v, dtype=torch.float64) for v in positions],
    )


@case("positional_matching.names_do_not_matter", level=OBSERVED, source=DOCUMENTED, catalogue=("A20",))
def test_names_are_never_compared(rank):
    """Names are never compared: ranks whose parameters have nothing but position and shape in common are matched up and averaged."""
    model = nn.Module()
    name = "weight" if rank.index == 0 else "something_else"
    model.register_parameter(name, nn.Parameter(torch.full((1,), 1.0 + rank.index)))
    model.forward = lambda x: (getattr(model, name) * x).sum()
    ddp = rank.wrap(model)
    rank.law("the value is rank 0's", getattr(model, name), rank.tensor(1.0))
    ddp(rank.batch(1)).backward()
    rank.law("the gradient is the mean", getattr(model, name).grad, rank.mean(lambda r: rank.batch(1, of=r))[0])


@case("positional_matching.trainable_set_differs", level=HAZARD, source=DOCUMENTED, catalogue=("A20",))
def test_ranks_that_freeze_different_parameters_mix_their_gradients(rank):
    """Ranks that freeze different parameters of the same shape, equally many, are not refused: the gradient of one is averaged with that of the other."""
    model = Named("ab", START)
    trained = "a" if rank.index == 0 else "b"
    getattr(model, "b" if rank.index == 0 else "a").requires_grad_(False)
    ddp = rank.wrap(model)
    ddp(rank.batch(1, dtype=torch.float64)).backward()
    of_a, of_b = (rank.world_size * 1) ** 2 * 1.0, (2 * rank.world_size * 2) ** 2 * 2.0
    expected = rank.tensor((of_a + of_b) / 2, dtype=torch.float64)
    rank.law("the gradient mixes a's and b's", getattr(model, trained).grad, expected)
    rank.show("gradient", getattr(model, trained).grad)


@case(
    "positional_matching.count_differs",
    level=MUST,
    source=VERIFIED,
    world=(2, 3),
    group_timeout=1,
    catalogue=("A16",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_model_diff_num_params_across_ranks",),
    reports=("pytorch/pytorch#73547", "pytorch/pytorch#74113"),
)
def test_another_number_of_parameters_is_refused_on_every_rank(rank):
    """Where one rank has another number of parameters, the constructor is refused on every rank with a message that names ranks and counts."""
    model = Named("abc" if rank.index == 1 else "ab")
    with rank.raises("another_count", RuntimeError, match=COUNTS):
        rank.wrap(model)


@case(
    "positional_matching.trainable_count_differs",
    level=MUST,
    source=VERIFIED,
    group_timeout=1,
    catalogue=("A16",),
)
def test_another_number_of_trainable_parameters_is_refused_on_every_rank(rank):
    """Only trainable parameters are counted: the same model with one parameter frozen on one rank is refused on every rank."""
    model = Named("ab")
    model.b.requires_grad_(rank.index == 0)
    with rank.raises("another_count", RuntimeError, match=COUNTS):
        rank.wrap(model)


def wrap_or_hear(rank, model, is_refused: bool, match: str) -> None:
    """Wrap a model: refused here, or, where it is as rank 0's, left without an answer by the rank that is refused."""
    if is_refused:
        with rank.raises("constructor", RuntimeError, match=match):
            rank.wrap(model)
    else:
        try:
            rank.wrap(model)
        except RuntimeError as error:
            rank.show("hears", "lost a peer" if "Timed out" in str(error) else "other message")
        else:
            rank.show("hears", "nothing")


@case(
    "positional_matching.shape_differs",
    level=MUST,
    source=VERIFIED,
    each={"on_rank_0": 0, "on_rank_1": 1},
    world=3,
    group_timeout=1,
    lanes=("gloo:*",),
    catalogue=("A17",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_model_diff_shape_across_ranks",),
    reports=("pytorch/pytorch#76449", "pytorch/pytorch#73547"),
)
def test_another_shape_is_refused_where_it_differs_from_rank_0(rank, odd):
    """Where a parameter has another shape, each rank that differs from rank 0 is refused with a message that says so, and no other rank is.

    Rank 0 has nobody to compare itself with. It goes on to the broadcast, which ends with its group's time-out: 1 s
    here, 30 minutes by default. What the others see is the backend's affair, so this is about gloo.
    """
    model = nn.Linear(3 if rank.index == odd else 2, 1, bias=False)
    is_refused = rank.index > 0 if odd == 0 else rank.index == odd
    wrap_or_hear(rank, model, is_refused, "appears not to match sizes of the same param in process 0")


@case(
    "positional_matching.strides_differ",
    level=MUST,
    source=VERIFIED,
    world=3,
    group_timeout=1,
    lanes=("gloo:*",),
    catalogue=("A18",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_param_layout_mismatch_error",),
    reports=("pytorch/pytorch#79043", "megvii-research/RefDiff#2"),
)
def test_other_strides_are_refused_where_they_differ_from_rank_0(rank):
    """Where a parameter has other strides, channels_last on one rank, the rank that differs from rank 0 is refused with a message that says so, and no other rank is."""
    layout = torch.channels_last if rank.index == 1 else torch.contiguous_format
    model = nn.Conv2d(2, 2, (1, 3), bias=False).to(memory_format=layout)
    wrap_or_hear(rank, model, rank.index == 1, "appears not to match strides of the same param in process 0")
