"""The post-localSGD hook: all ranks together until a given iteration, a sub-group or nobody from then on."""

import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

HOOK = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.post_localSGD_hook"
TESTS = ("distributed_test.py::_DistTestBase::test_ddp_hook_parity_post_localSGD",)


@case("post_local_sgd.sub_group", level=MUST, source=HOOK, world=4, catalogue=("J09",), torch_tests=TESTS)
def test_after_the_start_a_sub_group_reduces(rank):
    """
    For the first `start_localSGD_iter` iterations gradients are the mean over all ranks, and from then on the mean over the rank's sub-group.

    Four ranks in two sub-groups, 0 with 1 and 2 with 3; the start is iteration 3. PyTorch's own test uses a sub-group of all ranks, in which nothing changes.
    """
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = PostLocalSGDState(None, groups[rank.index // 2], start_localSGD_iter=3)
    model = Scalars("w")
    ddp = rank.wrap(model)
    ddp.register_comm_hook(state, post_localSGD_hook)
    mates = (0, 1) if rank.index < 2 else (2, 3)
    for iteration in range(6):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0], None if iteration < 3 else mates)
        rank.law(f"the mean over {'all' if iteration < 3 else 'the sub-group'}", model.w.grad, mean)


@case("post_local_sgd.no_reduction", level=MUST, source=HOOK, world=(2, 3), catalogue=("J09",))
def test_after_the_start_there_may_be_no_reduction_at_all(rank):
    """
    With `post_local_gradient_allreduce=False` gradients stay on their rank after the first `start_localSGD_iter` iterations.
    """
    state = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    model = Scalars("w")
    ddp = rank.wrap(model)
    ddp.register_comm_hook(state, post_localSGD_hook)
    for iteration in range(5):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        if iteration < 2:
            rank.law("the mean over all", model.w.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
        else:
            rank.law("the rank's own", model.w.grad, rank.batch(1)[0])


@case("post_local_sgd.iter", level=OBSERVED, source=HOOK, catalogue=("J09",))
def test_the_state_counts_up_to_the_start(rank):
    """
    The state's `iter` counts the iterations up to `start_localSGD_iter` and no further.
    """
    state = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    ddp = rank.wrap(Scalars("w"))
    ddp.register_comm_hook(state, post_localSGD_hook)
    counted = []
    for _ in range(5):
        ddp(rank.batch(1)).backward()
        counted.append(state.iter)
    rank.law("it stops at the start", counted, [1, 2, 2, 2, 2])
