"""Buffers that a forward assigns anew, at the end of join()."""

from ddp_conformance import MUST, case
from ddp_conformance.models import linear


@case(
    "join.ends_with_reassigned_buffers",
    level=MUST,
    source="nn/parallel/distributed.py: the model corresponding to the last joined process to all processes to",
    needs=("join",),
    world=(2, 3),
    catalogue=("K05",),
    reports=("pytorch/pytorch#63916", "pytorch/pytorch#64472"),
)
def test_the_end_brings_the_buffers_of_now(rank):
    """When all ranks have joined, a buffer that forwards assign anew, as in `self.count = self.count + 1`, is the last joiner's on every rank."""
    model = linear(1)
    model.register_buffer("count", rank.tensor(0))
    plain = model.forward

    def forward(x):
        model.count = model.count + 1
        return plain(x)

    model.forward = forward
    ddp = rank.wrap(model)
    with ddp.join():
        for _ in range(rank.index + 1):
            ddp(rank.batch(1)).sum().backward()
    rank.law("the last joiner's count", model.count, rank.tensor(rank.world_size))
