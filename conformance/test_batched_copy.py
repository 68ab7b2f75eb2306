"""`batched_grad_copy`: gradients go into their bucket in one operation instead of one for each parameter."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Quadratic, Scalars
from ddp_conformance.rank import as_it_is
from torch import nn

DDP = "DistributedDataParallel"
NEEDS = ("batched_grad_copy",)


def counted(ddp, x):
    """How often each operation ran in one backward."""
    loss = ddp(x)
    with torch.autograd.profiler.profile() as profile:
        loss.backward()
    return {event.key: event.count for event in profile.key_averages()}


@case(
    "batched_copy.one_copy",
    level=MUST,
    source=DDP,
    needs=NEEDS,
    each={"batched": True, "plain": False},
    catalogue=("O07",),
)
def test_a_bucket_is_filled_by_one_operation(rank, batched):
    """
    With `batched_grad_copy` each bucket is filled by one `_foreach_copy_` of all its gradients, and divided by one `div_`; without it there is no `_foreach_copy_` at all.

    Six scalars of two dtypes are two buckets. Gradients are views, so that nothing is copied back; they are set to None between iterations.
    """
    model = Scalars("a", "b", "c", "d", "e", "f")
    for name in "def":
        setattr(model, name, nn.Parameter(torch.ones(1, dtype=torch.float64)))
    ddp = rank.wrap(model, batched_grad_copy=batched, gradient_as_bucket_view=True)
    for _ in range(4):
        ddp.zero_grad()
        counts = counted(ddp, rank.batch(1))
        rank.law("one copy for each bucket", counts.get("aten::_foreach_copy_", 0), 2 if batched else 0)
        rank.law("one division for each bucket", counts.get("aten::div_", 0), 2 if batched else 0)


@case("batched_copy.copies_back", level=OBSERVED, source=DDP, needs=NEEDS, catalogue=("O07",))
def test_whether_the_way_back_is_batched_too(rank):
    """
    Where gradients are no views, later releases also batch the copy back from the bucket into the gradients: two `_foreach_copy_` for each bucket instead of one.
    """
    ddp = rank.wrap(Scalars("a", "b", "c"), batched_grad_copy=True)
    for _ in range(3):
        ddp.zero_grad()
        counts = counted(ddp, rank.batch(1))
    copies = counts.get("aten::_foreach_copy_", 0)
    rank.law("one or two", copies in (1, 2), True)
    rank.show("copies", copies)


@case("batched_copy.divides", level=OBSERVED, source=DDP, world=3, needs=NEEDS, catalogue=("O07", "U02"))
def test_the_flat_division_rounds_otherwise(rank):
    """
    With `batched_grad_copy` gradients are divided by the world size, and without it multiplied by its reciprocal: on three ranks the last bit may differ.

    Gradients 2, 3 and 7 in float64 give 4.0 with it and 3.9999999999999996 without.
    """
    values = (2, 3, 7)
    for batched, share in ((True, lambda value: value / 3), (False, lambda value: value * (1 / 3))):
        model = Scalars("w", dtype=torch.float64)
        ddp = rank.wrap(model, batched_grad_copy=batched)
        ddp(rank.tensor(values[rank.index], dtype=torch.float64)).backward()
        expected = rank.tensor(sum(map(share, values)), dtype=torch.float64)
        rank.law(f"batched {batched}", model.w.grad, expected)


@case(
    "batched_copy.same_training",
    level=MUST,
    source=DDP,
    world=(2, 3),
    needs=NEEDS,
    each={
        "copies": (False, True),
        "views": (True, True),
        "copies_zeroed": (False, False),
        "views_zeroed": (True, False),
    },
    catalogue=("O07",),
    torch_tests=(
        "test_c10d_gloo.py::ReducerTest::test_batched_grad_copy",
        "test_c10d_gloo.py::ReducerTest::test_batched_grad_copy_gradient_as_bucket_view",
    ),
    reports=("pytorch/pytorch#176638",),
)
def test_training_is_the_same_with_a_batched_copy(rank, options):
    """
    With `batched_grad_copy` training follows the mean of the ranks' gradients, with views and without, whether gradients are set to None or to zero, and where they accumulate in `no_sync` first.

    Each step is one micro-batch in `no_sync` and one synchronized; the loss is (w*x)^2/2 with x = W*(r+1), the rate 1/2048.
    """
    views, set_to_none = options
    model = Quadratic()
    ddp = rank.wrap(model, batched_grad_copy=True, gradient_as_bucket_view=views)
    x = rank.batch(1, dtype=torch.float64)
    factor = 1 - 2 * rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2) / 2048
    for count in range(1, 5):
        ddp.zero_grad(set_to_none=set_to_none)
        with ddp.no_sync():
            ddp(x).backward()
        ddp(x).backward()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter -= parameter.grad / 2048
            rank.law(f"{name} follows the mean", parameter, factor**count)


@case("batched_copy.hook", level=MUST, source=DDP, world=(2, 3), needs=NEEDS, catalogue=("O07", "I01"))
def test_a_hook_still_sees_undivided_gradients(rank):
    """
    With `batched_grad_copy` a communication hook still gets the rank's own gradients, undivided.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model, batched_grad_copy=True)
    ddp.register_comm_hook(None, as_it_is)
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        rank.law("undivided", [model.a.grad.clone(), model.b.grad.clone()], [rank.batch(1)[0]] * 2)
