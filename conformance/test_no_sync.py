"""Inside no_sync gradients stay on their rank; the next synchronized backward reduces what has accumulated."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"
OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
}


@case(
    "no_sync.accumulates",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    world=(1, 3),
    each={name: OPTIONS[name] for name in ("default", "view", "find_unused")},
    needs=("no_sync",),
    catalogue=("C01",),
    torch_tests=(
        TORCH + "test_accumulate_gradients_no_sync",
        TORCH + "test_accumulate_gradients_no_sync_grad_is_view",
    ),
    reports=("Lightning-AI/pytorch-lightning#4092", "Lightning-AI/pytorch-lightning#2595", "pytorch/pytorch#43201"),
)
def test_local_gradients_accumulate_until_the_next_synced_backward(rank, options):
    """Inside no_sync gradients add up on their rank; the next synced backward reduces the accumulated sum."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    own = rank.batch(1)
    with ddp.no_sync():
        for step in (1, 2):
            ddp(own).sum().backward()
            rank.law("inside no_sync a gradient is the rank's own sum", model.a.grad, step * own[0])
    rank.show("inside", model.a.grad)
    ddp(own).sum().backward()
    rank.show("after", [model.a.grad, model.b.grad])
    mean = 3 * rank.mean(lambda r: rank.batch(1, of=r)[0])
    rank.law("the synced step reduces the accumulated sum", [model.a.grad, model.b.grad], [mean, mean.clone()])


@case(
    "no_sync.reduced_part_is_kept",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    world=3,
    each={name: OPTIONS[name] for name in ("default", "view", "find_unused")},
    needs=("no_sync",),
    catalogue=("C01",),
    torch_tests=(TORCH + "test_accumulate_gradients_no_sync",),
)
def test_a_mean_that_is_already_there_survives_the_next_reduction(rank, options):
    """A mean reduced before no_sync stays in the gradient: the next synced backward averages it together with what each rank added."""
    model = linear(2)
    ddp = rank.wrap(model, **options)
    own, mean = rank.batch(2), rank.mean(lambda r: rank.batch(2, of=r))
    ddp(own).sum().backward()
    rank.law("the first synced step gives the mean", model.weight.grad, mean)
    with ddp.no_sync():
        ddp(own).sum().backward()
    rank.show("inside", model.weight.grad)
    rank.law("inside, the rank's own gradient is added to the mean", model.weight.grad, mean + own)
    ddp(own).sum().backward()
    rank.law("mean, own and own again are reduced to three means", model.weight.grad, 3 * mean)


def accumulate(forward, micro_batches, scale):
    """Add up the gradients of `scale` times a quadratic loss over micro-batches of (x, y)."""
    for x, y in micro_batches:
        (scale * (forward(x) - y).square().sum() / 2).backward()


@case(
    "no_sync.equals_one_large_batch",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    world=3,
    each={
        "default": ({}, True),
        "zeroed": ({}, False),
        "view": ({"gradient_as_bucket_view": True}, True),
        "view_zeroed": ({"gradient_as_bucket_view": True}, False),
        "find_unused": ({"find_unused_parameters": True}, True),
    },
    needs=("no_sync",),
    catalogue=("C01",),
    torch_tests=(TORCH + "test_accumulate_gradients_no_sync",),
)
def test_an_accumulation_window_equals_one_large_batch(rank, options):
    """Accumulating micro-batches under no_sync and syncing the last one trains exactly as one process does on all of them at once."""
    ddp_options, set_to_none = options
    model, alone = (linear(2, dtype=torch.float64).to(rank.device) for _ in range(2))
    ddp = rank.wrap(model, **ddp_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64)

    def micro_batches(of, iteration):
        return [
            (rank.tensor(of + 1, micro + iteration % 2, dtype=torch.float64), of - micro) for micro in range(3)
        ]  # three rows a window, others on each rank and in each iteration

    for iteration in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        *held_back, last = micro_batches(rank.index, iteration)
        with ddp.no_sync():
            accumulate(ddp, held_back, rank.world_size)  # a loss times W: the mean over W ranks is then the sum
        accumulate(ddp, [last], rank.world_size)
        optimizer.step()

        alone.zero_grad()
        everything = [row for of in range(rank.world_size) for row in micro_batches(of, iteration)]
        xs, ys = torch.stack([x for x, _ in everything]), rank.tensor(*(y for _, y in everything), dtype=torch.float64)
        ((alone(xs)[:, 0] - ys).square().sum() / 2).backward()
        with torch.no_grad():
            alone.weight -= alone.weight.grad / 64
        rank.law("weights are those of one process on one large batch", model.weight.data, alone.weight.data)
    rank.show("weights", model.weight)


@case(
    "no_sync.starts_no_collective",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    each=OPTIONS,
    needs=("no_sync",),
    catalogue=("C01",),
)
def test_nothing_is_communicated_inside(rank, options):
    """A model without buffers communicates nothing inside no_sync, neither in forward nor in backward."""
    ddp = rank.wrap(Scalars("a", "b"), **options)
    before = rank.collectives()
    with ddp.no_sync():
        for _ in range(3):
            ddp(rank.batch(1)).backward()
    rank.law("no collective starts inside no_sync", rank.collectives() - before, 0)
    ddp(rank.batch(1)).backward()
    rank.show("in_the_synced_step", rank.collectives() - before)
    rank.differs("the synced step communicates", rank.collectives() - before, 0)


@case(
    "no_sync.forward_decides",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    each={
        "forward_inside": (True, {}),
        "forward_inside_find_unused": (True, {"find_unused_parameters": True}),
        "backward_inside": (False, {}),
        "backward_inside_find_unused": (False, {"find_unused_parameters": True}),
        "backward_inside_view": (False, {"gradient_as_bucket_view": True}),
    },
    world=3,
    needs=("no_sync",),
    catalogue=("C02",),
    reports=("huggingface/accelerate#1726", "pytorch/PiPPy#1133", "facebookresearch/ClassyVision#706"),
)
def test_the_forward_decides_and_not_the_backward(rank, chosen):
    """Whether a gradient is synchronized is decided where its forward runs: inside or outside no_sync; the backward's place does not matter."""
    forward_inside, options = chosen
    model = linear(2)
    ddp = rank.wrap(model, **options)
    own = rank.batch(2)
    if forward_inside:
        with ddp.no_sync():
            loss = ddp(own).sum()
        loss.backward()
        rank.law("forward inside, backward outside: the rank's own gradient", model.weight.grad, own)
    else:
        loss = ddp(own).sum()
        with ddp.no_sync():
            loss.backward()
        rank.law(
            "forward outside, backward inside: the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r))
        )
    rank.show("gradient", model.weight.grad)


@case(
    "no_sync.flag_counts_at_forward",
    level=OBSERVED,
    source="nn/parallel/distributed.py: if torch.is_grad_enabled() and self.require_backward_grad_sync:",
    each={"on_for_backward": False, "off_for_backward": True},
    needs=("no_sync",),
    catalogue=("C02",),
    reports=("karpathy/build-nanogpt#30",),
)
def test_flipping_the_flag_between_forward_and_backward_changes_nothing(rank, at_forward):
    """The flag require_backward_grad_sync counts as it stands in the forward; setting it between forward and backward changes nothing.

    Its name says backward. A training loop that sets it for the last micro-batch only after that forward trains each
    rank alone.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    own = rank.batch(2)
    ddp.require_backward_grad_sync = at_forward
    loss = ddp(own).sum()
    ddp.require_backward_grad_sync = not at_forward
    loss.backward()
    mean = rank.mean(lambda r: rank.batch(2, of=r))
    rank.law("the value at forward decides", model.weight.grad, mean if at_forward else own.clone())


@case(
    "no_sync.survives_nesting",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    needs=("no_sync",),
    catalogue=("C03",),
)
def test_leaving_an_inner_no_sync_does_not_end_the_outer_one(rank):
    """Leaving a no_sync nested in another does not switch synchronization on again; leaving the outer one does."""
    model = linear(2)
    ddp = rank.wrap(model)
    own = rank.batch(2)
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        ddp(own).sum().backward()
        rank.law("still inside the outer one", model.weight.grad, own)
    ddp(own).sum().backward()
    rank.law("outside both", model.weight.grad, 2 * rank.mean(lambda r: rank.batch(2, of=r)))


@case(
    "no_sync.survives_exceptions",
    level=MUST,
    source="nn/parallel/distributed.py: self.require_backward_grad_sync = old_require_backward_grad_sync",
    needs=("no_sync",),
    catalogue=("C03",),
)
def test_an_exception_inside_switches_synchronization_on_again(rank):
    """An exception that leaves no_sync passes through unchanged and switches synchronization on again."""
    model = linear(2)
    ddp = rank.wrap(model)
    caught = None
    try:
        with ddp.no_sync():
            raise KeyError("a batch is missing")
    except KeyError as error:
        caught = error.args
    rank.law("the exception passes through", caught, ("a batch is missing",))
    ddp(rank.batch(2)).sum().backward()
    rank.law("the next step is synced", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
