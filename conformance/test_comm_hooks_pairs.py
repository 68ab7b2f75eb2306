"""Communication hooks beside something else: the search for unused parameters, and another DDP in the same process."""

from ddp_conformance import MUST, case
from ddp_conformance.models import linear
from ddp_conformance.rank import as_it_is, completed

REGISTER = "DistributedDataParallel.register_comm_hook"


@case("comm_hooks.find_unused", level=MUST, source=REGISTER, needs=("register_comm_hook",), catalogue=("E03", "I02"))
def test_a_hooks_answer_counts_with_find_unused_parameters(rank):
    """With find_unused_parameters=True, too, the tensor in the hook's future becomes the gradients."""
    model = linear(2)
    ddp = rank.wrap(model, find_unused_parameters=True)
    ddp.register_comm_hook(None, lambda state, bucket: completed(bucket.buffer() * 3))
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(2)).sum().backward()
        rank.law("three times the rank's own", model.weight.grad, 3 * rank.batch(2))


@case("comm_hooks.one_of_two", level=MUST, source=REGISTER, needs=("register_comm_hook",), catalogue=("I01",))
def test_a_hook_is_of_its_own_ddp_alone(rank):
    """A hook that is registered on one DDP leaves another one in the same process alone."""
    first, second = linear(1), linear(1)
    hooked, plain = rank.wrap(first), rank.wrap(second)
    hooked.register_comm_hook(None, as_it_is)
    for _ in range(3):
        first.zero_grad(set_to_none=True)
        second.zero_grad(set_to_none=True)
        hooked(rank.batch(1)).sum().backward()
        plain(rank.batch(1)).sum().backward()
        rank.law("the one keeps its own gradient", first.weight.grad, rank.batch(1))
        rank.law("the other takes the mean", second.weight.grad, rank.mean(lambda r: rank.batch(1, of=r)))
