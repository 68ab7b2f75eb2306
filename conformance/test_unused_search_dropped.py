"""Forwards whose outputs are dropped, in a model of which a part is not used."""

from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars


@case(
    "unused_search.forward_starts_nothing",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: a call to this function can simply be omitted.",
    each={"one_bucket": {}, "one_each": {"bucket_cap_mb": 1e-6}},
    needs=("find_unused_parameters",),
    catalogue=("B10", "E01"),
    torch_tests=(
        "test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::test_ignored_output_with_unused_parameters",
    ),
    reports=("pytorch/pytorch#22219",),
)
def test_a_forward_with_unused_parameters_starts_no_collective(rank, options):
    """
    With find_unused_parameters=True a forward starts no collective, also where a bucket holds unused parameters alone: the output may be dropped, and the next backward reduces as ever.
    """
    model = Scalars("a", "b", "c")
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    for _ in range(3):
        before = rank.collectives()
        for _ in range(3):
            ddp(5 * rank.batch(1), use="b")
        rank.law("three forwards start nothing", rank.collectives() - before, 0)
        ddp(rank.batch(1), use="b").backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
        rank.law("the mean, and None", [model.a.grad, model.b.grad, model.c.grad], [None, mean, None])
        model.zero_grad(set_to_none=True)
