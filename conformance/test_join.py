"""Under join() ranks that ran out of inputs shadow the collectives of the others, and all end with the last one's model."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, WithBuffers, linear
from torch import nn

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"
OPTIONS = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "tiny_buckets": {"bucket_cap_mb": 1e-6},
}


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
    expected = [rank.active_sum(step, lambda r: 2 * r) / 3 for step in range(2 * rank.index)]
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
    expected = [rank.active_sum(step, lambda r: r + 2) / divisors[step] for step in range(rank.index + 2)]
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
    model = WithBuffers(b=torch.zeros(1))
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
    reduced = [2 * rank.active_sum(step, lambda r: r + 1) / 3 for step in range(rank.index + 1)]
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
            rank.law("a is reduced", model.a.grad, rank.active_sum(step, lambda r: r + 2) / 3)
            rank.law("b has no gradient", model.b.grad, None)


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
    model = WithBuffers(b=torch.zeros(1))
    ddp = rank.wrap(model, **{option: False})
    with ddp.join():
        for _ in range(2 - rank.index):
            ddp(rank.batch(1)).backward()
        with torch.no_grad():
            model.weight.fill_(rank.index + 1)
            model.b.fill_(rank.index + 10)
    rank.law("the last joiner's parameters", model.weight.data, torch.full((1,), 1.0, device=rank.device))
    rank.law("the rank's own buffers", model.b, torch.full((1,), rank.index + 10.0, device=rank.device))
