"""Under join() ranks that ran out of inputs shadow the collectives of the others, and all end with the last one's model."""

import warnings

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from ddp_conformance.rank import mean_all_reduce
from torch import nn

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"
OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "tiny_buckets": {"bucket_cap_mb": 1e-6},
}


class Holder(nn.Module):
    """A scalar weight and a buffer; `seen` is what the buffer was in the last forward."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.tensor([value]))
        self.seen = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.b.clone()
        return (self.weight * x).sum()


def active_sum(rank, step, inputs):
    """The sum of the inputs of the ranks that have more than `step` of them."""
    return sum(rank.batch(1, of=r)[0] for r in range(rank.world_size) if step < inputs(r))


@case(
    "join.shadows",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    each={name: OPTIONS[name] for name in ("default", "view", "find_unused", "tiny_buckets")},
    needs=("join",),
    catalogue=("K01", "K07"),
    torch_tests=(TORCH + "test_ddp_uneven_inputs",),
    reports=("pytorch/pytorch#38174", "pytorch/pytorch#42577", "Lightning-AI/pytorch-lightning#20404"),
)
def test_ranks_without_inputs_contribute_zero(rank, options):
    """Ranks may have different numbers of inputs: one that ran out contributes zero to every reduction that follows, and nobody waits for it."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    gradients = []
    with ddp.join():
        for _ in range(2 * rank.index):  # none on rank 0, two on rank 1, four on rank 2
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
            gradients.append([model.a.grad.clone(), model.b.grad.clone()])
    expected = [active_sum(rank, step, lambda r: 2 * r) / 3 for step in range(2 * rank.index)]
    rank.law("the sum over active ranks, divided by all", gradients, [[each, each.clone()] for each in expected])
    rank.show("gradients", [a for a, b in gradients])


@case(
    "join.divisor",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    each={"initial": True, "remaining": False},
    needs=("join",),
    catalogue=("K02",),
    torch_tests=(TORCH + "test_ddp_grad_div_uneven_inputs",),
    reports=("pytorch/pytorch#38174",),
)
def test_the_divisor_is_the_initial_or_the_remaining_world(rank, initial):
    """Gradients are divided by the initial world size, or with divide_by_initial_world_size=False by the number of ranks that still have inputs."""
    model = Scalars("a")
    ddp = rank.wrap(model)
    gradients = []
    with ddp.join(divide_by_initial_world_size=initial):
        for _ in range(rank.index + 2):  # two, three and four inputs
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
            gradients.append(model.a.grad.clone())
    divisors = [3] * 4 if initial else [3, 3, 2, 1]
    expected = [active_sum(rank, step, lambda r: r + 2) / divisors[step] for step in range(rank.index + 2)]
    rank.law("the sum over active ranks, divided", gradients, expected)
    rank.show("gradients", gradients)


@case(
    "join.divides_by_initial_by_default",
    level=MUST,
    source="DistributedDataParallel.join_hook",
    each={"join": False, "context": True},
    needs=("join", "torch.distributed.algorithms.join.Join"),
    catalogue=("K02",),
)
def test_the_default_divisor_is_the_initial_world(rank, context):
    """The default divisor is the initial world size, in join() and in the general Join context manager alike."""
    model = Scalars("a")
    ddp = rank.wrap(model)
    with dist.algorithms.join.Join([ddp]) if context else ddp.join():
        for _ in range(rank.index + 1):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
    if rank.index == 1:
        rank.law("half of the only active rank's", model.a.grad, rank.batch(1)[0] / 2)
    else:
        rank.law("the mean", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))


@case(
    "join.trains_exactly",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    each={name: OPTIONS[name] for name in ("default", "view", "static_graph")},
    needs=("join",),
    catalogue=("K01", "K02", "K04"),
    torch_tests=(TORCH + "test_ddp_uneven_inputs",),
    reports=("pytorch/pytorch#38174",),
)
def test_uneven_training_equals_one_process(rank, options):
    """Training on uneven inputs equals one process that sums the active ranks' gradients, and afterwards every rank has those weights."""
    model = linear(2, dtype=torch.float64)
    ddp = rank.wrap(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64)

    def row(of, step):
        return rank.tensor(of + 1, step % 2 + 1, dtype=torch.float64)

    with ddp.join():
        for step in range(4 + rank.index):
            optimizer.zero_grad()
            (3 * (ddp(row(rank.index, step)) - rank.index).square().sum() / 2).backward()
            optimizer.step()

    alone = torch.ones(2, dtype=torch.float64, device=rank.device)
    for step in range(6):
        rows = [(row(of, step), of) for of in range(3) if step < 4 + of]
        alone = alone - sum(x * ((x * alone).sum() - y) for x, y in rows) / 64
    rank.show("weights", model.weight)
    rank.law("the weights of one process, on every rank", model.weight.data[0], alone)


@case(
    "join.last_joiner",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    each={"rank_0": 0, "rank_1": 1, "rank_2": 2},
    needs=("join",),
    catalogue=("K04",),
    torch_tests=(TORCH + "test_ddp_uneven_inputs",),
)
def test_at_the_end_the_last_joiners_model_is_everyones(rank, last):
    """When all ranks have joined, every rank gets the parameters and buffers of the one that joined last."""
    model = Holder(0.0)
    ddp = rank.wrap(model)
    with ddp.join():
        for _ in range(3 if rank.index == last else 1):
            ddp(rank.batch(1)).backward()
        with torch.no_grad():
            model.weight.fill_(rank.index + 1)
            model.b.fill_(rank.index + 10)
    rank.law("the last joiner's parameters", model.weight.data, torch.full((1,), last + 1.0, device=rank.device))
    rank.law("the last joiner's buffers", model.b, torch.full((1,), last + 10.0, device=rank.device))


@case(
    "join.tie",
    level=OBSERVED,
    source="nn/parallel/distributed.py: We break ties via picking the larger rank",
    world=3,
    each={"all": (2, 2, 2), "first_two": (2, 2, 1)},
    needs=("join",),
    catalogue=("K04",),
)
def test_of_several_last_joiners_the_highest_rank_wins(rank, inputs):
    """Where several ranks join last, the highest of them gives its model to all."""
    model = linear(1)
    ddp = rank.wrap(model)
    with ddp.join():
        for _ in range(inputs[rank.index]):
            ddp(rank.batch(1)).backward()
        nn.init.constant_(model.weight, rank.index + 1)
    winner = max(r for r in range(3) if inputs[r] == 2)
    rank.law("the highest of the last joiners", model.weight.data, torch.full((1, 1), winner + 1.0, device=rank.device))


@case(
    "join.sub_group",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    needs=("join",),
    catalogue=("K04", "A04"),
)
def test_join_counts_within_its_process_group(rank):
    """In a process group join() divides by the group's size and takes the last joiner among its members."""
    group = dist.new_group([1, 2])
    if rank.index == 0:
        return
    model = linear(1)
    ddp = rank.wrap(model, process_group=group)
    with ddp.join():
        for _ in range(3 - rank.index):  # two on rank 1, one on rank 2
            model.zero_grad(set_to_none=True)
            ddp(2 * torch.ones(1, device=rank.device)).backward()
        nn.init.constant_(model.weight, rank.index + 1)
    rank.law("the last joiner's weight", model.weight.data, torch.full((1, 1), 2.0, device=rank.device))
    rank.law(
        "divided by two", model.weight.grad, torch.full((1, 1), 1.0 if rank.index == 1 else 2.0, device=rank.device)
    )


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
    "join.throw_comes_too_late",
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
        rank.law("four reductions and one bucket rebuild", in_loop, 6)
        rank.law("nothing at the end", rank.collectives() - before, in_loop)
        rank.law(
            "each rank keeps its model", model.weight.data, torch.full((1, 1), rank.index + 1.0, device=rank.device)
        )


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
    "join.no_sync",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    needs=("join", "no_sync"),
    catalogue=("K07",),
    torch_tests=(TORCH + "test_ddp_uneven_inputs",),
    reports=("pytorch/pytorch#44425", "pytorch/pytorch#44427"),
)
def test_skipped_reductions_are_shadowed_too(rank):
    """Ranks that ran out of inputs follow the others through no_sync: nothing is reduced where they skip, and the next synced step reduces what they accumulated."""
    model = Scalars("a")
    ddp = rank.wrap(model)
    own = rank.batch(1)
    gradients = []
    with ddp.join():
        for _ in range(rank.index + 1):
            model.zero_grad(set_to_none=True)
            with ddp.no_sync():
                ddp(own).backward()
                gradients.append(model.a.grad.clone())
            ddp(own).backward()
            gradients.append(model.a.grad.clone())
    rank.law("inside no_sync the rank's own", gradients[::2], [own[0].clone() for _ in range(rank.index + 1)])
    reduced = [2 * active_sum(rank, step, lambda r: r + 1) / 3 for step in range(rank.index + 1)]
    rank.law("after it the accumulated sum of the active ranks, divided by all", gradients[1::2], reduced)


@case(
    "join.unused_parameters",
    level=MUST,
    source="DistributedDataParallel.join",
    world=3,
    each={"find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}},
    needs=("join",),
    catalogue=("K07",),
    torch_tests=(TORCH + "test_ddp_uneven_inputs",),
)
def test_unused_parameters_stay_without_gradient(rank, options):
    """With find_unused_parameters or static_graph a parameter that no rank uses keeps no gradient under join(), and the others are reduced."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    with ddp.join():
        for step in range(rank.index + 2):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1), use="a").backward()
            rank.law("a is reduced", model.a.grad, active_sum(rank, step, lambda r: r + 2) / 3)
            rank.law("b has no gradient", model.b.grad, None)


@case(
    "join.hook_sees_zeros",
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
    "join.hook_divides",
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
    "join.joined_ranks_keep_their_gradients",
    level=OBSERVED,
    source="nn/parallel/distributed.py: grad_buckets = self.reducer._get_zeros_like_grad_buckets()",
    each={name: OPTIONS[name] for name in ("default", "view")},
    needs=("join",),
    catalogue=("K01",),
)
def test_a_joined_rank_keeps_its_last_gradient(rank, options):
    """A rank that ran out of inputs keeps its last gradient: reductions that it shadows are not written to it."""
    model = Scalars("a")
    ddp = rank.wrap(model, **options)
    with ddp.join():
        for _ in range(2 * rank.index + 1):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
    if rank.index == 0:
        rank.law("the mean of the only step it had", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
    rank.show("gradient", model.a.grad)


@case(
    "join.buffers_from_the_highest_rank",
    level=HAZARD,
    source="nn/parallel/distributed.py: upon a rank to sync module buffers from, since rank 0 may",
    world=3,
    needs=("join",),
    catalogue=("U13", "D01"),
)
def test_buffers_are_those_of_the_highest_active_rank(rank):
    """Under join() a forward begins with the buffers of the highest rank that still has inputs, from the first one on: that they are always rank 0's is false here."""
    model = Holder(0.0)
    ddp = rank.wrap(model)
    inputs, seen = (4, 3, 1), []
    with ddp.join():
        for step in range(inputs[rank.index]):
            model.b.fill_(10 * step + rank.index)
            ddp(rank.batch(1)).backward()
            seen.append(model.seen)
    sources = [max(r for r in range(3) if step < inputs[r]) for step in range(inputs[rank.index])]
    rank.law(
        "the highest active rank's",
        seen,
        [torch.full((1,), 10.0 * step + of, device=rank.device) for step, of in enumerate(sources)],
    )
    rank.show("seen", seen)


@case(
    "join.stays_on",
    level=OBSERVED,
    source="nn/parallel/distributed.py: if self._join_config.enable:",
    needs=("join",),
    catalogue=("U13", "K05"),
)
def test_what_join_switched_on_stays_on(rank):
    """Leaving join() does not switch it off: later forwards still announce themselves, and still take buffers from the highest rank; join(enable=False) ends that."""
    model = Holder(0.0)
    ddp = rank.wrap(model)

    def forward():
        before = rank.collectives()
        model.b.fill_(rank.index + 5)
        ddp(rank.batch(1)).backward()
        return rank.collectives() - before, model.seen.item()

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
    "join.buffer_hook",
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
    model = Holder(0.0)
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
    "join.respects_buffers_off",
    level=MUST,
    source="DistributedDataParallel",
    each={"broadcast_buffers": "broadcast_buffers", "forward_sync_buffers": "forward_sync_buffers"},
    needs=("join",),
    catalogue=("D07",),
    torch_tests=(TORCH + "test_ddp_join_respects_forward_sync_buffers_false",),
    reports=("pytorch/pytorch#178054",),
)
def test_the_final_sync_leaves_out_buffers_that_are_not_synced(rank, option):
    """With broadcast_buffers=False, or forward_sync_buffers=False, the final sync of join() brings the last joiner's parameters and leaves buffers alone."""
    model = Holder(0.0)
    ddp = rank.wrap(model, **{option: False})
    with ddp.join():
        for _ in range(2 - rank.index):
            ddp(rank.batch(1)).backward()
        with torch.no_grad():
            model.weight.fill_(rank.index + 1)
            model.b.fill_(rank.index + 10)
    rank.law("the last joiner's parameters", model.weight.data, torch.full((1,), 1.0, device=rank.device))
    rank.law("the rank's own buffers", model.b, torch.full((1,), rank.index + 10.0, device=rank.device))


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
    "join.skew_warning",
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
    "join.changes_warning_filters",
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
            expected = active_sum(rank, step, lambda r: r + 1) / 3
            rank.law("the first module's", first.a.grad, expected)
            rank.law("the second module's", second.a.grad, expected.clone())


@case(
    "join.second_module_divides_by_initial",
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
            total = active_sum(rank, step, lambda r: r + 1)
            rank.law("the first module's, divided by those that remain", first.a.grad, total / (3 - step))
            rank.law("the second module's, divided by all", second.a.grad, total / 3)


@case(
    "join.static_graph_without_any_input",
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
            total = active_sum(rank, step, lambda r: 4 if r else inputs)
            rank.law("the sum over active ranks, divided by all", model.a.grad, total / 2)


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
