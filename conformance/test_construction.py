"""What the constructor accepts and refuses, and what the wrapper is afterwards."""

import warnings

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from ddp_conformance.subject import NoData
from torch import nn

DOCUMENTED = "DistributedDataParallel"
REFUSED = r"DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient"
ONE_DEVICE = r"device_ids and output_device arguments only work with"
CPU = ("*:cpu",)
CUDA = ("*:cuda",)


@case("construction.needs_a_group", level=MUST, source=DOCUMENTED, group=False, catalogue=("A01",))
def test_without_a_process_group_the_constructor_is_refused(rank):
    """Without an initialized process group the constructor is refused."""
    with rank.raises("no_group", ValueError, RuntimeError, match=r"Default process group has not been initialized"):
        rank.wrap(linear())
    rank.law("no group has been made on the way", dist.is_initialized(), False)


@case("construction.attributes", level=MUST, source=DOCUMENTED, world=(1, 2))
def test_the_wrapper_holds_the_module_itself(rank):
    """The wrapper's attribute `module` is the very module that was handed in, and its parameters are the wrapper's."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    rank.law("module is the module", ddp.module is model, True)
    rank.law("names carry the prefix", [name for name, _ in ddp.named_parameters()], ["module.a", "module.b"])
    rank.law("the forward is the module's", ddp(rank.batch(1)), model(rank.batch(1)).detach().clone())


@case(
    "construction.needs_a_trainable_parameter",
    level=MUST,
    source="nn/parallel/distributed.py: doesn't have any parameter that requires a gradient",
    each={"no_parameter": 0, "all_frozen": 2},
    catalogue=("A10",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_DistributedDataParallel_requires_grad",),
    reports=("pytorch/pytorch#25550", "pytorch/pytorch#41790"),
)
def test_a_module_without_a_trainable_parameter_is_refused(rank, count):
    """A module without any parameter that requires a gradient is refused, whether it has none or all are frozen."""
    model = Scalars(*"ab"[:count]).requires_grad_(False)
    with rank.raises("nothing_to_train", RuntimeError, match=REFUSED):
        rank.wrap(model)
    rank.law("no collective was started", rank.collectives(), 0)


@case(
    "construction.lazy_parameters",
    level=MUST,
    source="nn/parallel/distributed.py: Modules with uninitialized parameters can't be used",
    catalogue=("A11",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_with_lazy_parameters",),
)
def test_uninitialized_parameters_are_refused_until_a_first_forward(rank):
    """A module with lazy, uninitialized parameters is refused; after one forward it is accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older releases: lazy modules are a new feature
        model = nn.LazyLinear(1, bias=False).to(rank.device)
    with rank.raises("uninitialized", RuntimeError, match=r"Modules with uninitialized parameters can't be used"):
        rank.wrap(model)
    model(rank.batch(2))
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("then it trains", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


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


@case("construction.check_reduction", level=MUST, source=DOCUMENTED, needs=("check_reduction",), catalogue=("A21",))
def test_check_reduction_is_deprecated_and_changes_nothing(rank):
    """check_reduction is deprecated: it warns, and gradients are the same means as without it."""
    model = linear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = rank.wrap(model, check_reduction=True)
    told = [warning for warning in caught if "check_reduction" in str(warning.message)]
    rank.law("there is one warning", len(told), 1)
    rank.show("category", told[0].category)
    ddp(rank.batch(2)).sum().backward()
    rank.law("gradients are means", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case(
    "construction.shared_parameters_count_once",
    level=OBSERVED,
    source="nn/parallel/distributed.py: # Deduplicate any parameters that might be shared across child modules.",
    catalogue=("A22",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_weight_sharing",),
    reports=("pytorch/pytorch#41324", "pytorch/pytorch#46755"),
)
def test_a_shared_parameter_counts_once(rank):
    """A parameter with two names is one parameter to DDP: it is reduced once, and its gradient is the mean of the sum of both uses."""
    model = nn.Sequential(linear(1, dtype=torch.float64, start=2.0), linear(1, dtype=torch.float64))
    model[1].weight = model[0].weight
    ddp = rank.wrap(model)
    carried = rank.buckets(ddp)
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1, dtype=torch.float64)).sum().backward()
        # The product of two equal weights w and the input x: its slope in w is 2wx, and w is 2.
        expected = rank.mean(lambda r: 4 * rank.batch(1, of=r, dtype=torch.float64))
        rank.law(f"both uses are in the mean of iteration {step}", model[0].weight.grad, expected)
    rank.law("it is carried once an iteration", carried, ["0"] * 4)
    rank.show("logged", rank.log(ddp, "num_parameter_tensors"))


@case(
    "construction.frozen_parameters_stay_out",
    level=OBSERVED,
    source="nn/parallel/distributed.py: if param.requires_grad",
    catalogue=("A03",),
    torch_tests=(
        "distributed_test.py::DistributedTest._DistTestBase::test_ddp_build_debug_param_to_name_mapping_requires_grad",
    ),
    reports=("pytorch/pytorch#14675",),
)
def test_frozen_parameters_never_enter_a_bucket(rank):
    """Frozen parameters are neither counted nor reduced, so that one of a dtype of its own (int32) delays no bucket."""
    model = Scalars("a", "b")
    model.register_parameter("table", nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False))
    model.b.requires_grad_(False)
    ddp = rank.wrap(model)
    carried = rank.buckets(ddp)
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law(
            f"the trainable one is reduced in iteration {step}",
            model.a.grad,
            rank.mean(lambda r: rank.batch(1, of=r))[0],
        )
    rank.law("only the trainable one is carried", carried, ["0"] * 4)
    rank.law("frozen ones have no gradient", [model.b.grad, model.table.grad], [None, None])
    rank.show("logged", rank.log(ddp, "num_parameter_tensors", "total_parameter_size_bytes"))


@case(
    "construction.sync_batch_norm",
    level=MUST,
    source="nn/parallel/distributed.py: SyncBatchNorm layers only work with GPU modules",
    lanes=CPU,
    catalogue=("A23",),
    reports=("pytorch/pytorch#62967", "pytorch/pytorch#64039"),
)
def test_sync_batch_norm_on_the_cpu_is_refused(rank):
    """A module on the CPU that has a SyncBatchNorm layer is refused."""
    with rank.raises("syncbatchnorm", ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        rank.wrap(nn.Sequential(linear(2, 2), nn.SyncBatchNorm(2)))


FLAGS = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
}


@case(
    "construction.zero_size",
    level=OBSERVED,
    source=DOCUMENTED,
    each=FLAGS,
    catalogue=("A24",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_zero_output_features",),
    reports=("pytorch/pytorch#87280", "pytorch/pytorch#87793"),
)
def test_a_parameter_without_elements_is_accepted(rank, options):
    """A parameter without elements is accepted under every flag: it gets a gradient without elements, and its neighbours get theirs."""
    model = nn.Sequential(linear(2, 2), nn.Linear(2, 0, bias=False))
    ddp = rank.wrap(Both(model), **options)
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(2)).backward()
        expected = rank.mean(lambda r: rank.batch(2, of=r, rows=2))
        rank.law(f"the neighbour's gradient is the mean in iteration {step}", model[0].weight.grad, expected)
        rank.law(
            f"the empty gradient has the shape in iteration {step}",
            model[1].weight.grad,
            model[1].weight.detach().clone(),
        )


class Both(nn.Module):
    """The sum of what a pair of modules puts out, one after the other."""

    def __init__(self, pair: nn.Sequential) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.pair[0](x)
        return between.sum() + self.pair[1](between).sum()


@case("construction.outside_the_group", level=OBSERVED, source=DOCUMENTED, world=3, group_timeout=1, catalogue=("U23",))
def test_a_rank_outside_the_group_is_refused(rank):
    """A rank that is no member of the group it hands over is refused, not by a check of DDP's own but by a type error underneath."""
    group = dist.new_group([1, 2])
    model = linear(2, start=1.0 + rank.index)
    if rank.index == 0:
        with rank.raises(
            "a_stranger",
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            match="incompatible function arguments|Invalid process group",
        ):
            rank.wrap(model, process_group=group)
    else:
        rank.wrap(model, process_group=group)
        rank.law("members are not disturbed", model.weight, linear(2, start=2.0).to(rank.device).weight)


@case(
    "construction.wrapped_twice",
    level=OBSERVED,
    source=DOCUMENTED,
    world=(2, 3),
    reports=("pytorch/pytorch#170678", "huggingface/transformers#10583"),
)
def test_a_module_wrapped_twice_gets_the_right_gradients_at_twice_the_price(rank):
    """A wrapper wrapped again gives the same gradients, for the mean of equal values is that value, and twice the all-reduces."""
    model = linear(2)
    ddp = rank.wrap(rank.wrap(model))
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        output = ddp(rank.batch(2)).sum()
        before = rank.collectives()
        output.backward()
        rank.law(f"iteration {step} starts two all-reduces", rank.collectives() - before, 2)
        rank.law(
            f"the gradient of iteration {step} is the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r))
        )


@case(
    "construction.rewrapped",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: void remove_autograd_hooks();",
    catalogue=("B18",),
    torch_tests=(
        "test_c10d_nccl.py::DistributedDataParallelTest::test_failure_recovery",
        "distributed_test.py::DistributedTest._DistTestBase::test_ddp_remove_autograd_hooks",
    ),
)
def test_after_a_failure_the_module_can_be_wrapped_anew(rank):
    """A wrapper that has failed can be deleted and its module wrapped anew: the old one leaves no hook behind, and training goes on.

    The failure is a parameter without gradient, which the second forward of the first wrapper raises.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    ddp(rank.batch(1), use="a").backward()
    with rank.raises(
        "an_unfinished_reduction", RuntimeError, match="Expected to have finished reduction in the prior iteration"
    ):
        ddp(rank.batch(1), use="a")
    del ddp
    ddp = rank.wrap(model)
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        output = ddp(rank.batch(1))
        before, refusal = rank.collectives(), None
        try:
            output.backward()
        except RuntimeError as error:
            refusal = str(error)
        rank.law(f"no hook of the old wrapper stands in the way in iteration {step}", refusal, None)
        mean = rank.mean(lambda r: rank.batch(1, of=r))[0]
        rank.law(f"gradients are means in iteration {step}", [model.a.grad, model.b.grad], [mean, mean])
        rank.law(f"one reducer is at work in iteration {step}", rank.collectives() - before, 1)
