"""Without find_unused_parameters every parameter must get a gradient in every backward; one that does not is missed late."""

import os

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, TwoHeads

ASSERTS = "include/torch/csrc/distributed/c10d/reducer.hpp: Asserts that the reduction for the previous iteration"
NAMES = "include/torch/csrc/distributed/c10d/reducer.hpp: parameter names that have not been marked as ready"
INDICES = "include/torch/csrc/distributed/c10d/reducer.hpp: parameter indices that have not been marked as ready"
UNFINISHED = "Expected to have finished reduction in the prior iteration"
FAMILY = ("pytorch/pytorch#22049", "pytorch/pytorch#57473", "pytorch/pytorch#68862")


def refusal(call):
    """The message of the RuntimeError that the call ends with, or ""."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def one_bucket_each():
    """The options that put each parameter in a bucket of its own once buckets are rebuilt, on every release."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # some releases use it for the first bucket whatever the cap
    return {"bucket_cap_mb": 1e-6}


@case(
    "missing_gradient.next_forward_raises",
    level=MUST,
    source=ASSERTS,
    world=(1, 2, 3),
    catalogue=("E01",),
    torch_tests=(
        "distributed_test.py::DistributedTest._DistTestBase::test_ddp_unused_params_rebuild_buckets_exception",
    ),
    reports=FAMILY,
)
def test_the_forward_after_a_missing_gradient_raises(rank):
    """Without find_unused_parameters a parameter that gets no gradient makes the next forward raise on every rank; the backward itself says nothing."""
    ddp = rank.wrap(Scalars("a", "b"))
    ddp(rank.batch(1), use="a").backward()
    with rank.raises("the_next_forward", RuntimeError, match=UNFINISHED):
        ddp(rank.batch(1), use="a")


@case("missing_gradient.message_lists_indices", level=MUST, source=INDICES, world=3, catalogue=("E01",), reports=FAMILY)
def test_the_message_lists_what_this_rank_did_not_use(rank):
    """The error lists the indices of the parameters that got no gradient on this rank, counted over those that require one."""
    model = Scalars("frozen", "a", "b", "c", "d")
    model.frozen.requires_grad_(False)
    ddp = rank.wrap(model)
    unused = "bcd"[: rank.index + 1]
    used = tuple(name for name in "abcd" if name not in unused)
    ddp(rank.batch(1), use=used).backward()
    message = refusal(lambda: ddp(rank.batch(1), use=used))
    listed = message.partition(f"indices which did not receive grad for rank {rank.index}: ")[2].split("\n")[0].split()
    rank.show("indices", listed[: len(unused)])
    rank.law("those this rank left out", listed[: len(unused)], [str("abcd".index(name)) for name in unused])


@case(
    "missing_gradient.message_names_parameters",
    level=MUST,
    source=NAMES,
    needs=("torch.distributed.set_debug_level",),
    catalogue=("E02",),
    each={"off": "OFF", "info": "INFO", "detail": "DETAIL"},
    torch_tests=(
        "distributed_test.py::DistributedTest._DistTestBase::test_ddp_unused_params_rebuild_buckets_exception",
    ),
    reports=("pytorch/pytorch#70667",),
)
def test_the_message_names_the_parameters_at_a_debug_level(rank, level):
    """The error names the parameters when the debug level is INFO or DETAIL while DDP is constructed; at OFF it says which variable to set."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    ddp = rank.wrap(Scalars("a", "spare"))
    ddp(rank.batch(1), use="a").backward()
    message = refusal(lambda: ddp(rank.batch(1), use="a"))
    rank.law("the name is given above OFF", ".spare" in message, level != "OFF")
    rank.law("the variable is named at OFF", "TORCH_DISTRIBUTED_DEBUG" in message, level == "OFF")


@case(
    "missing_gradient.names_at_detail",
    level=MUST,
    source=NAMES,
    env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    world=1,  # a fresh interpreter each
    catalogue=("E02",),
    reports=("pytorch/pytorch#70667",),
)
def test_the_variable_that_the_message_recommends_makes_it_name_the_parameters(rank):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment, as the error itself recommends, the error names the parameters.

    Under DETAIL every process group is wrapped by one that checks collectives, and on some releases no DDP can be
    constructed on a wrapped gloo group. Setting the level inside the program, as the cases above do, wraps nothing.
    """
    ddp = rank.wrap(Scalars("a", "spare"))
    ddp(rank.batch(1), use="a").backward()
    message = refusal(lambda: ddp(rank.batch(1), use="a"))
    rank.law("the name is given", ".spare" in message, True)


@case(
    "missing_gradient.variable_is_read_at_import",
    level=OBSERVED,
    source="torch.distributed.set_debug_level_from_env",
    needs=("torch.distributed.set_debug_level_from_env",),
    world=1,
    catalogue=("E02",),
    reports=("pytorch/pytorch#70667",),
)
def test_the_variable_has_no_effect_after_the_import_of_torch(rank):
    """TORCH_DISTRIBUTED_DEBUG set after the import of torch is ignored until set_debug_level_from_env is called."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    rank.law("the level stays OFF", dist.get_debug_level() == dist.DebugLevel.OFF, True)
    dist.set_debug_level_from_env()
    rank.law("the level is INFO once it is read again", dist.get_debug_level() == dist.DebugLevel.INFO, True)
    ddp = rank.wrap(Scalars("a", "spare"))
    ddp(rank.batch(1), use="a").backward()
    message = refusal(lambda: ddp(rank.batch(1), use="a"))
    rank.law("the name is given", ".spare" in message, True)


@case(
    "missing_gradient.stays_local",
    level=HAZARD,
    source=ASSERTS,
    world=(2, 3),
    catalogue=("U08",),
    reports=("pytorch/pytorch#128949",),
)
def test_all_gradients_of_the_bucket_stay_local_until_the_error(rank):
    """One missing gradient in the first iteration leaves every gradient local without an error, so that an optimizer step taken then drives the replicas apart.

    The first iteration has a single bucket, which waits for the missing one. A script of one iteration never learns of it.
    """
    model = Scalars("a", "b", "c")
    ddp = rank.wrap(model)
    ddp(rank.batch(1), use=("a", "c")).backward()
    rank.law("every gradient is the rank's own", [model.a.grad, model.c.grad], [rank.batch(1)[0], rank.batch(1)[0]])
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    rank.show("weights_after_a_step", list(model.parameters()))


@case("missing_gradient.later_buckets_wait", level=HAZARD, source=ASSERTS, catalogue=("U08",))
def test_no_bucket_comes_home_when_one_is_incomplete(rank):
    """With several buckets one missing gradient leaves those of every bucket local, also of the buckets that were reduced before it.

    Results are copied from the buckets to the gradients when all are reduced.
    """
    model = Scalars("a", "b", "c")
    ddp = rank.wrap(model, **one_bucket_each())
    carried = rank.buckets(ddp)
    ddp(rank.batch(1)).backward()
    model.zero_grad(set_to_none=True)
    carried.clear()
    ddp(rank.batch(1), use=("a", "c")).backward()
    rank.law("c's bucket alone was reduced", carried, ["2"])
    rank.law("every gradient is the rank's own", [model.a.grad, model.c.grad], [rank.batch(1)[0], rank.batch(1)[0]])


@case(
    "missing_gradient.error_precedes_rebuild",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: rebuilding buckets or kicking off the next one",
    catalogue=("E01",),
    each={"first_iteration": 0, "third_iteration": 2},
    reports=("pytorch/pytorch#45933", "pytorch/pytorch#46099"),
)
def test_the_error_speaks_of_the_missing_gradient_and_not_of_the_buckets(rank, complete):
    """The error speaks of the missing gradient, and not of the buckets, before they were rebuilt and after."""
    ddp = rank.wrap(Scalars("a", "b", "c"), **one_bucket_each())
    for _ in range(complete):
        ddp(rank.batch(1)).backward()
    ddp(rank.batch(1), use=("a", "c")).backward()
    with rank.raises("the_next_forward", RuntimeError, match=UNFINISHED):
        ddp(rank.batch(1))


@case("missing_gradient.raised_by_forwards_with_grad", level=OBSERVED, source=ASSERTS, catalogue=("U09",))
def test_a_forward_without_grad_passes_and_one_inside_no_sync_raises(rank):
    """After a missing gradient a forward under no_grad passes, and one inside no_sync raises."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    ddp(rank.batch(1), use="a").backward()
    with torch.no_grad():
        rank.law("no_grad computes", ddp(rank.batch(1), use="a"), rank.batch(1).sum())
    with rank.raises("inside_no_sync", RuntimeError, match=UNFINISHED), ddp.no_sync():
        ddp(rank.batch(1), use="a")


@case(
    "missing_gradient.found_at_once",
    level=MUST,
    source="DistributedDataParallel._check_reducer_finalized",
    needs=("_check_reducer_finalized",),
    catalogue=("E12",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_has_finalized",),
    reports=("pytorch/pytorch#128949",),
)
def test_check_reducer_finalized_raises_right_after_an_incomplete_backward(rank):
    """_check_reducer_finalized raises right after a backward that missed a gradient, and passes after a complete one."""
    ddp = rank.wrap(Scalars("a", "b"))
    for _ in range(2):
        ddp(rank.batch(1)).backward()
        rank.law("a complete backward passes", ddp._check_reducer_finalized(), None)
    ddp(rank.batch(1), use="a").backward()
    with rank.raises("an_incomplete_backward", RuntimeError, match=UNFINISHED):
        ddp._check_reducer_finalized()


@case(
    "missing_gradient.logged",
    level=OBSERVED,
    source="DistributedDataParallel._get_ddp_logging_data",
    catalogue=("E01",),
)
def test_the_error_is_in_the_logging_data(rank):
    """After the error the logging data have has_error 1 and the message."""
    ddp = rank.wrap(Scalars("a", "b"))
    before = rank.log(ddp, "has_error")
    ddp(rank.batch(1), use="a").backward()
    message = refusal(lambda: ddp(rank.batch(1), use="a"))
    rank.show("before", before)
    rank.show("after", rank.log(ddp, "has_error"))
    rank.law("the logged message is the one raised", rank.log(ddp, "error")["error"][:100], message[:100])


@case(
    "missing_gradient.output_left_out_of_loss",
    level=MUST,
    source=ASSERTS,
    catalogue=("E06",),
    reports=("pytorch/pytorch#22436",),
)
def test_an_output_left_out_of_the_loss_is_a_missing_gradient(rank):
    """Without find_unused_parameters an output left out of the loss makes the next forward raise."""
    ddp = rank.wrap(TwoHeads())
    ddp(rank.batch(1))[0].sum().backward()
    with rank.raises("the_next_forward", RuntimeError, match=UNFINISHED):
        ddp(rank.batch(1))


@case(
    "missing_gradient.alternating_networks",
    level=HAZARD,
    source=ASSERTS,
    catalogue=("E01",),
    reports=("Lightning-AI/pytorch-lightning#20866", "Lightning-AI/pytorch-lightning#20328"),
)
def test_two_networks_in_one_ddp_do_not_train_in_turns(rank):
    """Without find_unused_parameters two networks in one DDP, trained in turns as a GAN's are, stay local in the first turn and raise in the second."""
    model = Scalars("generator", "discriminator")
    ddp = rank.wrap(model)
    ddp(rank.batch(1), use="discriminator").backward()
    rank.law("the first turn's gradient is the rank's own", model.discriminator.grad, rank.batch(1)[0])
    with rank.raises("the_second_turn", RuntimeError, match=UNFINISHED):
        ddp(rank.batch(1), use="generator")
