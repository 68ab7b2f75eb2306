"""What the constructor accepts and refuses, and what the wrapper is afterwards."""

import warnings

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

DOCUMENTED = "DistributedDataParallel"
REFUSED = r"DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient"
CPU = ("*:cpu",)


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
    """A module without any parameter that requires a gradient is refused before anything is sent, whether it has none or all are frozen."""
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
