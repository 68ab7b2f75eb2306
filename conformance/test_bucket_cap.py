"""How `bucket_cap_mb` divides gradients into all-reduces, and what it does not change."""

import os

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, three_layers
from ddp_conformance.rank import mean_all_reduce
from ddp_conformance.reference import DEFAULT_LIMIT, MIB, every_bucket

CPU_LOGGING = "distributed_test.py::DistributedTest._DistTestBase::test_ddp_logging_data_cpu"


def reductions(rank, model, iterations=2, **options):
    """What each all-reduce of so many iterations carries; with a cap, those after the first are rebuilt by it."""
    ddp = rank.wrap(model, **options)
    buckets = rank.buckets(ddp)
    for _ in range(iterations):
        ddp(rank.batch(512 if isinstance(model, torch.nn.Sequential) else 1)).sum().backward()
    return buckets


@case(
    "bucket_cap.default",
    level=MUST,
    source="DistributedDataParallel",
    world=1,
    needs=("_get_ddp_logging_data", "register_comm_hook"),
    catalogue=("H01",),
    torch_tests=(CPU_LOGGING,),
    reports=("meta-pytorch/torchrec#964",),
)
def test_the_default_cap_is_25_mebibytes(rank):
    """
    Without `bucket_cap_mb` the cap is 25 MiB.

    A wrapper that does not hand the argument on gets this one. In float16: after the first bucket of 1 MiB come 24 MiB and 1
    MiB less an element, which are short of the cap, one element, which reaches it, and one more.
    """
    model = Scalars(*"abcde", dtype=torch.float16)
    elements = [MIB // 2, 12 * MIB, MIB // 2 - 1, 1, 1]
    for parameter, count in zip(model.parameters(), elements, strict=True):
        parameter.data = torch.ones(1, dtype=torch.float16).expand(count).clone()
    ddp = rank.wrap(model)
    buckets = rank.buckets(ddp)
    for _ in range(2):
        ddp(rank.batch(1, dtype=torch.float16), use=tuple("edcba")).backward()
    rank.show("buckets", buckets[1:])
    rank.law("the cap in bytes", rank.log(ddp, "bucket_cap_bytes"), {"bucket_cap_bytes": DEFAULT_LIMIT})
    rank.law("closed by the element that makes 25 MiB", buckets[1:], ["0", "1 2 3", "4"])


@case(
    "bucket_cap.mebibytes",
    level=MUST,
    source="DistributedDataParallel",
    each={"one": 1, "half": 0.5, "one_and_a_half": 1.5, "eight_bytes": 8 / MIB, "hundred": 100},
    needs=("_get_ddp_logging_data",),
    catalogue=("H01",),
    torch_tests=(CPU_LOGGING,),
)
def test_the_cap_is_in_mebibytes_and_may_be_a_fraction(rank, cap):
    """`bucket_cap_mb` is in MiB of 1048576 bytes, and may be a fraction."""
    ddp = rank.wrap(Scalars("a"), bucket_cap_mb=cap)
    ddp(rank.batch(1)).backward()
    told = rank.log(ddp, "bucket_cap_bytes")["bucket_cap_bytes"]
    rank.show("bytes", told)
    rank.law("so many bytes", told, round(cap * 1048576))


@case(
    "bucket_cap.number_and_sizes",
    level=OBSERVED,
    source="DistributedDataParallel",
    each={"half_mib": 0.5, "one_mib": 1, "one_and_a_bit": 1.25, "two_mib": 2, "three_mib": 3, "four_mib": 4},
    needs=("register_comm_hook",),
    catalogue=("H01",),
)
def test_the_cap_decides_how_many_all_reduces_there_are_and_how_large(rank, cap):
    """
    The cap decides how many all-reduces an iteration starts, and the bytes in each: a greedy fill in ready order.

    Three layers of 1 MiB and 2 KiB each. (`dist._DEFAULT_FIRST_BUCKET_BYTES` is the same as the cap here.)
    """
    model = three_layers()
    ddp = rank.wrap(model, **every_bucket(int(cap * MIB)))
    bytes_in = []

    def hook(state, bucket):
        bytes_in.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp(rank.batch(512)).sum().backward()
    rank.show("bytes", bytes_in[1:])
    layer = 4 * (512 * 512 + 512)
    per_bucket = next(layers for layers in (1, 2, 3) if layers * layer >= cap * MIB or layers == 3)
    wanted = [layer * len(range(3)[at : at + per_bucket]) for at in range(0, 3, per_bucket)]
    rank.law("whole layers until the cap is reached", bytes_in[1:], wanted)


@case(
    "bucket_cap.never_split",
    level=OBSERVED,
    source="DistributedDataParallel",
    needs=("register_comm_hook",),
    catalogue=("H01",),
    reports=("pytorch/pytorch#48880",),
)
def test_a_parameter_larger_than_the_cap_is_reduced_whole(rank):
    """
    A parameter larger than the cap is reduced whole, with those that were in its bucket before it: the cap is when a
    bucket closes, and no bound on its size.
    """
    model = Scalars(*"abc")
    model.b.data = torch.ones(1000)
    buckets = reductions(rank, model, **every_bucket(8))
    rank.show("buckets", buckets[1:])
    rank.law("4 and 4000 bytes under a cap of 8", buckets[1:], ["2 1", "0"])


@case(
    "bucket_cap.tiny",
    level=OBSERVED,
    source="nn/parallel/distributed.py: first_bucket_bytes_cap",
    each={"a_millionth": 1e-6, "zero": 0},
    needs=("register_comm_hook",),
    catalogue=("H04",),
    reports=("pytorch/pytorch#48880",),
)
def test_a_tiny_cap_gives_each_parameter_its_own_all_reduce(rank, cap):
    """
    A cap of a byte, or of 0, gives each parameter an all-reduce of its own; on releases where 1 MiB bounds the first
    rebuilt bucket, only those behind it.

    So on those a small model has one bucket whatever the cap. (1e-6 MiB is one byte.)
    """
    buckets = reductions(rank, Scalars(*"abcdef"), bucket_cap_mb=cap)
    rank.show("buckets", buckets[1:])
    rank.law("one each, or all in the first", buckets[1:] in (list("543210"), ["5 4 3 2 1 0"]), True)


@case(
    "bucket_cap.negative",
    level=HAZARD,
    source="DistributedDataParallel",
    needs=("register_comm_hook", "_get_ddp_logging_data"),
    catalogue=("H01",),
)
def test_a_negative_cap_is_accepted_and_means_none(rank):
    """
    A negative cap is accepted, and bounds nothing: it becomes a huge number on its way into C++.
    """
    model = three_layers()
    buckets = reductions(rank, model, bucket_cap_mb=-1)
    rank.show("buckets", buckets[1:])
    unbounded = [["5 4 3 2 1 0"], ["5 4", "3 2 1 0"]]
    rank.law("unbounded, but for the first where 1 MiB bounds it", buckets[1:] in unbounded, True)


@case(
    "bucket_cap.bits_of_two_ranks",
    level=OBSERVED,
    source="DistributedDataParallel",
    catalogue=("U02", "H01"),
    reports=("pytorch/pytorch#30509", "pytorch/pytorch#197890"),
)
def test_with_two_ranks_gradients_are_the_same_bits_under_every_cap(rank):
    """
    With two ranks gradients are the same bits under every cap: half of one plus half of the other, whatever bucket they
    travel in.

    Gradients of float32 with all bits in use, under caps of 25 MiB, 0.5 MiB and a byte, over three iterations each.
    """
    wanted = sum(noise(rank, r) / 2 for r in range(2))
    for cap in (25, 0.5, 1e-6):
        got = under_cap(rank, cap)
        for step, gradient in enumerate(got):
            rank.law(f"step {step} under {cap} MiB: a / 2 + b / 2", gradient, wanted)
    rank.show("elements", wanted.numel())


@case(
    "bucket_cap.bits_of_three_ranks",
    level=HAZARD,
    source="DistributedDataParallel",
    world=3,
    lanes=("gloo:cpu",),
    catalogue=("U02", "H01"),
    reports=("pytorch/pytorch#30509", "pytorch/pytorch#197890"),
)
def test_with_three_ranks_the_last_bits_depend_on_the_cap(rank):
    """
    With three ranks the last bits of a gradient depend on the cap: three numbers are added, and where an element lies in
    its bucket decides which two of them first.

    Every element is one of the three sums of what the ranks have (divided by 3, or multiplied with a third), the same on all
    ranks under one cap, and not always the same sum under another.
    """
    ways = ([noise(rank, r) * (1 / 3) for r in range(3)], [noise(rank, r) / 3 for r in range(3)])
    sums = torch.stack([(way[a] + way[b]) + way[c] for way in ways for a, b, c in ((0, 1, 2), (1, 2, 0), (0, 2, 1))])
    gradients = {}
    for cap in (25, 1e-6):
        first, *others = under_cap(rank, cap)
        gradients[cap] = others[-1]
        for got in (first, others[-1]):
            rank.law(f"a sum that can come out under {cap} MiB", bool((got == sums).any(0).all()), True)
        theirs = gradients[cap].clone()
        dist.broadcast(theirs, 0)
        rank.law(f"all ranks alike under {cap} MiB", gradients[cap], theirs)
    rank.differs("not the same bits under both caps", gradients[25], gradients[1e-6])


def noise(rank, of):
    """What rank `of` feeds: 4 x 1024 numbers of full precision."""
    generator = torch.Generator().manual_seed(of)
    return torch.rand(4096, generator=generator).add_(1).to(rank.device)


def under_cap(rank, cap):
    """The gradients of three iterations under this cap, four parameters in a row."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(cap * MIB)
    model = Scalars(*"abcd")
    for parameter in model.parameters():
        parameter.data = torch.ones(1024, device=rank.device)
    ddp = rank.wrap(Each(model), bucket_cap_mb=cap)
    gradients = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(noise(rank, rank.index)).backward()
        gradients.append(torch.cat([parameter.grad for parameter in model.parameters()]))
    return gradients


class Each(torch.nn.Module):
    """Multiplies every parameter of a module with its own part of the input."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        parts = x.split([parameter.numel() for parameter in self.module.parameters()])
        return sum((p * part).sum() for p, part in zip(self.module.parameters(), parts, strict=True))


@case(
    "bucket_cap.small_bucket_last_by_variable",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: Bytes capacity of first bucket, can be configured by user",
    needs=("register_comm_hook",),
    catalogue=("U21",),
)
def test_a_variable_puts_the_small_bucket_last(rank):
    """
    With DDP_SET_LAST_BUCKET_CAP=1 in the environment, read when buckets are rebuilt, the small first limit bounds the
    bucket reduced last instead of the first.

    The caps are then walked from the last gradient to the first: 4 bytes for the parameter whose gradient is ready last, and
    25 MiB for the rest.
    """
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4
    plain = reductions(rank, Scalars(*"abcd"))
    rank.law("without it the first is small", plain[1:], ["3", "2 1 0"])
    model = Scalars(*"abcd")
    ddp = rank.wrap(model)
    buckets = rank.buckets(ddp)
    ddp(rank.batch(1)).backward()
    os.environ["DDP_SET_LAST_BUCKET_CAP"] = "1"
    ddp(rank.batch(1)).backward()
    rank.show("buckets", buckets[1:])
    sets = [sorted(bucket.split()) for bucket in buckets[1:]]
    rank.law("with it the last is", sets, [["1", "2", "3"], ["0"]])
