"""A change of the process group after a backward that failed, by which training goes on without a rank that is lost."""

import torch
import torch.distributed as dist
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("a rank was lost")


class Failing(Scalars):
    """Three numbers, of which the forward uses the first one; one that is to fail uses them all and has gradients for two."""

    def forward(self, x, failing=False):
        return (Fails.apply(self.a * x) * self.b * self.c if failing else self.a * x).sum()


@case(
    "switches.group_after_a_failed_backward",
    level=OBSERVED,
    source="DistributedDataParallel._update_process_group",
    each={"own": {}, "view": {"gradient_as_bucket_view": True}},
    needs=("_update_process_group", "find_unused_parameters"),
    catalogue=("O08",),
    torch_tests=("distributed_test.py::_DistTestBase::test_ddp_update_process_group_grad_undefined",),
    reports=("pytorch/pytorch#128092", "pytorch/pytorch#128262"),
)
def test_a_new_group_begins_anew_after_a_failed_backward(rank, options):
    """
    After a backward that raised, `_update_process_group` forgets all that it had begun: the next iterations give the mean, and a parameter that only the failed one used keeps None.
    """
    model = Failing("a", "b", "c")
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    ddp(rank.batch(1)).backward()
    model.zero_grad(set_to_none=True)
    with rank.raises("backward", RuntimeError, match="a rank was lost"):
        ddp(rank.batch(1), failing=True).backward()
    model.zero_grad(set_to_none=True)
    ddp._update_process_group(dist.group.WORLD)
    for _ in range(3):
        ddp(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
        rank.law("the mean, and None", [model.a.grad, model.b.grad, model.c.grad], [mean, None, None])
        model.zero_grad(set_to_none=True)
