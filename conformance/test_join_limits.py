"""What join() does not cover, and what it changes besides."""

import warnings

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import Scalars, WithBuffers, linear
from ddp_conformance.rank import mean_all_reduce
from torch import nn

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"


@case(
    "join_limits.throw_comes_too_late",
    level=HAZARD,
    source="DistributedDataParallel.join",
    may=("hang",),
    lanes=("gloo:cpu",),
    needs=("join",),
    catalogue=("K08",),
)
def test_early_termination_does_not_protect_collectives_before_forward(rank):
    """A collective that comes before forward in the loop hangs in spite of throw_on_early_termination=True: forward is where a rank learns that another ran out.

    The docstring of join() asks for that flag whenever the loop has other collectives, and says that then all ranks
    throw. A hang takes 1 s to be seen.
    """
    ddp = rank.wrap(linear(1))
    with (
        rank.may_wait(),
        rank.raises("refusal", RuntimeError, match=r"Rank \d exhausted all inputs|Throwing across all ranks"),
        ddp.join(throw_on_early_termination=True),
    ):
        for _ in range(rank.index + 1):
            dist.all_reduce(torch.ones(1, device=rank.device))
            ddp(rank.batch(1)).sum().backward()


@case(
    "join_limits.hook_sees_zeros",
    level=OBSERVED,
    source="nn/parallel/distributed.py: work = self.reducer._run_comm_hook(grad_bucket)",
    world=2,
    needs=("join", "register_comm_hook"),
    catalogue=("K07",),
    torch_tests=(TORCH + "test_ddp_uneven_inputs",),
)
def test_a_communication_hook_is_called_with_zeros(rank):
    """On a rank that ran out of inputs a communication hook is called with zeros, as often as it is on the others."""
    model = Scalars("a")
    ddp = rank.wrap(model)
    handed = []

    def hook(state, bucket):
        handed.append(bucket.buffer().item())
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, hook)
    with ddp.join():
        for _ in range(2 * rank.index + 1):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
    rank.law("own, then zeros", handed, [2.0, 0.0, 0.0] if rank.index == 0 else [4.0] * 3)
    expected = rank.mean(lambda r: rank.batch(1, of=r)[0]) if rank.index == 0 else rank.batch(1)[0] / 2
    rank.law("the hook's result is the gradient", model.a.grad, expected)


@case(
    "join_limits.hook_divides",
    level=OBSERVED,
    source="nn/parallel/distributed.py: work = self.reducer._run_comm_hook(grad_bucket)",
    needs=("join", "register_comm_hook"),
    catalogue=("K02", "K07"),
)
def test_with_a_hook_the_divisor_is_the_hooks(rank):
    """With a communication hook divide_by_initial_world_size=False has no effect: what the hook divides by counts."""
    model = Scalars("a")
    ddp = rank.wrap(model)
    ddp.register_comm_hook(None, lambda state, bucket: mean_all_reduce(bucket))
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(rank.index + 1):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
    expected = rank.mean(lambda r: rank.batch(1, of=r)[0]) if rank.index == 0 else rank.batch(1)[0] / 2
    rank.law("divided by the world size, as the hook does", model.a.grad, expected)


@case(
    "join_limits.buffers_from_the_highest_rank",
    level=HAZARD,
    source="nn/parallel/distributed.py: upon a rank to sync module buffers from, since rank 0 may",
    world=3,
    needs=("join",),
    catalogue=("U13", "D01"),
)
def test_buffers_are_those_of_the_highest_active_rank(rank):
    """Under join() a forward begins with the buffers of the highest rank that still has inputs, from the first one on: that they are always rank 0's is false here."""
    model = WithBuffers(b=torch.zeros(1))
    ddp = rank.wrap(model)
    inputs, seen = (4, 3, 1), []
    with ddp.join():
        for step in range(inputs[rank.index]):
            model.b.fill_(10 * step + rank.index)
            ddp(rank.batch(1)).backward()
            seen.append(model.seen["b"])
    sources = [max(r for r in range(3) if step < inputs[r]) for step in range(inputs[rank.index])]
    rank.law(
        "the highest active rank's",
        seen,
        [torch.full((1,), 10.0 * step + of, device=rank.device) for step, of in enumerate(sources)],
    )
    rank.show("seen", seen)


@case(
    "join_limits.stays_on",
    level=OBSERVED,
    source="nn/parallel/distributed.py: if self._join_config.enable:",
    needs=("join",),
    catalogue=("U13", "K05"),
)
def test_what_join_switched_on_stays_on(rank):
    """Leaving join() does not switch it off: later forwards still announce themselves, and still take buffers from the highest rank; join(enable=False) ends that."""
    model = WithBuffers(b=torch.zeros(1))
    ddp = rank.wrap(model)

    def forward():
        before = rank.collectives()
        model.b.fill_(rank.index + 5)
        ddp(rank.batch(1)).backward()
        return rank.collectives() - before, model.seen["b"].item()

    for _ in range(3):
        forward()
    plain = forward()
    with ddp.join():
        forward()
    after = forward()
    with ddp.join(enable=False):
        disabled = forward()
    rank.show("collectives", [plain[0], after[0], disabled[0]])
    rank.law(
        "buffers are rank 0's, then the highest rank's, then rank 0's",
        [plain[1], after[1], disabled[1]],
        [5.0, 6.0, 5.0],
    )
    rank.differs("a forward after join communicates more", after[0], plain[0])
    rank.law("and no more once it was disabled", disabled[0], plain[0])


@case(
    "join_limits.buffer_hook",
    level=HAZARD,
    source="nn/parallel/distributed.py: comm hook (https://github.com/pytorch/pytorch/issues/65436)",
    needs=("join", "_register_buffer_comm_hook", "torch.nn.parallel.distributed._BufferCommHookLocation"),
    may=("hang", "die"),
    lanes=("gloo:cpu",),
    each={"before_forward": "PRE_FORWARD", "after_forward": "POST_FORWARD"},
    catalogue=("K08", "D04"),
    reports=("pytorch/pytorch#65436",),
)
def test_a_buffer_hook_is_not_shadowed(rank, place):
    """A buffer hook is not supported under join(): before forward it runs on the stale buffers of ranks that ran out too; after forward, the default, nothing answers its collectives and gloo aborts.

    Joined rank 0 takes part in the second call with the sum that the first one left there.
    """
    model = WithBuffers(b=torch.zeros(1))
    ddp = rank.wrap(model)
    called = []

    def total(state, buffers):
        called.append(buffers["b"].item())
        dist.all_reduce(buffers["b"])

    ddp._register_buffer_comm_hook(None, total, nn.parallel.distributed._BufferCommHookLocation[place])
    with rank.may_wait(), ddp.join():
        for step in range(rank.index + 1):
            model.b.fill_(10 * step + rank.index + 1)
            ddp(rank.batch(1)).backward()
    rank.show("called_with", called)


@case(
    "join_limits.skew_warning",
    level=OBSERVED,
    source="distributed/algorithms/join.py: Detected uneven input skew of greater than",
    each={"skew_1000": 1000, "skew_1001": 1001},
    needs=("join", "no_sync"),
    catalogue=("K10",),
)
def test_a_skew_of_more_than_a_thousand_warns(rank, skew):
    """A rank that ran out of inputs warns once when another has more than 1000 more than it.

    Two thousand small collectives make this one of the slower cases.
    """
    ddp = rank.wrap(linear(1))
    x = rank.batch(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ddp.join(), ddp.no_sync(), torch.no_grad():
            for _ in range(skew * rank.index):
                ddp(x)
    warned = ["greater than 1000" in str(each.message) for each in caught if "skew" in str(each.message)]
    rank.law("the rank without inputs warns, and only past 1000", warned, [True] * (skew > 1000 and rank.index == 0))


@case(
    "join_limits.changes_warning_filters",
    level=HAZARD,
    source='distributed/algorithms/join.py: warnings.simplefilter("once")',
    world=1,
    needs=("join",),
    catalogue=("K10",),
)
def test_leaving_join_changes_the_process_wide_warning_filter(rank):
    """Leaving join() sets Python's warning filter to "once" for the whole process and leaves it so."""
    ddp = rank.wrap(linear(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ddp.join():
            ddp(rank.batch(1)).sum().backward()
        rank.law("the filter in force", warnings.filters[0][0], "once")


@case(
    "join_limits.second_module_divides_by_initial",
    level=HAZARD,
    source="DistributedDataParallel.join_hook",
    needs=("join", "torch.distributed.algorithms.join.Join"),
    world=3,
    catalogue=("K02",),
)
def test_only_the_first_module_of_a_context_divides_by_the_remaining_world(rank):
    """In a Join context of two modules divide_by_initial_world_size=False works for the first one only; the second is divided by the initial world size.

    The docstring of join_hook says that all of them are handed the same value: they are, but only the first counts
    the ranks that remain.
    """
    first, second = Scalars("a"), Scalars("a")
    pair = [rank.wrap(first), rank.wrap(second)]
    with dist.algorithms.join.Join(pair, divide_by_initial_world_size=False):
        for step in range(rank.index + 1):
            for ddp in pair:
                ddp.zero_grad(set_to_none=True)
                ddp(rank.batch(1)).backward()
            total = rank.active_sum(step, lambda r: r + 1)
            rank.law("the first module's, divided by those that remain", first.a.grad, total / (3 - step))
            rank.law("the second module's, divided by all", second.a.grad, total / 3)


@case(
    "join_limits.static_graph_without_any_input",
    level=HAZARD,
    source="DistributedDataParallel.join",
    each={"none": 0, "one": 1},
    may=("hang", "die"),
    lanes=("gloo:cpu",),
    needs=("join",),
    catalogue=("K07", "U05"),
)
def test_static_graph_hangs_where_a_rank_has_no_input_at_all(rank, inputs):
    """With static_graph=True join() does not prevent the hang it is there for when a rank has no input at all; one input is enough.

    Its docstring says that each collective has a counterpart on ranks that ran out. A hang takes 1 s to be seen.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model, static_graph=True)
    with rank.may_wait(), ddp.join():
        for step in range(4 if rank.index else inputs):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
            total = rank.active_sum(step, lambda r: 4 if r else inputs)
            rank.law("the sum over active ranks, divided by all", model.a.grad, total / 2)
