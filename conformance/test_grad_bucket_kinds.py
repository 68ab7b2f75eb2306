"""What a communication hook is handed where parameters are of several kinds: strided, of several dtypes, sparse; and where gradients are views."""

import torch
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.models import Scalars
from ddp_conformance.rank import completed, mean_all_reduce
from torch import nn

BUCKET = "torch.distributed.GradBucket"
VIEWS = {"copies": {}, "views": {"gradient_as_bucket_view": True}}


def ramp(parameter):
    """1, 2, 3 ... in the parameter's shape."""
    return torch.arange(1.0, parameter.numel() + 1, device=parameter.device).reshape(parameter.shape)


def as_it_lies(tensor, parameter):
    """The elements of the tensor in the order in which the parameter's lie in memory."""
    by_stride = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1)


class Strided(nn.Module):
    """A transposed weight and one in channels_last; element k of either has k + 1 times x for its gradient."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.ones(3, 2).t())
        self.last = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x):
        return sum((each * ramp(each) * x).sum() for each in (self.turned, self.last))


@case("grad_bucket.strided", level=HAZARD, source=f"{BUCKET}.gradients", each=VIEWS, catalogue=("I09", "B12"))
def test_gradients_of_strided_parameters_are_out_of_place(rank, options):
    """
    Of a parameter that does not lie row by row in memory a hook finds the elements in the wrong places: a piece of `gradients()` has the parameter's shape, and the elements in the order in which they lie in memory.

    What the hook answers with is taken back in the same order, so that a hook which treats all elements alike does no harm.
    """
    model = Strided()
    ddp = rank.wrap(model, **options)

    def watching(state, bucket):
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            own = ramp(parameter) * rank.batch(1)
            rank.law("the shape is the parameter's", gradient.shape, parameter.shape)
            rank.law("in the order of memory", gradient.flatten(), as_it_lies(own, parameter))
            rank.differs("they are not in their places", gradient.clone(), own)
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    for _ in range(3):
        model.zero_grad()
        ddp(rank.batch(1)).backward()
        for parameter in (model.turned, model.last):
            rank.law("the mean is in its place", parameter.grad.clone(), ramp(parameter) * mean)


@case(
    "grad_bucket.last_of_all",
    level=MUST,
    source=f"{BUCKET}.is_last",
    each={"dense": False, "sparse": True},
    lanes=("gloo:*",),
    catalogue=("I09",),
)
def test_one_bucket_is_the_last_whatever_the_dtypes(rank, sparse):
    """Where dtypes, or a sparse gradient, make several buckets, indices count through all of them, and `is_last()` is true for one alone, the last that is handed over."""
    model = nn.Module()
    model.table = nn.Embedding(4, 1, sparse=sparse)
    model.scalars = Scalars("a", "b", "c")
    model.scalars.b = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model.scalars.c = nn.Parameter(torch.ones(1, dtype=torch.float16))
    model.forward = lambda x: model.scalars(x) + model.table(torch.tensor([1], device=x.device)).sum()
    ddp = rank.wrap(model)
    seen = []

    def watching(state, bucket):
        seen.append((bucket.index(), bucket.is_last()))
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    for _ in range(4):
        seen.clear()
        ddp(rank.batch(1)).backward()
        buckets = 4 if sparse else 3
        rank.law("index, last", seen, [(index, index == buckets - 1) for index in range(buckets)])


@case("grad_bucket.set_buffer_in_views", level=MUST, source=f"{BUCKET}.set_buffer", each=VIEWS, catalogue=("I09",))
def test_set_buffer_may_be_answered_with_the_buffer(rank, options):
    """A hook may replace the buffer and answer with `buffer()`, which is the new one then, whether gradients are views of the old one or not."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)

    def replacing(state, bucket):
        bucket.set_buffer(bucket.buffer() * 3)
        return completed(bucket.buffer())

    ddp.register_comm_hook(None, replacing)
    for _ in range(4):
        model.zero_grad()
        ddp(rank.batch(1)).backward()
        three = 3 * rank.batch(1)[0]
        rank.law("the new buffer's", [model.a.grad, model.b.grad], [three, three.clone()])
