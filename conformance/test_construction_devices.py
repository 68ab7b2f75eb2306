"""Where a module may be, and which ranks it is shared with: device ids, devices, groups and meshes."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear
from ddp_conformance.subject import NoData
from torch import nn

DOCUMENTED = "DistributedDataParallel"
ONE_DEVICE = r"device_ids and output_device arguments only work with"
CPU = ("*:cpu",)
CUDA = ("*:cuda",)


@case(
    "construction.one_device_id",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("A12",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_nccl_backend_multi_device_ids_not_allowed",),
)
def test_more_than_one_device_id_is_refused(rank):
    """device_ids may name one device at most: two are refused."""
    with rank.raises("two_devices", ValueError, match="device_ids can only be None or contain a single element"):
        rank.wrap(linear(), device_ids=[0, 1])


@case(
    "construction.no_device_ids",
    level=OBSERVED,
    source="nn/parallel/distributed.py: # For backward compatibility.",
    lanes=CPU,
    catalogue=("A12",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_nccl_backend_empty_device_ids",),
)
def test_an_empty_list_of_device_ids_is_none(rank):
    """An empty list of device_ids means the same as None."""
    model = linear()
    ddp = rank.wrap(model, device_ids=[])
    rank.law("device_ids is None", ddp.device_ids, None)
    ddp(rank.batch(2)).sum().backward()
    rank.law("gradients are means", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case(
    "construction.cpu_takes_no_device",
    level=MUST,
    source=DOCUMENTED,
    each={"device_ids": {"device_ids": [0]}, "output_device": {"output_device": 1}},
    lanes=CPU,
    catalogue=("A13",),
)
def test_a_module_on_the_cpu_takes_no_device(rank, options):
    """For a module on the CPU device_ids and output_device must be None: a device is refused."""
    with rank.raises("a_device", ValueError, match=ONE_DEVICE):
        rank.wrap(linear(), **options)


@case(
    "construction.output_device_zero",
    level=HAZARD,
    source=DOCUMENTED,
    lanes=CPU,
    catalogue=("A13", "U22"),
)
def test_output_device_zero_slips_through_on_the_cpu(rank):
    """For a module on the CPU output_device "must be None", says the documentation; 0 is accepted all the same, and ignored.

    The check asks whether the argument is true, and 0 is not.
    """
    model = linear()
    ddp = rank.wrap(model, output_device=0)
    rank.law("it is ignored", ddp.output_device, None)
    ddp(rank.batch(2)).sum().backward()
    rank.law("gradients are means", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case(
    "construction.multi_device",
    level=MUST,
    source=DOCUMENTED,
    each={"device_ids": {"device_ids": [0]}, "output_device": {"output_device": 1}},
    world=1,
    needs=("device:cuda",),
    lanes=CUDA,
    catalogue=("A13",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_multi_device_module_config",),
)
def test_a_module_on_several_devices_takes_no_device(rank, options):
    """For a module that lies on several GPUs device_ids and output_device must be None: a device is refused. It needs two GPUs."""
    if torch.cuda.device_count() < 2:
        raise NoData("needs two GPUs")
    model = nn.Sequential(linear(2, 2).to("cuda:0"), linear(2, 1).to("cuda:1"))
    with rank.raises("a_device", ValueError, match=ONE_DEVICE):
        rank.wrap(model, stay=True, **options)


@case(
    "construction.one_device_type",
    level=MUST,
    source="nn/parallel/distributed.py: the same type of devices, but input module parameters locate in",
    catalogue=("A14",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_multi_device_module_config",),
)
def test_parameters_on_several_types_of_device_are_refused(rank):
    """A module whose parameters lie on devices of more than one type, here meta besides the lane's own, is refused."""
    model = nn.Sequential(linear(2, 2).to(rank.device), linear(2, 1).to("meta"))
    with rank.raises("two_types", ValueError, match="input module must be on the same type of devices"):
        rank.wrap(model, stay=True)


@case(
    "construction.device_mesh",
    level=MUST,
    source="nn/parallel/distributed.py: Only 1D device mesh is supported",
    world=(2, 3),
    needs=("device_mesh", "torch.distributed.device_mesh.init_device_mesh"),
    catalogue=("A15",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_device_mesh_initialization",),
)
def test_a_mesh_of_one_dimension_stands_for_its_group(rank):
    """A device mesh of one dimension may be given instead of a process group: weights come from its first rank, gradients are means over it."""
    mesh = dist.device_mesh.init_device_mesh(rank.device.type, (rank.world_size,))
    model = linear(2, start=1.0 + rank.index)
    ddp = rank.wrap(model, device_mesh=mesh)
    rank.law("weights are the first rank's", model.weight, linear(2, start=1.0).to(rank.device).weight)
    ddp(rank.batch(2)).sum().backward()
    rank.law("gradients are means", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
    rank.show("logged", rank.log(ddp, "rank", "world_size"))


@case(
    "construction.device_mesh_part",
    level=MUST,
    source="nn/parallel/distributed.py: self.process_group = device_mesh.get_group(mesh_dim=0)",
    world=4,
    needs=("device_mesh", "torch.distributed.device_mesh.init_device_mesh"),
    catalogue=("A15",),
)
def test_a_row_of_a_mesh_stands_for_its_own_group(rank):
    """One dimension of a larger device mesh, taken by name, trains as a group of its own: ranks 0, 2 and 1, 3 of a 2 by 2 mesh."""
    whole = dist.device_mesh.init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("replica", "other"))
    model = linear(2, start=1.0 + rank.index)
    first = rank.index % 2
    ddp = rank.wrap(model, device_mesh=whole["replica"])
    rank.law(
        "weights are the first rank's of the column", model.weight, linear(2, start=1.0 + first).to(rank.device).weight
    )
    ddp(rank.batch(2)).sum().backward()
    rank.law(
        "gradients are means over it", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r), (first, first + 2))
    )


@case(
    "construction.mesh_of_two_dimensions",
    level=MUST,
    source="nn/parallel/distributed.py: Only 1D device mesh is supported",
    world=4,
    needs=("device_mesh", "torch.distributed.device_mesh.init_device_mesh"),
    catalogue=("A15",),
)
def test_a_mesh_of_two_dimensions_is_refused(rank):
    """A device mesh of two dimensions is refused."""
    mesh = dist.device_mesh.init_device_mesh(rank.device.type, (2, 2))
    with rank.raises("two_dimensions", RuntimeError, match="Only 1D device mesh is supported"):
        rank.wrap(linear(), device_mesh=mesh)


@case(
    "construction.group_or_mesh",
    level=MUST,
    source="nn/parallel/distributed.py: Cannot specify both process_group and device_mesh arguments",
    needs=("device_mesh", "torch.distributed.device_mesh.init_device_mesh"),
    catalogue=("A15",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_device_mesh_initialization",),
)
def test_a_group_and_a_mesh_together_are_refused(rank):
    """A process group and a device mesh exclude each other: both together are refused."""
    mesh = dist.device_mesh.init_device_mesh(rank.device.type, (rank.world_size,))
    with rank.raises("both", RuntimeError, match="Cannot specify both process_group and device_mesh"):
        rank.wrap(linear(), process_group=mesh.get_group(), device_mesh=mesh)
