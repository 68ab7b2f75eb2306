"""When each bucket's reduction starts: as soon as it is full and all buckets before it have started."""

import torch
from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import Scalars, three_layers
from ddp_conformance.reference import FIRST_LIMIT, MIB, built, every_bucket, firing, rebuilt
from torch import nn

ORDER = "include/torch/csrc/distributed/c10d/reducer.hpp: and the buckets are reduced in a predetermined order consistent across"
DEFERRED = (
    "nn/parallel/distributed.py: we don't do bucketing, thus only one ALL-REDUCE is inserted after all the gradients"
)
BACKWARD = [5, 4, 3, 2, 1, 0]
"""In which order the gradients of three layers become ready: the last layer's first, its bias before its weight."""


def backwards(rank, model, iterations, own, uses=None, **options):
    """One timeline for each backward."""
    ddp = rank.wrap(model, **options)
    happened = rank.timeline(ddp)
    lines = []
    for iteration in range(iterations):
        happened.clear()
        model.zero_grad(set_to_none=True)
        ddp(own, *([uses[iteration]] if uses else [])).sum().backward()
        lines.append(" ".join(happened))
    return lines


@case(
    "firing.as_buckets_fill",
    level=OBSERVED,
    source=DEFERRED,
    world=(1, 2),
    needs=("register_comm_hook",),
    catalogue=("B09", "H05", "U04"),
)
def test_reductions_start_at_the_end_of_the_first_backward_and_during_later_ones(rank):
    """
    The first backward starts its one reduction after the last gradient; later ones start each bucket's as soon as it is
    full, while gradients of earlier layers are still to come.

    With three layers and a 1 MiB cap: `g5 g4 g3 g2 g1 g0 R0`, then `g5 g4 R0 g3 g2 R1 g1 g0 R2`, where g5 is the gradient
    of parameter 5 and R0 the start of the first reduction.
    """
    model = three_layers()
    lines = backwards(rank, model, 4, rank.batch(512), bucket_cap_mb=1)
    rank.show("first", lines[0])
    rank.show("later", lines[1])
    rank.law("first everything, then one reduction", lines[0], firing(BACKWARD, [[0, 1, 2, 3, 4, 5]]))
    full = firing(BACKWARD, rebuilt(model.parameters(), BACKWARD, [FIRST_LIMIT, MIB]))
    rank.law("later each bucket as it is full", lines[1:], [full] * 3)


@case(
    "firing.static_graph",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: Delay all reduce to be after all gradients' calculation is complete.",
    needs=("static_graph", "register_comm_hook"),
    catalogue=("U05", "H05"),
)
def test_with_static_graph_the_first_two_backwards_reduce_at_the_end(rank):
    """With `static_graph=True` the first two backwards reduce after the last gradient, and only the third overlaps."""
    model = three_layers()
    lines = backwards(rank, model, 4, rank.batch(512), bucket_cap_mb=1, static_graph=True)
    rank.show("lines", lines)
    late = firing(BACKWARD, [[0, 1, 2, 3, 4, 5]])
    full = firing(BACKWARD, rebuilt(model.parameters(), BACKWARD, [FIRST_LIMIT, MIB]))
    rank.law("two at the end, two as buckets fill", lines, [late, late, full, full])


@case(
    "firing.find_unused",
    level=OBSERVED,
    source="nn/parallel/distributed.py: Note: reverse list of buckets because we want to approximate the",
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("H02", "H06", "U04"),
)
def test_with_find_unused_parameters_reductions_overlap_from_the_first_backward_on(rank):
    """
    With `find_unused_parameters=True` reductions start during the first backward already, and in every later one at the same
    points.

    The buckets pair a weight with the bias of the layer before it, so that a full layer waits: `g5 R0 g4 g3 R1 g2 g1 R2 g0
    R3`.
    """
    model = three_layers()
    lines = backwards(rank, model, 4, rank.batch(512), bucket_cap_mb=1, find_unused_parameters=True)
    rank.show("line", lines[0])
    full = firing(BACKWARD, built(model.parameters(), [FIRST_LIMIT, MIB]))
    rank.law("as the constructor's buckets fill, every time", lines, [full] * 4)


@case(
    "firing.smaller_caps_start_sooner",
    level=OBSERVED,
    source="DistributedDataParallel",
    each={"half_mib": 0.5, "one_mib": 1, "two_mib": 2, "three_mib": 3, "hundred_mib": 100},
    needs=("register_comm_hook",),
    catalogue=("H01",),
)
def test_smaller_caps_start_sooner_and_send_more_often(rank, cap):
    """
    The smaller the cap, the sooner the first reduction starts and the more reductions there are.

    Three layers of 1 MiB and 2 KiB each: the first starts after 2, 2, 4, 6 and 6 gradients, under caps of 0.5, 1, 2, 3 and
    100 MiB, and there are 3, 3, 2, 1 and 1 of them. (`dist._DEFAULT_FIRST_BUCKET_BYTES` is the same as the cap here.)
    """
    model = three_layers()
    line = backwards(rank, model, 2, rank.batch(512), **every_bucket(int(cap * MIB)))[1].split()
    first, count = line.index("R0"), sum(event.startswith("R") for event in line)
    rank.show("gradients_before_the_first", first)
    rank.show("reductions", count)
    rank.law("gradients until the cap is reached", first, 2 if cap <= 1 else 4 if cap <= 2 else 6)
    rank.law("as many as the cap makes of 3 MiB", count, 3 if cap <= 1 else 2 if cap <= 2 else 1)


@case(
    "firing.in_bucket_order",
    level=OBSERVED,
    source=ORDER,
    needs=("register_comm_hook",),
    catalogue=("B09",),
)
def test_reductions_are_issued_in_bucket_order_whatever_is_ready_first(rank):
    """
    Reductions start in the order of the buckets, whatever order gradients become ready in: a full bucket waits for those
    before it.

    One parameter a bucket, in the order d, c, b, a of the first backward. Later backwards make them ready in other orders.
    """
    uses = [tuple(order) for order in ("abcd", "abcd", "dcba", "bdac", "abcd")]
    lines = backwards(rank, Scalars(*"abcd"), 5, rank.batch(1), uses, **every_bucket(4))
    rank.show("lines", lines[1:])
    for order, line in zip(uses[1:], lines[1:], strict=True):
        ready = ["abcd".index(name) for name in reversed(order)]
        rank.law(f"used in the order {' '.join(order)}", line, firing(ready, [[3], [2], [1], [0]]))


@case(
    "firing.order_differs_between_ranks",
    level=OBSERVED,
    source=ORDER,
    world=3,
    catalogue=("B09", "B01"),
    reports=("deepspeedai/DeepSpeed#2343",),
)
def test_ranks_may_use_parameters_in_different_orders(rank):
    """
    Ranks that use their parameters in different orders, changing from step to step, all end, and with the right means.

    Reductions meet by bucket, not by arrival. Four parameters, one in each bucket; the first backward has one order on all
    ranks, and the gradient of each parameter knows parameter, rank and step.
    """
    model = Columns()
    ddp = rank.wrap(model, **every_bucket(8))
    orders = [[(step * (rank.index + 1) + at) % 4 for at in range(4)] for step in range(6)]
    for step, order in enumerate(orders):
        model.zero_grad(set_to_none=True)
        ddp(columns_of(rank, rank.index, step), order).backward()
        got = torch.cat([column.grad for column in model.columns])
        rank.law(f"step {step}: the mean", got, rank.mean(lambda r, step=step: columns_of(rank, r, step)))
    rank.show("last_order", orders[-1])
    rank.show("last", got)


class Columns(nn.Module):
    """Four parameters, each multiplied with an element of its own, in the order asked for."""

    def __init__(self):
        super().__init__()
        self.columns = nn.ParameterList(nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(4))

    def forward(self, x, order):
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for at in order:
            total = total + (self.columns[at] * x[at]).sum()
        return total


def columns_of(rank, of, step):
    """What rank `of` feeds in a step: multiples of 12, so that the mean is exact for 2, 3 and 4 ranks."""
    return rank.tensor(*(12 * ((of + 1) * (at + 1) ** 2 + step) for at in range(4)), dtype=torch.float64)


@case(
    "firing.missing_gradient_blocks",
    level=HAZARD,
    source="DistributedDataParallel",
    needs=("register_comm_hook",),
    catalogue=("B09", "U08"),
    reports=("pytorch/pytorch#128949",),
)
def test_a_missing_gradient_holds_back_all_buckets_behind_it(rank):
    """
    Where a parameter gets no gradient and DDP was not told to look for that, its bucket and all buckets behind it are not
    reduced, without an error in that step; every gradient of the step stays local, also those that were reduced.

    The next forward raises. One parameter a bucket, in the order d, c, b, a; b is left out of the third step.
    """
    model = Scalars(*"abcd")
    lines = backwards(rank, model, 3, rank.batch(1), [tuple("abcd"), tuple("abcd"), tuple("acd")], **every_bucket(4))
    rank.show("lines", lines[1:])
    rank.law("nothing behind bucket 1", lines[2], firing([3, 2, 0], [[3], [2], [1], [0]]))
    rank.law("a's gradient stays local", model.a.grad, rank.batch(1)[0])
    rank.law("so does d's, whose bucket was reduced", model.d.grad, rank.batch(1)[0])
