"""With find_unused_parameters=True a parameter may stay out of the graph, on some ranks or on all, in any iteration."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, TwoHeads, descend
from ddp_conformance.rank import mean_gradient

USED_MAP = "include/torch/csrc/distributed/c10d/reducer.hpp: figuring out the globally unused parameters"
UNTOUCHED = "nn/parallel/distributed.py: param.grad field is not touched"


def scalars(rank, *names, **ddp_options):
    """Scalars in float64 and the same wrapped, with find_unused_parameters unless told otherwise."""
    model = Scalars(*names, dtype=torch.float64)
    return model, rank.wrap(model, **{"find_unused_parameters": True, **ddp_options})


@case(
    "unused_parameters.training_proceeds",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 3),
    catalogue=("E03",),
    reports=("pytorch/pytorch#22049", "pytorch/pytorch#57473"),
)
def test_training_proceeds_with_a_parameter_outside_the_graph(rank):
    """With find_unused_parameters=True training proceeds while a parameter stays outside the graph, and the others get the mean."""
    model, ddp = scalars(rank, "a", "b")
    for _ in range(4):
        expected = mean_gradient(rank, model, "a", lambda r: ("a",))
        (ddp(rank.batch(1, dtype=torch.float64), use="a") ** 2 / 2).backward()
        rank.law("the used parameter gets the mean", model.a.grad, expected)
        descend(model)
    rank.show("used", model.a)
    rank.show("unused", model.b)


@case(
    "unused_parameters.any_set_on_any_rank",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("E03", "E05"),
)
def test_the_used_set_may_change_by_rank_and_by_iteration(rank):
    """With find_unused_parameters=True each rank may use another set of parameters in each iteration, and each gradient is the mean with zeros where it was not used."""
    model, ddp = scalars(rank, "a", "b", "c", "d")
    for iteration in range(4):

        def used(r, iteration=iteration):
            return [name for place, name in enumerate("abc") if (place + r + iteration) % 3]

        expected = [mean_gradient(rank, model, name, used) for name in "abc"]
        (ddp(rank.batch(1, dtype=torch.float64), use=tuple(used(rank.index))) ** 2 / 2).backward()
        rank.law("each gradient is the mean over all ranks", [model.a.grad, model.b.grad, model.c.grad], expected)
        rank.law("what no rank ever used has no gradient", model.d.grad, None)
        descend(model)
    rank.show("weights", list(model.parameters()))


@case(
    "unused_parameters.alternating_networks",
    level=MUST,
    source="DistributedDataParallel",
    catalogue=("E03", "E04"),
    reports=(
        "Lightning-AI/pytorch-lightning#20866",
        "Lightning-AI/pytorch-lightning#20328",
        "Lightning-AI/pytorch-lightning#20685",
        "Lightning-AI/pytorch-lightning#20034",
    ),
)
def test_two_networks_in_one_ddp_may_train_in_turns(rank):
    """With find_unused_parameters=True two networks in one DDP may be trained in turns, as a GAN's are.

    Without the flag the second turn's forward raises, as for every parameter that gets no gradient.
    """
    model, ddp = scalars(rank, "generator", "discriminator")
    for iteration in range(4):
        mine, other = model.names if iteration % 2 else reversed(model.names)
        expected = mean_gradient(rank, model, mine, lambda r, mine=mine: (mine,))
        (ddp(rank.batch(1, dtype=torch.float64), use=mine) ** 2 / 2).backward()
        rank.law("the network whose turn it is gets the mean", getattr(model, mine).grad, expected)
        rank.law("the other network has no gradient", getattr(model, other).grad, None)
        descend(model)
    rank.show("weights", list(model.parameters()))


@case(
    "unused_parameters.none_stays_none",
    level=MUST,
    source=UNTOUCHED,
    world=(1, 2),
    catalogue=("E04",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_global_local_unused_params_grad",),
    reports=("pytorch/pytorch#28294",),
)
def test_a_parameter_that_no_rank_uses_keeps_no_gradient(rank):
    """A gradient that is None stays None while no rank uses the parameter; it does not become zeros.

    An optimizer with momentum or weight decay moves a parameter whose gradient is zero, and leaves one whose gradient
    is None.
    """
    model, ddp = scalars(rank, "a", "b")
    for _ in range(3):
        ddp(rank.batch(1, dtype=torch.float64), use="a").backward()
        rank.law("the unused gradient is None", model.b.grad, None)


@case(
    "unused_parameters.old_gradient_stays",
    level=MUST,
    source=UNTOUCHED,
    catalogue=("E04",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_global_local_unused_params_grad",),
    reports=("pytorch/pytorch#28294",),
)
def test_an_old_gradient_of_a_parameter_that_no_rank_uses_stays(rank):
    """While no rank uses a parameter, the gradient it already has stays as it is on each rank, different as they may be."""
    model, ddp = scalars(rank, "a", "b")
    old = torch.full_like(model.b, 7.0 + rank.index)
    model.b.grad = old.clone()
    for _ in range(3):
        ddp(rank.batch(1, dtype=torch.float64), use="a").backward()
        rank.law("the unused gradient is the old one", model.b.grad, old)
    rank.show("unused", model.b.grad)


@case(
    "unused_parameters.locally_unused_gets_mean",
    level=MUST,
    source=USED_MAP,
    world=(2, 3),
    catalogue=("E05",),
    torch_tests=(
        "test_c10d_gloo.py::DistributedDataParallelTest::test_global_local_unused_params_grad",
        "test_c10d_nccl.py::DistributedDataParallelTest::test_find_unused_parameters_when_unused_parameters_empty",
    ),
    reports=("pytorch/pytorch#41101",),
)
def test_a_rank_that_skips_a_parameter_contributes_zeros(rank):
    """A parameter that some ranks use gets the same gradient on all: the sum over those that used it, divided by the world size."""
    model, ddp = scalars(rank, "a", "b")
    last = rank.world_size - 1
    expected = mean_gradient(rank, model, "b", lambda r: ("a", "b") if r == last else ("a",))
    (ddp(rank.batch(1, dtype=torch.float64), use=("a", "b") if rank.index == last else "a") ** 2 / 2).backward()
    rank.show("used_on_the_last_rank", model.b.grad)
    rank.law("the divisor stays the world size", model.b.grad, expected)


@case("unused_parameters.skipping_rank_adds_old_gradient", level=OBSERVED, source=USED_MAP, catalogue=("E05",))
def test_a_rank_that_skips_a_parameter_contributes_the_gradient_it_already_has(rank):
    """Where only some ranks use a parameter, a rank that skips it contributes the gradient it already has, and gets the mean in its place."""
    model, ddp = scalars(rank, "a", "b")
    model.b.grad = torch.full_like(model.b, 7.0 + rank.index)
    ddp(rank.batch(1, dtype=torch.float64), use=("a", "b") if rank.index else "a").backward()
    rank.show("used_on_rank_1", model.b.grad)
    rank.law(
        "7 from rank 0, 8 and its input from rank 1",
        model.b.grad,
        (7 + 8 + rank.batch(1, of=1, dtype=torch.float64)[0]) / 2,
    )


@case("unused_parameters.hook_sees_zeros", level=OBSERVED, source=USED_MAP, catalogue=("E05",))
def test_a_comm_hook_is_given_zeros_for_an_unused_parameter(rank):
    """A comm hook finds zeros in the place of a parameter that its rank did not use."""
    model, ddp = scalars(rank, "a", "b")
    given = {}

    def keep(state, bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            given["a" if parameter is model.a else "b"] = gradient.clone()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, keep)
    ddp(rank.batch(1, dtype=torch.float64), use=("a", "b") if rank.index else "a").backward()
    rank.show("b", given["b"])
    rank.law("the used parameter comes with its gradient", given["a"], rank.batch(1, dtype=torch.float64)[0])
    rank.law("b is unused on rank 0", given["b"], rank.batch(1, dtype=torch.float64)[0] * rank.index)


@case("unused_parameters.used_map_counts_ranks", level=OBSERVED, source=USED_MAP, world=3, catalogue=("U25",))
def test_the_used_map_counts_the_ranks_that_use_each_parameter(rank):
    """After backward the reducer's used map says of each parameter how many ranks used it."""
    _, ddp = scalars(rank, "a", "b", "c", "d")
    ddp(rank.batch(1, dtype=torch.float64), use=tuple("abc"[: rank.index + 1])).backward()
    used = ddp.reducer._get_local_used_map()
    rank.show("used_map", used)
    rank.law(
        "3 ranks use a, 2 use b, 1 uses c", used, torch.tensor([3, 2, 1, 0], dtype=torch.int32, device=rank.device)
    )


@case(
    "unused_parameters.one_collective_more",
    level=OBSERVED,
    source=USED_MAP,
    catalogue=("E03",),
    each={"without": {}, "find_unused": {"find_unused_parameters": True}},
)
def test_the_used_map_is_reduced_once_a_backward(rank, options):
    """With find_unused_parameters=True each backward sends one collective more than there are buckets: the map of used parameters."""
    ddp = rank.wrap(Scalars("a", "b"), **options)
    sent = []
    for _ in range(3):
        loss = ddp(rank.batch(1))
        before = rank.collectives()
        loss.backward()
        sent.append(rank.collectives() - before)
    rank.show("collectives", sent)
    rank.law("one bucket, and one map with the flag", sent, [1 + len(options)] * 3)


@case(
    "unused_parameters.output_left_out_of_loss",
    level=MUST,
    source="DistributedDataParallel",
    catalogue=("E06",),
    torch_tests=(
        "distributed_test.py::DistributedTest._DistTestBase::test_output_unused_in_loss_tuple_module",
        "distributed_test.py::DistributedTest._DistTestBase::test_output_unused_in_loss_dict_module",
    ),
    reports=("pytorch/pytorch#22436", "pytorch/pytorch#57081"),
)
def test_an_output_may_be_left_out_of_the_loss(rank):
    """With find_unused_parameters=True an output may be left out of the loss: the gradients of its parameters are not touched, the others get the mean."""
    model = TwoHeads()
    ddp = rank.wrap(model, find_unused_parameters=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        first, _ = ddp(rank.batch(1))
        first.sum().backward()
        rank.law("the output in the loss is reduced", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
        rank.law("the gradient behind the output left out is None", model.b.grad, None)


@case(
    "unused_parameters.shared_parameter_counts_once",
    level=OBSERVED,
    source="nn/parallel/distributed.py: Deduplicate any parameters that might be shared across child modules",
    catalogue=("E03",),
    each={"default": {}, "find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}},
    reports=("pytorch/pytorch#41324", "pytorch/pytorch#46755"),
)
def test_a_parameter_shared_under_two_names_is_reduced_once(rank, options):
    """A parameter registered under two names and used under both is one parameter: it gets the mean of the sum of its two gradients, once."""
    model = TwoHeads()
    model.b = model.a
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        sum(ddp(rank.batch(1))).sum().backward()
        rank.law("twice the mean", model.a.grad, 2 * rank.mean(lambda r: rank.batch(1, of=r)[0]))
    rank.show("gradient", model.a.grad)


@case(
    "unused_parameters.undefined_gradients",
    level=OBSERVED,
    source="nn/parallel/distributed.py: param.grad field is not touched",
    needs=("torch._C._functions.UndefinedGrad",),
    catalogue=("E11",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_undefined_grad_parity_unused_parameters",),
)
def test_an_undefined_gradient_leaves_all_gradients_alone(rank):
    """When backward brings an undefined gradient to every parameter, gradients stay as they are, as in a module that is not wrapped, and the next backward is reduced."""
    model, ddp = scalars(rank, "a", "b")
    for _ in range(3):
        torch._C._functions.UndefinedGrad()(ddp(rank.batch(1, dtype=torch.float64), use="a")).backward()
        rank.law("no gradient appears", [model.a.grad, model.b.grad], [None, None])
    expected = mean_gradient(rank, model, "a", lambda r: ("a",))
    (ddp(rank.batch(1, dtype=torch.float64), use="a") ** 2 / 2).backward()
    rank.show("afterwards", model.a.grad)
    rank.law("the next backward is reduced", model.a.grad, expected)


@case(
    "unused_parameters.harmless_when_all_are_used",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 3),
    catalogue=("E03",),
)
def test_the_flag_changes_no_value_when_every_parameter_is_used(rank):
    """With find_unused_parameters=True and every parameter in use the gradients are the same means as without it."""
    model, ddp = scalars(rank, "a", "b")
    for _ in range(4):
        expected = [mean_gradient(rank, model, name, lambda r: ("a", "b")) for name in "ab"]
        (ddp(rank.batch(1, dtype=torch.float64)) ** 2 / 2).backward()
        rank.law("every gradient is the mean", [model.a.grad, model.b.grad], expected)
        descend(model)
    rank.show("weights", list(model.parameters()))
