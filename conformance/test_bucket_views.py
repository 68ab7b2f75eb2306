"""gradient_as_bucket_view=True: a gradient is a piece of its bucket, and not a copy."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

DOCUMENTED = "DistributedDataParallel"
UNTOUCHED = "nn/parallel/distributed.py: param.grad field is not touched"
VIEWS = (
    "include/torch/csrc/distributed/c10d/reducer.hpp: If gradient_as_bucket_view_ is false, after allreduce buckets,"
)
OPT_IN = ("pytorch/pytorch#41954", "pytorch/pytorch#43557", "pytorch/pytorch#44344")


def memory(tensor):
    """The storage that the tensor looks into."""
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()


def storage(tensor):
    """The address of the memory that the tensor looks into."""
    return memory(tensor).data_ptr()


def watch_buckets(ddp):
    """The storages of the buckets of each backward to come, appended as they are reduced; the hook leaves gradients local."""
    seen = []

    def note(state, bucket):
        seen.append(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note)
    return seen


@case(
    "bucket_views.share_the_bucket",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2),
    catalogue=("G01",),
    each={"view": True, "copy": False},
    reports=OPT_IN,
)
def test_gradients_share_the_storage_of_their_bucket(rank, view):
    """With gradient_as_bucket_view=True every gradient is a view into its bucket, at its own offset; without, none is."""
    model = nn.Sequential(linear(2, 2), linear(2, 1)).to(rank.device)
    ddp = rank.wrap(model, gradient_as_bucket_view=view)
    buckets = watch_buckets(ddp)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        buckets.clear()
        ddp(rank.batch(2)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    rank.law("shares its storage with the bucket", [storage(g) == storage(buckets[0]) for g in gradients], [view] * 2)
    rank.law("is a view", [bool(g._is_view()) for g in gradients], [view] * 2)
    offsets = [(g.data_ptr() - buckets[0].data_ptr()) // 4 for g in gradients]
    rank.show("offsets_in_elements", offsets if view else "none")


@case(
    "bucket_views.only_on_request",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("G01",),
    reports=OPT_IN,
)
def test_by_default_a_gradient_has_storage_of_its_own(rank):
    """By default a gradient is no view and may be detached in place."""
    model = linear(2, 1)
    ddp = rank.wrap(model)
    for _ in range(3):
        ddp(rank.batch(2)).sum().backward()
        rank.law("no view", bool(model.weight.grad._is_view()), False)
        model.weight.grad.detach_()
        model.weight.grad.zero_()


@case(
    "bucket_views.one_copy_fewer",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("G07",),
    each={"view": True, "copy": False},
)
def test_one_full_copy_of_the_gradients_is_saved(rank, view):
    """Buckets and gradients together take the size of the gradients once with gradient_as_bucket_view=True, and twice without, in every iteration from the second on.

    Counted in bytes of distinct storages. What an allocator's peak makes of it is not shown here.
    """
    model = nn.Sequential(linear(8, 8), linear(8, 4)).to(rank.device)
    ddp = rank.wrap(model, gradient_as_bucket_view=view)
    buckets = watch_buckets(ddp)
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    for iteration in range(4):
        model.zero_grad(set_to_none=True)
        buckets.clear()
        ddp(rank.batch(8)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        held = {storage(tensor): memory(tensor).nbytes() for tensor in (*buckets, *gradients)}
        if iteration:
            rank.law("bytes of buckets and gradients", sum(held.values()), size if view else 2 * size)


@case(
    "bucket_views.final_after_first_iteration",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2),
    catalogue=("G02",),
)
def test_the_storage_changes_once_after_the_first_iteration(rank):
    """With gradient_as_bucket_view=True the gradients' storage is another in the second iteration, when buckets were rebuilt, and the same from then on."""
    model = linear(2, 1)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    kept = []  # so that no address is used again
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(2)).sum().backward()
        kept.append(model.weight.grad)
    first, *later = [storage(gradient) for gradient in kept]
    rank.law("another in the second iteration", first != later[0], True)
    rank.law("the same from then on", len(set(later)), 1)


@case(
    "bucket_views.detach_raises",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2),
    catalogue=("G03",),
    reports=OPT_IN,
)
def test_detaching_a_gradient_in_place_raises(rank):
    """With gradient_as_bucket_view=True detach_() on a gradient raises and the message names the option."""
    model = linear(2, 1)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    for _ in range(2):
        ddp(rank.batch(2)).sum().backward()
    with rank.raises("detach_", RuntimeError, match="gradient_as_bucket_view"):
        model.weight.grad.detach_()


@case(
    "bucket_views.optimizers_zero_grad_works",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("G03", "G04"),
    each={"to_none": True, "to_zero": False},
    reports=OPT_IN,
)
def test_an_optimizers_zero_grad_works(rank, to_none):
    """With gradient_as_bucket_view=True an optimizer's zero_grad works, whether it sets gradients to None or to zero, and every step has the mean."""
    model = linear(2, 1, dtype=torch.float64)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 256)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=to_none)
        weight = model.weight.detach()
        # d/dw of (x w)^2 / 2 is (x w) x
        mean = rank.mean(lambda r, w=weight: (x := rank.batch(2, of=r, dtype=torch.float64)) * (x @ w.T))
        (ddp(rank.batch(2, dtype=torch.float64)) ** 2 / 2).sum().backward()
        rank.law("the gradient is the mean", model.weight.grad, mean)
        optimizer.step()
    rank.show("weight", model.weight)


@case("bucket_views.zero_grad_to_none", level=OBSERVED, source=VIEWS, catalogue=("G04",))
def test_setting_a_gradient_to_none_frees_nothing(rank):
    """With gradient_as_bucket_view=True zero_grad(set_to_none=True) drops the view, and the next backward puts a view of the same bucket in its place."""
    model = linear(2, 1)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    for _ in range(2):
        ddp(rank.batch(2)).sum().backward()
    before = storage(model.weight.grad)
    model.zero_grad(set_to_none=True)
    rank.law("the gradient is gone", model.weight.grad, None)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the bucket is the same", storage(model.weight.grad) == before, True)
    rank.law("the gradient is the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("bucket_views.zero_grad_to_zero", level=OBSERVED, source=VIEWS, catalogue=("G04",))
def test_zeroing_a_gradient_zeroes_the_bucket(rank):
    """With gradient_as_bucket_view=True zero_grad(set_to_none=False) keeps the view and zeroes the bucket."""
    model = linear(2, 1)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    buckets = watch_buckets(ddp)
    for _ in range(2):
        ddp(rank.batch(2)).sum().backward()
    view = model.weight.grad
    rank.differs("the bucket holds gradients", buckets[-1], torch.zeros(2, device=rank.device))
    model.zero_grad(set_to_none=False)
    rank.law("the gradient is the same object", model.weight.grad is view, True)
    rank.law("the bucket holds zeros", buckets[-1], torch.zeros(2, device=rank.device))


@case("bucket_views.assigned_gradient_is_taken_in", level=OBSERVED, source=VIEWS, world=(2, 3), catalogue=("G05",))
def test_an_assigned_gradient_is_copied_in_and_replaced(rank):
    """With gradient_as_bucket_view=True a tensor assigned to .grad is added to and averaged like any gradient, and after backward .grad is a view of the bucket again."""
    model = linear(2, 1)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    for _ in range(3):
        assigned = 10 * rank.batch(2)
        model.weight.grad = assigned.clone()
        ddp(rank.batch(2)).sum().backward()
        rank.law("eleven times the mean", model.weight.grad, 11 * rank.mean(lambda r: rank.batch(2, of=r)))
        rank.law("a view again", bool(model.weight.grad._is_view()), True)


@case(
    "bucket_views.same_numbers",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2, 3, 4),
    catalogue=("G06",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_DistributedDataParallelCPU_grad_is_view",),
)
def test_gradients_are_the_same_means(rank):
    """With gradient_as_bucket_view=True every gradient is the mean over ranks, in the first iteration and in later ones, gradients accumulated included."""
    model = nn.Sequential(linear(2, 2), linear(2, 1))
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    for iteration in range(4):
        ddp(rank.batch(2)).sum().backward()
        times = iteration + 1  # gradients are not zeroed, and a mean already there stays
        first = rank.mean(lambda r: rank.batch(2, of=r)).expand(2, 2) * times
        second = rank.mean(lambda r: 2 * rank.batch(2, of=r)) * times
        rank.law(
            "each gradient is the accumulated mean",
            [model[0].weight.grad, model[1].weight.grad],
            [first.clone(), second],
        )


@case("bucket_views.unused_none_stays_none", level=MUST, source=UNTOUCHED, catalogue=("E04", "G01"))
def test_an_unused_parameter_without_gradient_keeps_none(rank):
    """With gradient_as_bucket_view=True and find_unused_parameters=True a gradient that is None stays None while no rank uses the parameter."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use="a").backward()
        rank.law("the unused gradient is None", model.b.grad, None)
        rank.law("the used one is the mean", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))


@case("bucket_views.locally_unused_gets_mean", level=MUST, source=UNTOUCHED, world=(2, 3), catalogue=("E05", "G01"))
def test_a_rank_that_skips_a_parameter_contributes_zeros(rank):
    """With gradient_as_bucket_view=True and find_unused_parameters=True a rank that skips a parameter contributes zeros and gets the mean."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use=("a", "b") if rank.index else "a").backward()
        mean = sum(rank.batch(1, of=r)[0] for r in range(1, rank.world_size)) / rank.world_size
        rank.law("the mean with rank 0's zero", model.b.grad, mean)


@case(
    "bucket_views.unused_gradient_is_averaged",
    level=HAZARD,
    source=UNTOUCHED,
    world=(2, 3),
    catalogue=("U07", "E04"),
    each={"view": True, "copy": False},
    reports=("pytorch/pytorch#28294",),
)
def test_an_old_gradient_of_an_unused_parameter_is_averaged(rank, view):
    """With gradient_as_bucket_view=True the old gradient of a parameter that no rank uses is averaged over ranks; without it, it stays as it is.

    That an unused parameter's gradient is not touched is so without views only.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model, gradient_as_bucket_view=view, find_unused_parameters=True)
    model.b.grad = 10 * rank.batch(1)[0]
    old = model.b.grad.clone()
    ddp(rank.batch(1), use="a").backward()
    rank.law("averaged or kept", model.b.grad, 10 * rank.mean(lambda r: rank.batch(1, of=r)[0]) if view else old)
    for _ in range(2):
        ddp(rank.batch(1), use="a").backward()
    rank.show("after_three_iterations", model.b.grad)
