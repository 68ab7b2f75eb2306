"""no_sync together with communication hooks, unused parameters, a static graph and a fused optimizer."""

import torch
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.models import Scalars, linear
from ddp_conformance.rank import mean_all_reduce
from ddp_conformance.subject import NoData

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"
OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
}


@case(
    "no_sync.hook_is_not_called",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    each={name: OPTIONS[name] for name in ("default", "view")},
    needs=("no_sync", "register_comm_hook"),
    catalogue=("C04",),
    torch_tests=(
        TORCH + "test_accumulate_gradients_no_sync_allreduce_hook",
        TORCH + "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    ),
)
def test_a_communication_hook_is_called_with_the_accumulated_gradient_only(rank, options):
    """A communication hook is not called inside no_sync; at the next synced backward it is handed the rank's own accumulated gradients."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    handed = []

    def hook(state, bucket):
        handed.extend(bucket.buffer().tolist())
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, hook)
    own = rank.batch(1)
    with ddp.no_sync():
        ddp(own).backward()
        ddp(own).backward()
    rank.law("inside no_sync the hook is not called", handed, [])
    ddp(own).backward()
    rank.show("handed", handed)
    rank.law("then it gets the accumulated sums", handed, [3 * own.item()] * 2)
    rank.law("which are reduced", model.a.grad, 3 * rank.mean(lambda r: rank.batch(1, of=r)[0]))


@case(
    "no_sync.used_in_any_micro_batch",
    level=MUST,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: no_sync",
    world=3,
    each={
        "everywhere": (True, {}),
        "on_one_rank": (False, {}),
        "everywhere_view": (True, {"gradient_as_bucket_view": True}),
        "on_one_rank_view": (False, {"gradient_as_bucket_view": True}),
    },
    needs=("no_sync",),
    catalogue=("C05",),
    torch_tests=(TORCH + "test_grads_same_across_ranks_with_no_sync",),
    reports=("pytorch/pytorch#69031", "pytorch/pytorch#42793", "pytorch/pytorch#124193"),
)
def test_a_parameter_used_in_any_micro_batch_of_the_window_is_reduced(rank, chosen):
    """With find_unused_parameters a parameter used in any micro-batch since the last sync is reduced at the next one, though that forward does not use it."""
    everywhere, options = chosen
    model = Scalars("a", "b")
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    own = rank.batch(1)
    user = rank.world_size - 1
    for _ in range(2):
        with ddp.no_sync():
            ddp(own, use=("a", "b") if everywhere or rank.index == user else "a").backward()
        ddp(own, use="a").backward()
        used = rank.mean(lambda r: rank.batch(1, of=r)[0] * (everywhere or r == user))
        rank.law("b, used in no_sync only, is the mean", model.b.grad, used)
        rank.law(
            "a, used in both, is the mean of the sum", model.a.grad, 2 * rank.mean(lambda r: rank.batch(1, of=r)[0])
        )
        ddp.zero_grad(set_to_none=True)


@case(
    "no_sync.static_graph_after_a_synced_step",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    world=3,
    each={"default": {}, "view": {"gradient_as_bucket_view": True}},
    needs=("no_sync",),
    catalogue=("C01", "U16"),
    reports=("pytorch/pytorch#143580",),
)
def test_static_graph_accumulates_once_one_step_was_synced(rank, options):
    """With static_graph=True, once one step was synced, gradients accumulate under no_sync and the next synced step reduces their sum."""
    model = linear(2)
    ddp = rank.wrap(model, static_graph=True, **options)
    own, mean = rank.batch(2), rank.mean(lambda r: rank.batch(2, of=r))
    ddp(own).sum().backward()
    rank.law("the first step is synced", model.weight.grad, mean)
    for _ in range(4):
        ddp.zero_grad(set_to_none=True)
        with ddp.no_sync():
            ddp(own).sum().backward()
            rank.law("inside no_sync a gradient is the rank's own", model.weight.grad, own)
        ddp(own).sum().backward()
        rank.law("the synced step reduces the accumulated sum", model.weight.grad, 2 * mean)


@case(
    "no_sync.static_graph_from_the_first_step",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    needs=("no_sync",),
    catalogue=("U16",),
    reports=(
        "pytorch/pytorch#143580",
        "huggingface/accelerate#3679",
        "Noble-Lab/casanovo#512",
        "pytorch/pytorch#187732",
    ),
)
def test_static_graph_accumulates_from_the_first_step(rank):
    """With static_graph=True gradients accumulate under no_sync from the first step on, as without it."""
    model = linear(2)
    ddp = rank.wrap(model, static_graph=True)
    own = rank.batch(2)
    with ddp.no_sync():
        ddp(own).sum().backward()
    rank.law("inside no_sync a gradient is the rank's own", model.weight.grad, own)
    ddp(own).sum().backward()
    rank.law("the synced step reduces the sum", model.weight.grad, 2 * rank.mean(lambda r: rank.batch(2, of=r)))


@case(
    "no_sync.fused_optimizer_waits",
    level=HAZARD,
    source="DistributedDataParallel._register_fused_optim",
    needs=("no_sync", "_register_fused_optim"),
    catalogue=("C06",),
)
def test_a_fused_optimizer_steps_in_the_synced_backward_only(rank):
    """A fused optimizer does not step inside no_sync; it steps in the synced backward, by the mean of the accumulated gradients.

    The docstring of _register_fused_optim says that gradient accumulation and no_sync are not supported with it.
    Nothing refuses them, and plain SGD gets them right.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    try:
        ddp._register_fused_optim(torch.optim.SGD, lr=0.5)
    except ValueError as error:  # torch 1.13's optimizer overlap does not import on Python 3.11
        raise NoData(f"the optimizer overlap does not import here: {error}") from error
    own, expected = rank.batch(2), torch.ones_like(model.weight)
    for _ in range(4):
        model.weight.grad = None
        with ddp.no_sync():
            ddp(own).sum().backward()
        rank.law("no step inside no_sync", model.weight.data, expected)
        ddp(own).sum().backward()
        expected -= 0.5 * 2 * rank.mean(lambda r: rank.batch(2, of=r))
        rank.law("a step by the mean of the sums", model.weight.data, expected)
