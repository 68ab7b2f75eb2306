"""Complex gradients with every option, and in double precision."""

import torch
from ddp_conformance import OBSERVED, case
from torch import nn

DDP = "DistributedDataParallel"


class Phases(nn.Module):
    """Two complex parameters of one number each, of which `b` is used if it is asked for; a real one lies between."""

    def __init__(self, dtype):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1, dtype=dtype))
        self.real = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x, both=True):
        total = (self.a * x).real.sum() + (self.real * x.real).sum()
        return total + (self.b * x).real.sum() if both else total


@case(
    "reduction.complex_options",
    level=OBSERVED,
    source=DDP,
    each={
        "default": {},
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    },
    catalogue=("B05",),
    reports=("pytorch/pytorch#158753",),
)
def test_options_change_no_complex_gradient(rank, options):
    """A complex gradient is the mean in real and imaginary part under every option, beside a real one, cleared or accumulated; with find_unused_parameters also where one rank does not use it."""
    model = Phases(torch.complex64)
    ddp = rank.wrap(model, **options)
    skips = "find_unused_parameters" in options

    def fed(r):
        return torch.complex(rank.batch(1, of=r), 5 * rank.batch(1, of=r))[0]

    for times in (1, 1, 1, 2, 3):
        if times == 1:
            model.zero_grad(set_to_none=True)
        both = not skips or rank.index > 0 or times > 1
        ddp(fed(rank.index), both=both).backward()
        mean = rank.mean(fed).conj().resolve_conj()
        rank.law("a's mean, of both parts", model.a.grad, times * mean)
        rank.law("the real one's", model.real.grad, times * rank.mean(lambda r: rank.batch(1, of=r)[0]))
        left_out = fed(0).conj().resolve_conj() / rank.world_size if skips else 0
        rank.law("b's mean", model.b.grad, times * mean - left_out)


@case("reduction.complex_double", level=OBSERVED, source=DDP, catalogue=("B05",))
def test_complex_gradients_in_double_precision_keep_all_bits(rank):
    """Complex gradients in double precision are averaged in double precision: bits that single precision lacks are there, in both parts."""
    model = Phases(torch.complex128)
    ddp = rank.wrap(model)
    numbers = [complex(2 + 2**-40, 8 - 2**-38), complex(4 + 2**-38, -2 + 2**-40)]
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(torch.tensor([numbers[rank.index]], dtype=torch.complex128, device=rank.device)).backward()
        mean = torch.tensor([(sum(numbers) / 2).conjugate()], dtype=torch.complex128, device=rank.device)
        rank.law("every bit of the mean", [model.a.grad, model.b.grad], [mean, mean.clone()])
