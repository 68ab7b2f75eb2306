"""After backward every rank's gradient is the mean over ranks of the gradients that each would have alone."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.models import Scalars, linear


@case("mean_gradients.mean", level=MUST, source="DistributedDataParallel", world=(1, 2, 3, 4), catalogue=("B01",))
def test_gradients_are_the_mean_over_ranks(rank):
    """Alone a rank gets its own gradient; inside DDP every rank gets the mean over the ranks."""
    alone = linear(3).to(rank.device)
    own = rank.batch(3)  # a row of W*(r+1) on rank r of W, and the gradient of a summed Linear is its input
    alone(own).sum().backward()
    rank.show("alone", alone.weight.grad)
    rank.law("alone a rank gets its own gradient", alone.weight.grad, own)

    model = linear(3)
    ddp = rank.wrap(model)
    ddp(own).sum().backward()
    rank.show("in_ddp", model.weight.grad)
    rank.law("inside DDP a rank gets the mean", model.weight.grad, rank.mean(lambda r: rank.batch(3, of=r)))


@case(
    "mean_gradients.every_parameter",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 3, 4),
    catalogue=("B01",),
    reports=("pytorch/pytorch#42471",),
)
def test_every_parameter_of_a_deep_model_gets_its_mean(rank):
    """The mean reaches every parameter of a model with several layers, weights and biases alike, in every iteration."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    for index, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, float(1 + index % 2))
    model.to(rank.device)
    expected = rank.mean(lambda r: _gradients_alone(model, rank.batch(2, of=r)))
    ddp = rank.wrap(model)
    for _ in range(4):  # the buckets of the second iteration are not those of the first
        ddp.zero_grad()
        _loss(ddp, rank.batch(2)).backward()
        got = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        rank.law("every element of every parameter is the mean", got, expected)
    rank.show("gradients", [parameter.grad for parameter in model.parameters()])


def _loss(model, batch):
    """The summed output times the batch's first element: so that the gradients of biases differ by rank too."""
    return model(batch).sum() * batch[0, 0]


def _gradients_alone(model, batch):
    gradients = torch.autograd.grad(_loss(model, batch), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@case(
    "mean_gradients.same_bits",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B01",),
    reports=("pytorch/pytorch#60118",),
)
def test_every_rank_holds_the_same_bits(rank):
    """Where the mean is no exact number it is rounded, and all ranks hold the same bits all the same."""
    model = linear(64, dtype=torch.float32)
    ddp = rank.wrap(model)
    thirds = torch.arange(1, 65, device=rank.device).reshape(1, 64) / (3.0 + rank.index)
    ddp(thirds).sum().backward()
    got = model.weight.grad.clone()
    everyone = [torch.zeros_like(got) for _ in range(rank.world_size)]
    dist.all_gather(everyone, got)
    for other, bits in enumerate(everyone):
        rank.law(f"the gradient is rank {other}'s, bit for bit", got, bits)
    rank.differs("the gradient is not the rank's own", got, thirds)


@case(
    "mean_gradients.divisor",
    level=MUST,
    source="DistributedDataParallel",
    world=3,
    catalogue=("B01",),
    reports=("pytorch/pytorch#36516", "pytorch/torchtitan#2323"),
)
def test_the_divisor_is_the_size_of_the_process_group(rank):
    """With a process group of its own DDP divides by that group's size, and ranks outside keep what they have."""
    members = [1, 2]
    group = dist.new_group(members)
    model, own = linear(1), rank.batch(1) * 4
    if rank.index in members:
        ddp = rank.wrap(model, process_group=group)
        ddp(own).sum().backward()
        expected = rank.mean(lambda r: rank.batch(1, of=r) * 4, ranks=members)
        rank.law("a member gets the mean over its group", model.weight.grad, expected)
    else:
        model.to(rank.device)(own).sum().backward()
        rank.law("a rank outside the group keeps its own gradient", model.weight.grad, own)
    rank.show("gradient", model.weight.grad)


@case(
    "mean_gradients.summed_loss",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 3, 4),
    catalogue=("B02",),
    reports=("pytorch/pytorch#42471", "facebookresearch/fairseq#494", "pytorch/torchtitan#2323"),
)
def test_a_summed_loss_is_world_size_times_smaller(rank):
    """A loss summed over the batch gives gradients world-size times smaller than one process gets from the whole batch."""
    alone = linear(2).to(rank.device)
    whole = torch.cat([rank.batch(2, of=r, rows=3) for r in range(rank.world_size)])
    alone(whole).sum().backward()
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2, rows=3)).sum().backward()
    rank.show("one_process", alone.weight.grad)
    rank.show("in_ddp", model.weight.grad)
    rank.law(
        "world-size times the gradient is one process's", rank.world_size * model.weight.grad, alone.weight.grad.clone()
    )


@case(
    "mean_gradients.effective_batch",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 4),
    catalogue=("B02",),
    reports=("neuralmagic/sparseml#135",),
)
def test_the_effective_batch_is_per_rank_batch_times_world_size(rank):
    """A mean loss over equal batches gives what one process gets from a batch that is world-size times larger."""
    rows = 4
    alone, model = linear(2).to(rank.device), linear(2)
    whole = torch.cat([_counted(rank, r, rows) for r in range(rank.world_size)])
    alone(whole).square().mean().backward()
    ddp = rank.wrap(model)
    ddp(_counted(rank, rank.index, rows)).square().mean().backward()
    rank.show("rows", len(whole))
    rank.show("in_ddp", model.weight.grad)
    rank.law("the gradient is that of world-size times the rows", model.weight.grad, alone.weight.grad)
    rank.law("the whole batch has world-size times the rows", len(whole), rank.world_size * rows)


def _counted(rank, of, rows):
    """Rows that all differ: the per-rank batch of rank `of`, counted up by one row after the other."""
    return rank.batch(2, of=of, rows=rows) + torch.arange(float(rows), device=rank.device).reshape(rows, 1)


@case(
    "mean_gradients.uneven_batches",
    level=HAZARD,
    source="DistributedDataParallel",
    world=(2, 3),
    reports=("pytorch/pytorch#67253",),
)
def test_uneven_batches_give_a_mean_of_means(rank):
    """With mean losses over batches of different sizes the gradient is the mean of the ranks' means, not the mean over all rows.

    The size of a rank's batch never enters the reduction, so a row of a small batch weighs more than a row of a large one.
    """

    def rows(r):
        return rank.batch(1, of=r, rows=2**r)

    model = linear(1)
    ddp = rank.wrap(model)
    ddp(rows(rank.index)).mean().backward()
    whole = torch.cat([rows(r) for r in range(rank.world_size)])
    rank.show("gradient", model.weight.grad)
    rank.law("the gradient is the mean of means", model.weight.grad, rank.mean(lambda r: rows(r).mean().reshape(1, 1)))
    rank.differs("the gradient is not the mean over all rows", model.weight.grad, whole.mean().reshape(1, 1))


@case(
    "mean_gradients.weighted_loss",
    level=MUST,
    source="DistributedDataParallel",
    reports=(
        "pytorch/pytorch#67253",
        "huggingface/transformers#34242",
        "facebookresearch/fairseq#494",
        "huggingface/transformers#48706",
    ),
)
def test_scaling_the_loss_by_world_size_over_total_weighs_every_row_alike(rank):
    """A summed loss times world size over the total number of rows weighs every row alike, however the rows are spread.

    The catch: a term that is a mean already, scaled along with the rest, counts world-size times.
    """
    rows = {0: 1, 1: 3}
    total = sum(rows.values())
    model = Scalars("weight", "penalty")
    ddp = rank.wrap(model)
    share = ddp(rank.batch(1, rows=rows[rank.index]), use="weight") / total
    penalty = ddp.module.penalty.sum() * 8  # the same on every rank, a mean already
    ((share + penalty) * rank.world_size).backward()
    whole = sum(rank.batch(1, of=r).flatten() * rows[r] for r in rows)
    rank.show("gradient", model.weight.grad)
    rank.law("the gradient is that of the mean over all rows", model.weight.grad, whole / total)
    rank.show("penalty", model.penalty.grad)
    rank.law("a mean term counts world-size times", model.penalty.grad, rank.tensor(8 * rank.world_size))
