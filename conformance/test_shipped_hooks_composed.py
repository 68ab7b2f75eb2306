"""Shipped hooks put together with other things: a wrapper around another hook, double precision, a process group."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars, linear
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

FILE = "distributed/algorithms/ddp_comm_hooks/default_hooks.py"
BUILTIN = dist.BuiltinCommHookType


def register(ddp, hook):
    if isinstance(hook, BUILTIN):
        ddp._register_builtin_comm_hook(hook)
    else:
        ddp.register_comm_hook(None, hook)


@case(
    "shipped_hooks.wrapped_hook_runs",
    level=MUST,
    source=f"{FILE}: casts the resulting tensor of the given hook back to",
    each={"fp16": "fp16_compress_wrapper"},
    catalogue=("J02", "J10"),
)
def test_a_compression_wrapper_runs_the_hook_it_is_given(rank, wrapper):
    """
    A compression wrapper runs the hook that it was given: around the no-op hook every rank keeps its own gradients, rounded to 16 bits, and backward starts no collective.
    """
    x = rank.tensor(1 + 2**-12, 2049) * (1 + 2 * rank.index)
    model = linear(2)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(None, getattr(default_hooks, wrapper)(debugging_hooks.noop_hook))
    for _ in range(3):
        model.zero_grad()
        output = ddp(x.reshape(1, 2)).sum()
        before = rank.collectives()
        output.backward()
        rank.law("no collective", rank.collectives() - before, 0)
        rank.law("its own, rounded", model.weight.grad, x.half().float().reshape(1, 2))


@case(
    "shipped_hooks.fp16_of_doubles",
    level=MUST,
    source=f"{FILE}: casts it back to the input data type",
    each={
        "python": default_hooks.fp16_compress_hook,
        "wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        "built_in": BUILTIN.FP16_COMPRESS,
    },
    catalogue=("J02", "J04"),
)
def test_the_fp16_hook_compresses_double_precision(rank, hook):
    """
    Under the fp16 hook gradients in double precision are averaged in half precision as well, beside others in single precision, and each keeps its dtype.
    """
    model = Scalars("a", "b", dtype=torch.float64)
    model.a = torch.nn.Parameter(torch.ones(1))
    ddp = rank.wrap(model)
    register(ddp, hook)
    fed = [rank.tensor(2049 * (1 + 2 * r), dtype=torch.float64) for r in range(rank.world_size)]
    mean = sum(each.half() / rank.world_size for each in fed)
    for _ in range(3):
        model.zero_grad()
        ddp(fed[rank.index]).backward()
        rank.law("the single one is the half-precision mean", model.a.grad, mean.float())
        rank.law("the double one is the half-precision mean", model.b.grad, mean.double())


@case(
    "shipped_hooks.fp16_options",
    level=MUST,
    source=f"{FILE}: casts it back to the input data type",
    each={
        f"{kind}_{name}": (hook, options)
        for kind, hook in (("python", default_hooks.fp16_compress_hook), ("built_in", BUILTIN.FP16_COMPRESS))
        for name, options in (
            ("view", {"gradient_as_bucket_view": True}),
            ("find_unused", {"find_unused_parameters": True}),
            ("static_graph", {"static_graph": True}),
        )
    },
    catalogue=("J02", "J04"),
)
def test_options_change_nothing_about_compression(rank, setting):
    """Under every option the fp16 hook compresses in each iteration: gradients are the half-precision mean."""
    hook, options = setting
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    register(ddp, hook)
    fed = [rank.tensor(2049 * (1 + 2 * r)) for r in range(rank.world_size)]
    mean = sum(each.half() / rank.world_size for each in fed).float()
    for _ in range(4):
        model.zero_grad()
        ddp(fed[rank.index]).backward()
        rank.law("the half-precision mean", [model.a.grad, model.b.grad], [mean, mean.clone()])


@case(
    "shipped_hooks.built_in_in_a_group",
    level=MUST,
    source="nn/parallel/distributed.py: The process group to be used for distributed data all-reduction.",
    each={"allreduce": BUILTIN.ALLREDUCE, "fp16": BUILTIN.FP16_COMPRESS},
    needs=("_register_builtin_comm_hook",),
    world=3,
    catalogue=("A04", "J04"),
)
def test_a_built_in_hook_reduces_within_the_group_of_the_ddp(rank, hook):
    """A built-in hook reduces within the process group that DDP was given, and divides by its size."""
    members = (1, 2)
    group = dist.new_group(list(members))
    if rank.index not in members:
        return
    model = linear(1)
    ddp = rank.wrap(model, process_group=group)
    ddp._register_builtin_comm_hook(hook)
    for _ in range(3):
        model.zero_grad()
        ddp(rank.batch(1) * 2).sum().backward()
        rank.law("the group's mean", model.weight.grad, rank.mean(lambda r: rank.batch(1, of=r) * 2, members))
