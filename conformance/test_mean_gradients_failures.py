"""A backward that fails, and going on after it."""

from ddp_conformance import OBSERVED, case
from ddp_conformance.models import linear
from torch import nn


def fail(gradient):
    raise ArithmeticError("this loss will not do")


class Checked(nn.Module):
    """Two layers; where it is told so, backward raises as soon as it comes into the module, before the first gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(2, 2), linear(2, 1)

    def forward(self, x, fails):
        output = self.second(self.first(x))
        if fails:
            output.register_hook(fail)
        return output * 1


@case(
    "mean_gradients.after_a_failed_backward",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.reducer.prepare_for_forward()",
    each={
        "default": {},
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
    },
    catalogue=("B01",),
)
def test_a_backward_that_failed_before_the_first_gradient_changes_nothing(rank, options):
    """After a backward that raised on every rank before it came to the first gradient, as where a gradient is checked, the next step is reduced as ever."""
    model = Checked()
    ddp = rank.wrap(model, **options)
    mean = rank.mean(lambda r: rank.batch(2, of=r))
    for _ in range(3):
        raised = False
        try:
            ddp(rank.batch(2), True).sum().backward()
        except ArithmeticError:
            raised = True
        rank.law("the error comes through", raised, True)
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(2), False).sum().backward()
        rank.law("the means", [model.first.weight.grad, model.second.weight.grad], [mean.expand(2, 2), 2 * mean])
