"""What join() does beside shadowing: it throws, is switched off and noted, lets exceptions through, and joins several modules."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"


@case(
    "join.throws_everywhere",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    each={"join": False, "with_other_collectives": True},
    needs=("join",),
    catalogue=("K03", "K08"),
    torch_tests=(TORCH + "test_ddp_uneven_inputs_stop_iteration_sync_bn",),
    reports=("pytorch/pytorch#42577",),
)
def test_early_termination_throws_on_every_rank(rank, others):
    """With throw_on_early_termination=True every rank raises when the first one runs out of inputs, and can catch it; other collectives that follow forward are then safe."""
    model = linear(1)
    ddp = rank.wrap(model)
    steps = 0
    with (
        rank.raises("refusal", RuntimeError, match=r"Rank \d exhausted all inputs|Throwing across all ranks"),
        ddp.join(throw_on_early_termination=True),
    ):
        for _ in range(2 if rank.index == 1 else 4):
            out = ddp(rank.batch(1))
            if others:
                dist.all_reduce(torch.ones(1, device=rank.device))
            out.sum().backward()
            steps += 1
    rank.law("each did what the shortest could", steps, 2)
    rank.law("its gradients are means", model.weight.grad, 2 * rank.mean(lambda r: rank.batch(1, of=r)))


@case(
    "join.even_inputs_do_not_throw",
    level=MUST,
    source="DistributedDataParallel.join",
    needs=("join",),
    catalogue=("K03",),
)
def test_even_inputs_do_not_throw(rank):
    """With throw_on_early_termination=True nothing is raised where all ranks have equally many inputs."""
    model = linear(1)
    ddp = rank.wrap(model)
    thrown = ""
    try:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2):
                ddp(rank.batch(1)).sum().backward()
    except RuntimeError as error:
        thrown = str(error)
    rank.law("nothing is thrown", thrown, "")
    rank.law("the mean", model.weight.grad, 2 * rank.mean(lambda r: rank.batch(1, of=r)))


@case(
    "join.disabled",
    level=MUST,
    source="DistributedDataParallel.join",
    each={"enabled": True, "disabled": False, "without": None},
    needs=("join",),
    catalogue=("K05",),
    torch_tests=(TORCH + "test_ddp_uneven_input_join_disable",),
)
def test_disabled_it_adds_no_communication(rank, enable):
    """With enable=False join() adds no communication and syncs no model at the end: the loop runs as without it."""
    model = linear(1)
    ddp = rank.wrap(model)
    before = rank.collectives()
    with torch.no_grad() if enable is None else ddp.join(enable=enable), torch.enable_grad():
        for _ in range(4):
            ddp(rank.batch(1)).sum().backward()
        in_loop = rank.collectives() - before
        nn.init.constant_(model.weight, rank.index + 1)
    rank.show("collectives", rank.collectives() - before)
    rank.law("even inputs give means", model.weight.grad, 4 * rank.mean(lambda r: rank.batch(1, of=r)))
    if not enable:
        rank.law("nothing at the end", rank.collectives() - before, in_loop)
        rank.law(
            "each rank keeps its model", model.weight.data, torch.full((1, 1), rank.index + 1.0, device=rank.device)
        )
        plain = rank.wrap(linear(1))
        before = rank.collectives()
        for _ in range(4):
            plain(rank.batch(1)).sum().backward()
        rank.law("as many collectives as a loop without it", in_loop, rank.collectives() - before)


@case(
    "join.logged",
    level=OBSERVED,
    source="nn/parallel/distributed.py: ddp.logger._set_uneven_input_join()",
    world=1,
    needs=("join",),
    catalogue=("K06",),
    torch_tests=(TORCH + "test_ddp_uneven_input_join_disable",),
)
def test_join_is_noted_in_the_logging_data(rank):
    """Entering join() is noted in DDP's logging data as join_uneven_inputs."""
    ddp = rank.wrap(linear(1))
    rank.show("before", rank.log(ddp, "join_uneven_inputs"))
    with ddp.join():
        ddp(rank.batch(1)).sum().backward()
    ddp(rank.batch(1)).sum().backward()
    rank.show("after", rank.log(ddp, "join_uneven_inputs"))


@case(
    "join.exceptions",
    level=MUST,
    source="distributed/algorithms/join.py: propagate the exception directly if one was raised",
    needs=("join",),
    catalogue=("K09",),
    torch_tests=(TORCH + "test_ddp_uneven_input_exception",),
)
def test_an_exception_in_the_body_passes_through(rank):
    """An exception raised in the body of join() passes through unchanged, at once, without the final sync."""
    model = linear(1)
    ddp = rank.wrap(model)
    caught = None
    try:
        with ddp.join():
            ddp(rank.batch(1)).sum().backward()
            nn.init.constant_(model.weight, rank.index + 1)
            before = rank.collectives()
            raise KeyError("a batch is missing")
    except KeyError as error:
        caught = error.args
    rank.law("the exception passes through", caught, ("a batch is missing",))
    rank.law("nothing was communicated on the way out", rank.collectives(), before)
    rank.law("each rank keeps its model", model.weight.data, torch.full((1, 1), rank.index + 1.0, device=rank.device))


@case(
    "join.other_collectives",
    level=HAZARD,
    source="DistributedDataParallel.join",
    may=("hang", "die"),
    lanes=("gloo:cpu",),
    needs=("join",),
    catalogue=("K08",),
)
def test_other_collectives_in_the_loop_are_not_shadowed(rank):
    """Other collectives in the loop are not shadowed: once a rank has run out of inputs they meet join's own, and all ranks wait for ever.

    The documented remedy is throw_on_early_termination=True. A hang takes 1 s to be seen.
    """
    ddp = rank.wrap(linear(1))
    with rank.may_wait(), ddp.join():
        for _ in range(rank.index + 1):
            dist.all_reduce(torch.ones(1, device=rank.device))
            ddp(rank.batch(1)).sum().backward()


@case(
    "join.two_modules",
    level=MUST,
    source="distributed.algorithms.join.Join",
    needs=("join", "torch.distributed.algorithms.join.Join"),
    world=3,
    catalogue=("K01", "K02"),
)
def test_one_context_joins_two_modules(rank):
    """One Join context takes several modules and shadows the reductions of all."""
    first, second = Scalars("a"), Scalars("a")
    pair = [rank.wrap(first), rank.wrap(second)]
    with dist.algorithms.join.Join(pair):
        for step in range(rank.index + 1):
            for ddp in pair:
                ddp.zero_grad(set_to_none=True)
                ddp(rank.batch(1)).backward()
            expected = rank.active_sum(step, lambda r: r + 1) / 3
            rank.law("the first module's", first.a.grad, expected)
            rank.law("the second module's", second.a.grad, expected.clone())


@case(
    "join.refusals",
    level=MUST,
    source="distributed.algorithms.join.Join",
    needs=("join", "torch.distributed.algorithms.join.Join"),
    catalogue=("K08",),
)
def test_nothing_to_join_and_two_groups_are_refused(rank):
    """A Join context is refused without modules, and with modules of different process groups."""
    first = rank.wrap(linear(1))
    second = rank.wrap(linear(1), process_group=dist.new_group([0, 1]))
    with rank.raises("nothing", ValueError, match="at least one joinable"):
        dist.algorithms.join.Join([])
    with rank.raises("two_groups", ValueError, match="multiple process groups"):
        dist.algorithms.join.Join([first, second])
