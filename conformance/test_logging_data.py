"""What DDP tells of itself: the keys of its logging data, when they are filled, and what they count."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear, three_layers
from torch import nn

DATA = "DistributedDataParallel._get_ddp_logging_data"
RATE = "DistributedDataParallel._set_ddp_runtime_logging_sample_rate"
CPU_TEST = "distributed_test.py::_DistTestBase::test_ddp_logging_data_cpu"


@case(
    "logging_data.construction", level=MUST, source=DATA, world=(1, 2, 3), catalogue=("M01",), torch_tests=(CPU_TEST,)
)
def test_the_data_is_there_right_after_construction(rank):
    """
    Right after construction the logging data holds the constructor's options and what DDP found in the model, before any forward.

    Two dtypes, a frozen parameter and a cap of half a MiB; bytes and tensors are counted without the frozen one.
    """
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double(), linear(5, 1).requires_grad_(False))
    ddp = rank.wrap(model, bucket_cap_mb=0.5, gradient_as_bucket_view=True, find_unused_parameters=True)
    expected = {
        "world_size": rank.world_size,
        "rank": rank.index,
        "module_name": "Sequential",
        "num_parameter_tensors": 4,
        "total_parameter_size_bytes": 4 * (6 + 3) + 8 * (3 + 1),
        "bucket_cap_bytes": 2**19,
        "broadcast_buffers": 1,
        "gradient_as_bucket_view": 1,
        "find_unused_parameters": 1,
        "has_sync_bn": 0,
        "is_multi_device_module": 0,
        "iteration": 0,
    }
    data = ddp._get_ddp_logging_data()
    for key, value in expected.items():
        rank.law(f"{key} is known", data.get(key), value)
    rank.law("both dtypes are known", sorted(data["dtypes"].split(", ")), ["double", "float"])
    rank.show("keys", sorted(data))


@case("logging_data.runtime_keys", level=OBSERVED, source=DATA, catalogue=("M01",))
def test_training_adds_keys(rank):
    """
    After some training steps the logging data has further keys: times of forward, backward and communication, the order in which gradients got ready, and the rebuilt buckets.
    """
    ddp = rank.wrap(linear(2))
    before = set(ddp._get_ddp_logging_data())
    for _ in range(4):
        ddp(rank.batch(2)).sum().backward()
    after = ddp._get_ddp_logging_data()
    rank.law("no key is lost", before - set(after), set())
    rank.show("added", sorted(set(after) - before))


@case(
    "logging_data.sampled",
    level=MUST,
    source=RATE,
    each={"default_rate": None, "rate_3": 3},
    catalogue=("M02",),
    torch_tests=(CPU_TEST, "distributed_test.py::_DistTestBase::test_ddp_logging_data_gpu"),
)
def test_runtime_data_is_taken_at_the_first_ten_iterations_and_then_at_every_nth(rank, rate):
    """
    Runtime data is recorded in each of the first ten iterations, and then only at multiples of the sample rate, 100 if it was not set.

    Seen by the key `iteration` after each forward; it counts from 1 the iteration that begins, and stays where it is until the next record.
    """
    ddp = rank.wrap(Scalars("a"))
    if rate:
        ddp._set_ddp_runtime_logging_sample_rate(rate)
    steps = 20 if rate else 110
    expected = 0
    seen, wanted = [], []
    for iteration in range(steps):
        output = ddp(rank.batch(1))
        if iteration <= 10 or iteration % (rate or 100) == 0:
            expected = iteration
        wanted.append(expected)
        seen.append(ddp._get_ddp_logging_data()["iteration"])
        output.backward()
    rank.law("recorded in the first ten, then at every nth", seen, wanted)


@case("logging_data.rate_at_least_one", level=MUST, source=RATE, catalogue=("M02",))
def test_a_sample_rate_below_one_is_refused(rank):
    """
    A sample rate below 1 is refused with ValueError; 1 records every iteration.
    """
    ddp = rank.wrap(Scalars("a"))
    for name, rate in (("zero", 0), ("negative", -1)):
        with rank.raises(name, ValueError, match="sample rate should be equal or greater than 1"):
            ddp._set_ddp_runtime_logging_sample_rate(rate)
    ddp._set_ddp_runtime_logging_sample_rate(1)
    for iteration in range(14):
        output = ddp(rank.batch(1))
        rank.law("every iteration is recorded", ddp._get_ddp_logging_data()["iteration"], iteration)
        output.backward()


@case("logging_data.one_behind", level=OBSERVED, source=DATA, catalogue=("M03", "M04"), torch_tests=(CPU_TEST,))
def test_what_is_recorded_is_the_iteration_before(rank):
    """
    A forward records what was known when it began: the order in which gradients got ready is in the data from the second forward on, and the buckets rebuilt in the second from the third on.

    Three Linear(512, 512) and a cap of 1 MiB, for which the rebuilt buckets hold one layer each.
    """
    ddp = rank.wrap(three_layers(), bucket_cap_mb=1)
    told = []
    for _ in range(4):
        output = ddp(torch.ones(1, 512, device=rank.device))
        data = rank.log(
            ddp,
            "prev_iteration_grad_ready_order_indices",
            "rebuilt_per_bucket_param_indices",
            "rebuilt_bucket_sizes",
        )
        told.append(tuple(data.values()))
        output.sum().backward()
    order, layers, sizes = "5, 4, 3, 2, 1, 0", "5 4, 3 2, 1 0", "1050624, 1050624, 1050624"
    rank.law("nothing yet at the first forward", told[0][1:], ("absent", "absent"))
    rank.law("the ready order at the second", told[1][0], order)
    rank.law("the rebuilt buckets at the third", told[2:], [(order, layers, sizes)] * 2)
    rank.show("second", told[1])


@case("logging_data.unused_bytes", level=OBSERVED, source=DATA, catalogue=("M05",))
def test_the_bytes_of_unused_parameters_are_counted(rank):
    """
    `unused_parameter_size` is the number of bytes of the parameters that the iteration before did not use.

    Of three float64 scalars one is used, so 16 bytes are unused. Early releases do not start anew and add up over the iterations.
    """
    ddp = rank.wrap(Scalars("a", "b", "c", dtype=torch.float64), find_unused_parameters=True)
    told = []
    for _ in range(5):
        ddp(rank.batch(1, dtype=torch.float64), use="a").backward()
        told.append(rank.log(ddp, "unused_parameter_size")["unused_parameter_size"])
    rank.law("two scalars of eight bytes after the first", told[1], 16)
    rank.show("bytes", told)


@case("logging_data.buckets_reduced", level=OBSERVED, source=DATA, catalogue=("M06",))
def test_the_reduced_buckets_are_counted(rank):
    """
    `num_buckets_reduced`, where there is such a key, is how many buckets the iteration before reduced: none without synchronization.

    Two dtypes make two buckets.
    """
    model = Scalars("a", "b")
    model.b = nn.Parameter(torch.ones(1, dtype=torch.float64))
    ddp = rank.wrap(model)
    for _ in range(4):
        ddp(rank.batch(1)).backward()
    told = rank.log(ddp, "num_buckets_reduced")["num_buckets_reduced"]
    rank.law("two buckets, or no such key", told in (2, "absent"), True)
    rank.show("told", told)


@case(
    "logging_data.can_set_static_graph",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("F07", "U28"),
    torch_tests=("distributed_test.py::_DistTestBase::test_detect_ddp_is_actually_static",),
    reports=("pytorch/pytorch#61871", "pytorch/pytorch#67059", "pytorch/pytorch#81929", "pytorch/pytorch#68833"),
)
def test_can_set_static_graph_is_never_true(rank):
    """
    The key `can_set_static_graph` never says True: it is absent while the graph has been static, and becomes 0 once it was not.

    The documentation's test, `get("can_set_static_graph") == True`, is so never fulfilled. What works is
    `reducer._ddp_graph_static()`. The 0 is written once in a process: a second DDP does not get it.
    """

    def train(ddp, *uses):
        for use in uses:
            ddp(rank.batch(1), use=use).backward()
        return rank.log(ddp, "can_set_static_graph")["can_set_static_graph"], ddp.reducer._ddp_graph_static()

    first, second, static = (rank.wrap(Scalars("a", "b"), find_unused_parameters=True) for _ in range(3))
    rank.law("absent after a static graph", train(static, *("a",) * 5), ("absent", True))
    rank.law("0 after one that changed", train(first, "a", "b", "a", "b", "a"), (0, False))
    rank.law("absent in the next DDP that changed", train(second, "a", "b", "a", "b", "a"), ("absent", False))
