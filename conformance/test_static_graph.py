"""static_graph=True: what is used, and how, is learnt in the first iteration and must stay so; in return more is allowed."""

import warnings

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, TwoHeads, descend
from ddp_conformance.rank import mean_gradient

DOCUMENTED = "DistributedDataParallel"
SETTER = "DistributedDataParallel._set_static_graph"
CHANGED = "Your training graph has changed in this iteration"
MISSING = "Expected to have finished reduction in the prior iteration"


@case("static_graph.same_numbers", level=MUST, source=DOCUMENTED, world=(1, 2, 3), catalogue=("F01",))
def test_four_steps_give_the_means_of_a_single_process(rank):
    """With static_graph=True every iteration, the first included, gives the mean over ranks, as worked out in one process."""
    model = Scalars("a", "b", dtype=torch.float64)
    ddp = rank.wrap(model, static_graph=True)
    for _ in range(4):
        expected = [mean_gradient(rank, model, name, lambda r: "ab") for name in "ab"]
        (ddp(rank.batch(1, dtype=torch.float64)) ** 2 / 2).backward()
        rank.law("every gradient is the mean", [model.a.grad, model.b.grad], expected)
        descend(model)
    rank.show("weights", list(model.parameters()))


@case(
    "static_graph.unused_allowed",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2, 3),
    catalogue=("F01", "E03"),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_different_graph_across_ranks",),
)
def test_a_parameter_may_stay_unused_in_every_iteration(rank):
    """With static_graph=True a parameter may stay unused in every iteration, without find_unused_parameters; its gradient stays None."""
    model = Scalars("a", "b", dtype=torch.float64)
    ddp = rank.wrap(model, static_graph=True)
    for _ in range(4):
        expected = mean_gradient(rank, model, "a", lambda r: "a")
        (ddp(rank.batch(1, dtype=torch.float64), use="a") ** 2 / 2).backward()
        rank.law("the used parameter gets the mean", model.a.grad, expected)
        rank.law("the unused gradient is None", model.b.grad, None)
        descend(model)
    rank.show("weights", list(model.parameters()))


@case(
    "static_graph.sets_may_differ_by_rank",
    level=MUST,
    source=DOCUMENTED,
    world=(2, 3),
    catalogue=("F01", "E05"),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_different_graph_across_ranks",),
    reports=("pytorch/pytorch#72434",),
)
def test_each_rank_may_use_its_own_set_in_every_iteration(rank):
    """With static_graph=True ranks may use different parameters, each rank the same ones in every iteration; a rank that does not use one contributes zeros."""
    model = Scalars("a", "b", "c", dtype=torch.float64)
    ddp = rank.wrap(model, static_graph=True)

    def used(r):
        return tuple("abc"[: rank.world_size - r])

    for _ in range(4):
        expected = [mean_gradient(rank, model, name, used) if name in used(0) else None for name in "abc"]
        (ddp(rank.batch(1, dtype=torch.float64), use=used(rank.index)) ** 2 / 2).backward()
        rank.law("gradients are means with zeros", [model.a.grad, model.b.grad, model.c.grad], expected)
        descend(model)
    rank.show("weights", list(model.parameters()))


@case(
    "static_graph.newly_used_raises",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2),
    catalogue=("F02",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_invalid_static_graph",),
)
def test_a_parameter_used_for_the_first_time_later_raises_in_backward(rank):
    """With static_graph=True a parameter unused in the first iteration and used in the second makes the second backward raise."""
    ddp = rank.wrap(Scalars("a", "b"), static_graph=True)
    ddp(rank.batch(1), use="a").backward()
    loss = ddp(rank.batch(1), use=("a", "b"))
    with rank.raises("the_second_backward", RuntimeError, match=CHANGED):
        loss.backward()


@case(
    "static_graph.newly_unused_raises",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2),
    catalogue=("F03",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_invalid_static_graph",),
)
def test_a_parameter_no_longer_used_raises_in_the_next_forward(rank):
    """With static_graph=True a parameter used in the first iteration and unused in the second makes the third forward raise; the second backward says nothing and leaves gradients local."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, static_graph=True)
    ddp(rank.batch(1)).backward()
    model.zero_grad(set_to_none=True)
    ddp(rank.batch(1), use="a").backward()
    rank.law("the second gradient is the rank's own", model.a.grad, rank.batch(1)[0])
    with rank.raises("the_third_forward", RuntimeError, match=MISSING):
        ddp(rank.batch(1))


@case(
    "static_graph.parameter_outside_forward",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2, 3),
    catalogue=("E08", "F06"),
)
def test_a_parameter_may_be_used_outside_the_forward(rank):
    """With static_graph=True a parameter may be used outside the forward, in the loss, in every iteration; it is reduced like the others."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, static_graph=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        (ddp(rank.batch(1), use="a") + (model.b * rank.batch(1)).sum()).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
        rank.law("both gradients are means", [model.a.grad, model.b.grad], [mean, mean.clone()])


@case(
    "static_graph.set_too_late_raises",
    level=OBSERVED,
    source=SETTER,
    needs=("_set_static_graph",),
    world=1,
    catalogue=("F04",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_static_graph_api_cpu",),
)
def test_setting_it_after_training_began_raises(rank):
    """_set_static_graph raises once a backward has run."""
    ddp = rank.wrap(Scalars("a"))
    ddp(rank.batch(1)).backward()
    with rank.raises("setting_it", RuntimeError, match="should be called before training loop starts"):
        ddp._set_static_graph()


@case(
    "static_graph.set_later_counts",
    level=OBSERVED,
    source=SETTER,
    needs=("_set_static_graph",),
    catalogue=("F04",),
)
def test_setting_it_before_training_counts(rank):
    """_set_static_graph, called between construction and the first forward, does what the constructor's option does."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    ddp._set_static_graph()
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use="a").backward()
        rank.law("an unused parameter is allowed", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))


@case(
    "static_graph.needless_settings_warn",
    level=OBSERVED,
    source=SETTER,
    needs=("_set_static_graph",),
    world=1,
    catalogue=("F05",),
    each={
        "twice": ({}, "no need to set it again"),
        "find_unused": ({"find_unused_parameters": True}, "will detect unused parameters automatically"),
    },
)
def test_setting_it_twice_or_with_find_unused_warns(rank, setting):
    """Setting static_graph twice, or together with find_unused_parameters=True, is a UserWarning and no error."""
    options, wording = setting
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = rank.wrap(Scalars("a", "b"), static_graph=True, **options)
        if not options:
            ddp._set_static_graph()
    seen = [each.category for each in caught if wording in str(each.message)]
    rank.law("one warning", seen, [UserWarning])


@case(
    "static_graph.can_set_static_graph_is_never_told",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("F07",),
)
def test_the_logging_data_never_say_that_static_graph_can_be_set(rank):
    """The logging data never have can_set_static_graph while the graph stays the same, so the documented way to learn it does not work.

    The documentation says to look whether `ddp_logging_data.get("can_set_static_graph") == True` at the end of training.
    """
    ddp = rank.wrap(Scalars("a", "b"), find_unused_parameters=True)
    for _ in range(4):
        ddp(rank.batch(1), use="a").backward()
    rank.law("the key is absent", rank.log(ddp, "can_set_static_graph"), {"can_set_static_graph": "absent"})


@case(
    "static_graph.change_is_logged",
    level=OBSERVED,
    source="DistributedDataParallel",
    catalogue=("F07",),
)
def test_a_changed_graph_is_logged(rank):
    """With find_unused_parameters=True the logging data have can_set_static_graph 0 once the unused parameters have changed."""
    ddp = rank.wrap(Scalars("a", "b"), find_unused_parameters=True)
    for use in ("a", "b", "a", "b"):
        ddp(rank.batch(1), use=use).backward()
    rank.show("logged", rank.log(ddp, "can_set_static_graph"))


@case(
    "static_graph.probe",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: current iteration, which means unused params set has not changed",
    catalogue=("F07",),
    each={"same": ("a", "a", "a"), "changing": ("a", "b", "a")},
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_detect_ddp_is_actually_static",),
)
def test_the_reducer_tells_whether_the_graph_was_static(rank, uses):
    """With find_unused_parameters=True the reducer's _ddp_graph_static() is true while the same parameters are unused in every iteration, and false from the first change on."""
    ddp = rank.wrap(Scalars("a", "b"), find_unused_parameters=True)
    for use in uses:
        ddp(rank.batch(1), use=use).backward()
    rank.law("static or not", ddp.reducer._ddp_graph_static(), len(set(uses)) == 1)


@case(
    "static_graph.output_left_out_of_loss",
    level=HAZARD,
    source=DOCUMENTED,
    catalogue=("U17", "E06"),
    reports=("pytorch/pytorch#97030",),
)
def test_an_output_left_out_of_the_loss_is_local_and_then_raises(rank):
    """With static_graph=True an output left out of the loss in every iteration is right in the first, leaves gradients local in the second without an error, and makes the third forward raise.

    The documentation says that with a static graph the unused parameters are found automatically.
    """
    model = TwoHeads()
    ddp = rank.wrap(model, static_graph=True)
    ddp(rank.batch(1))[0].sum().backward()
    rank.law("the first gradient is the mean", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
    model.zero_grad(set_to_none=True)
    ddp(rank.batch(1))[0].sum().backward()
    rank.law("the second is the rank's own", model.a.grad, rank.batch(1)[0])
    with rank.raises("the_third_forward", RuntimeError, match=MISSING):
        ddp(rank.batch(1))
