"""Parameters and gradients that do not lie row by row in memory: what DDP allows, and what its stride warning means."""

import warnings

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import numbered
from torch import nn

DOCUMENTED = "DistributedDataParallel"
HARMLESS = (
    "pytorch/pytorch#47163",
    "pytorch/pytorch#70222",
    "pytorch/pytorch#72787",
    "pytorch/pytorch#135358",
    "huggingface/diffusers#11083",
)


class Weighted(nn.Module):
    """The input times the sum of the elements of every parameter, element k of each (in its own order) weighted by k + 1."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(parameter) for parameter in parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((parameter * weights(parameter) * x).sum() for parameter in self.all)


def weights(parameter: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, parameter.numel() + 1, device=parameter.device).reshape(parameter.shape)


LAYOUTS = {
    "channels_last": lambda: torch.zeros(2, 2, 1, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "with_gaps": lambda: torch.zeros(4, 6)[::2, ::2],
}


@case(
    "strides.allowed",
    level=MUST,
    source=DOCUMENTED,
    each=LAYOUTS,
    world=(2, 3),
    catalogue=("A18",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_grad_layout_1devicemodule_1replicaperprocess",),
    reports=("pytorch/pytorch#79043",),
)
def test_parameters_of_any_strides_may_be_mixed(rank, layout):
    """A model may mix parameters that lie row by row with others that do not, as long as ranks agree: values and gradients arrive element by element."""
    make = lambda of: numbered(Weighted(torch.zeros(2, 3), layout(), torch.zeros(1)), of)  # noqa: E731
    model = make(rank.index)
    ddp = rank.wrap(model)
    rank.law("every element is rank 0's", list(model.all), list(make(0).to(rank.device).all))
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r))[0]
        expected = [weights(parameter) * mean for parameter in model.all]
        rank.law(
            f"every element of iteration {step} is the mean", [parameter.grad for parameter in model.all], expected
        )


@case(
    "strides.warning",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: Gradient Layout",
    reports=HARMLESS,
)
def test_the_stride_warning_changes_no_value(rank):
    """A gradient whose strides are not its parameter's makes DDP warn once that strides do not match, and is averaged like any other.

    Here the user has put a transposed tensor into `.grad`, which backward adds to. The values are right in every
    iteration; what the warning is about is the speed of a copy.
    """
    model = Weighted(torch.ones(2, 3))
    ddp = rank.wrap(model)
    parameter = model.all[0]
    parameter.grad = torch.zeros(3, 2, device=rank.device).t()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            parameter.grad.zero_()
            ddp(rank.batch(1)).backward()
            expected = weights(parameter) * rank.mean(lambda r: rank.batch(1, of=r))[0]
            rank.law(f"the gradient of iteration {step} is the mean", parameter.grad, expected)
    told = [str(warning.message) for warning in caught if "bucket view strides" in str(warning.message)]
    rank.show("warned", len(told))
    rank.show("strides", list(parameter.grad.stride()))
