"""What is refused is refused wherever in the module it is, frozen or deep inside; gradients that are there already stay."""

from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import linear
from torch import nn


@case(
    "construction.lazy_and_frozen",
    level=MUST,
    source="nn/parallel/distributed.py: Modules with uninitialized parameters can't be used",
    world=1,
    catalogue=("A11",),
)
def test_uninitialized_parameters_are_refused_though_frozen(rank):
    """A module with lazy, uninitialized parameters is refused though these are frozen and deep inside, and others are trained."""
    lazy = nn.ParameterList([nn.parameter.UninitializedParameter(requires_grad=False)])
    with rank.raises("uninitialized", RuntimeError, match=r"Modules with uninitialized parameters can't be used"):
        rank.wrap(nn.Sequential(linear(2, 2), nn.Sequential(linear(2, 2), lazy)))


@case(
    "construction.sync_batch_norm_inside",
    level=MUST,
    source="nn/parallel/distributed.py: SyncBatchNorm layers only work with GPU modules",
    world=1,
    lanes=("*:cpu",),
    catalogue=("A23",),
    reports=("pytorch/pytorch#62967",),
)
def test_sync_batch_norm_deep_inside_is_refused(rank):
    """A module on the CPU that has a SyncBatchNorm layer deep inside, and without parameters, is refused."""
    with rank.raises("syncbatchnorm", ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        rank.wrap(nn.Sequential(linear(2, 2), nn.Sequential(nn.Sequential(nn.SyncBatchNorm(2, affine=False)))))


@case(
    "construction.one_device_type_frozen",
    level=MUST,
    source="nn/parallel/distributed.py: the same type of devices, but input module parameters locate in",
    world=1,
    catalogue=("A14",),
)
def test_a_frozen_parameter_on_another_type_of_device_is_refused(rank):
    """A module is refused where a frozen parameter lies on another type of device, here meta, than those that are trained."""
    model = nn.Sequential(linear(2, 2).to(rank.device), linear(2, 1).to("meta").requires_grad_(False))
    with rank.raises("two_types", ValueError, match="input module must be on the same type of devices"):
        rank.wrap(model, stay=True)


@case("construction.gradients_stay", level=OBSERVED, source="DistributedDataParallel", catalogue=("B01",))
def test_gradients_from_before_wrapping_stay(rank):
    """A gradient that a parameter has when it is wrapped stays, and the next backward reduces it with what it adds, as what has accumulated."""
    model = linear(2)
    model(rank.batch(2)).sum().backward()
    ddp = rank.wrap(model)
    rank.law("the rank's own", model.weight.grad, rank.batch(2))
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean of both", model.weight.grad, 2 * rank.mean(lambda r: rank.batch(2, of=r)))
