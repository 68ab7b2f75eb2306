"""The optimizer that goes with the post-localSGD hook: each rank steps alone, and from time to time parameters are averaged."""

from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.optim import SGD

OPTIMIZER = "distributed/optim/post_localSGD_optimizer.py"
START, PERIOD = 2, 3
RATES = {"a": 0.25, "b": 0.125}


class Loop:
    """A model of two numbers in groups of their own, trained by the post-localSGD hook and optimizer, and what arithmetic expects of it."""

    def __init__(self, rank):
        self.rank, self.model = rank, Scalars(*RATES)
        self.ddp = rank.wrap(self.model)
        state = PostLocalSGDState(None, None, START, post_local_gradient_allreduce=False)
        self.ddp.register_comm_hook(state, post_localSGD_hook)
        self.optimizer = self.make_optimizer()
        self.steps = 0
        self.expected = {name: [rank.tensor(1)] * rank.world_size for name in RATES}

    def make_optimizer(self):
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer  # two seconds, which every collection would pay

        each = [{"params": [getattr(self.model, name)], "lr": rate} for name, rate in RATES.items()]
        return PostLocalSGDOptimizer(SGD(each, lr=1), PeriodicModelAverager(period=PERIOD, warmup_steps=START))

    def step(self):
        """Both are linear, so a gradient is the rank's input, or in the first iterations the mean over the ranks."""
        rank = self.rank
        self.optimizer.zero_grad()
        self.ddp(rank.batch(1)).backward()
        self.optimizer.step()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
        averaged = self.steps >= START and (self.steps - START) % PERIOD == 0
        for name, rate in RATES.items():
            moved = [
                place - rate * (mean if self.steps < START else rank.batch(1, of=r)[0])
                for r, place in enumerate(self.expected[name])
            ]
            self.expected[name] = [sum(moved) / rank.world_size] * rank.world_size if averaged else moved
        self.steps += 1
        rank.law(
            "each rank is where arithmetic takes it",
            [getattr(self.model, name).data for name in RATES],
            [self.expected[name][rank.index] for name in RATES],
        )


@case(
    "post_local_sgd.optimizer",
    level=MUST,
    source=f"{OPTIMIZER}: After the warm-up stage, it averages parameters periodically after the local optimizer is applied.",
    world=(2, 4),
    reports=("pytorch/pytorch#74157", "pytorch/pytorch#74737", "pytorch/pytorch#74894"),
)
def test_parameters_are_averaged_once_in_a_period(rank):
    """
    With PostLocalSGDOptimizer all ranks step alike during the warm-up, then each by its own gradients, and in the first step after the warm-up and once in every period from there on all parameters, of every group, become their mean over the ranks.
    """
    loop = Loop(rank)
    for _ in range(9):
        loop.step()


@case(
    "post_local_sgd.optimizer_resumed",
    level=MUST,
    source=f"{OPTIMIZER}: to ensure reload does not cause unnecessary warm up again.",
    reports=("pytorch/pytorch#74556", "pytorch/pytorch#78988"),
)
def test_a_loaded_state_goes_on_in_the_period(rank):
    """A PostLocalSGDOptimizer that loads the state of another averages parameters when that one would have: it neither warms up again nor begins a period anew."""
    loop = Loop(rank)
    for _ in range(4):
        loop.step()
    saved = loop.optimizer.state_dict()
    loop.optimizer = loop.make_optimizer()
    loop.optimizer.load_state_dict(saved)
    for _ in range(5):
        loop.step()
