"""The communication hooks that ship with torch: all-reduce, compression to 16 bits, quantization, no-op, and how they are named."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
TESTS = "test_ddp_hooks.py::DistributedDataParallelCommHookTest"
BUILTIN = dist.BuiltinCommHookType


def register(ddp, hook):
    if isinstance(hook, BUILTIN):
        ddp._register_builtin_comm_hook(hook)
    else:
        ddp.register_comm_hook(None, hook)


@case(
    "shipped_hooks.allreduce",
    level=MUST,
    source=f"{HOOKS}.default_hooks.allreduce_hook",
    world=(1, 2, 3, 4),
    each={"python": default_hooks.allreduce_hook, "built_in": BUILTIN.ALLREDUCE},
    catalogue=("J01", "J04"),
    torch_tests=(
        f"{TESTS}::test_ddp_comm_hook_allreduce_hook",
        "distributed_test.py::_DistTestBase::test_ddp_hook_parity_allreduce",
        "test_c10d_nccl.py::DistributedDataParallelTest::test_builtin_ddp_comm_hooks_nccl",
    ),
)
def test_the_all_reduce_hook_gives_the_mean(rank, hook):
    """
    With the shipped all-reduce hook, in Python or built in, training follows the mean of the ranks' gradients as it does without a hook.

    The loss is (w*x)^2/2 with x = W*(r+1) on rank r of W, so the mean gradient is w * W * (1 + 4 + 9 ...); the rate is 1/1024.
    """
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    register(ddp, hook)
    x = rank.batch(1, dtype=torch.float64)
    expected = rank.tensor(1, dtype=torch.float64)
    for _ in range(4):
        ddp.zero_grad()
        (ddp(x) ** 2 / 2).backward()
        with torch.no_grad():
            model.w -= model.w.grad / 1024
        expected = expected - expected * rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2) / 1024
        rank.law("each step follows the mean", model.w, expected)


@case(
    "shipped_hooks.allreduce_rounds_otherwise",
    level=HAZARD,
    source=f"{HOOKS}.default_hooks.allreduce_hook",
    world=3,
    each={"python": default_hooks.allreduce_hook, "built_in": BUILTIN.ALLREDUCE},
    catalogue=("J01", "U02"),
)
def test_the_all_reduce_hook_rounds_otherwise_than_no_hook(rank, hook):
    """
    On three ranks the shipped all-reduce hook and DDP without a hook can differ in the last bit: the hook divides by the world size, DDP multiplies by its reciprocal.

    The documentation expects the same results. With gradients 2, 3 and 7 in float64 the hook gives 4.0, DDP alone 3.9999999999999996; the sums
    are the same in whatever order they are taken. On 2 or 4 ranks there is no difference.
    """
    values = (2, 3, 7)
    x = rank.tensor(values[rank.index], dtype=torch.float64)
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    ddp(x).backward()
    multiplied = sum(value * (1 / 3) for value in values)
    rank.law("without a hook gradients are multiplied by 1/3", model.w.grad, rank.tensor(multiplied, dtype=x.dtype))
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    register(ddp, hook)
    ddp(x).backward()
    divided = sum(value / 3 for value in values)
    rank.law("the hook divides them by 3", model.w.grad, rank.tensor(divided, dtype=x.dtype))


HALF_HOOKS = {
    "python": default_hooks.fp16_compress_hook,
    "wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "built_in": BUILTIN.FP16_COMPRESS,
}


@case(
    "shipped_hooks.fp16",
    level=MUST,
    source=f"{HOOKS}.default_hooks.fp16_compress_hook",
    each=HALF_HOOKS,
    catalogue=("J02", "J04"),
    torch_tests=(
        f"{TESTS}::test_ddp_comm_hook_fp16compress_hook",
        "test_c10d_nccl.py::DistributedDataParallelTest::test_fp16_compress_wrapper_nccl",
    ),
)
def test_the_fp16_hook_averages_in_half_precision(rank, hook):
    """
    The fp16 hook casts gradients to float16, divides, all-reduces, and casts back, so that the gradients are exactly the half-precision mean; `fp16_compress_wrapper(allreduce_hook)` and the built-in hook do the same.

    The values need more than the 11 bits of a half, some round up and some down; gradients keep their dtype float32.
    """
    x = rank.tensor(1 + 2**-12, 3 + 3 * 2**-11, 2049, 2**-14 + 2**-25) * (1 + 2 * rank.index)
    others = [x / (1 + 2 * rank.index) * (1 + 2 * r) for r in range(rank.world_size)]
    model = linear(4)
    ddp = rank.wrap(model)
    register(ddp, hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x.reshape(1, 4)).sum().backward()
        halves = sum(other.half() / rank.world_size for other in others)
        rank.law("the gradient is the half-precision mean", model.weight.grad, halves.float().reshape(1, 4))
        rank.differs("it is not the exact mean", model.weight.grad, (sum(others) / rank.world_size).reshape(1, 4))
    rank.show("gradient", model.weight.grad)


@case(
    "shipped_hooks.fp16_overflows",
    level=HAZARD,
    source=f"{HOOKS}.default_hooks.fp16_compress_hook",
    each=HALF_HOOKS,
    catalogue=("J02",),
)
def test_the_fp16_hook_casts_before_it_divides(rank, hook):
    """
    A gradient beyond the range of float16 becomes infinite under the fp16 hook even where its share of the mean would fit: the cast comes before the division.

    70000 on either rank; each half of it, and their sum without the hook, are fine in float32.
    """
    model = linear(1)
    ddp = rank.wrap(model)
    register(ddp, hook)
    ddp(rank.tensor(70000).reshape(1, 1)).sum().backward()
    rank.law("the gradient is infinite", model.weight.grad, rank.tensor(float("inf")).reshape(1, 1))


@case(
    "shipped_hooks.bf16",
    level=MUST,
    source=f"{HOOKS}.default_hooks.bf16_compress_hook",
    needs=("build:bf16_allreduce",),
    each={
        "python": default_hooks.bf16_compress_hook,
        "wrapper": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    },
    catalogue=("J03",),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_bf16_compress_wrapper_nccl",),
)
def test_the_bf16_hook_averages_in_brain_floats(rank, hook):
    """
    The bf16 hook casts gradients to bfloat16, divides, all-reduces, and casts back, so that the gradients are exactly the bfloat16 mean; `bf16_compress_wrapper(allreduce_hook)` does the same.

    Shown where the build of torch allows the hook. The values need more than the 8 bits of a bfloat16, and go beyond the range of float16.
    """
    x = rank.tensor(1 + 2**-9, 3 + 3 * 2**-8, 257, 70000) * (1 + 2 * rank.index)
    others = [x / (1 + 2 * rank.index) * (1 + 2 * r) for r in range(rank.world_size)]
    model = linear(4)
    ddp = rank.wrap(model)
    register(ddp, hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x.reshape(1, 4)).sum().backward()
        shares = sum(other.bfloat16() / rank.world_size for other in others)
        rank.law("the gradient is the bfloat16 mean", model.weight.grad, shares.float().reshape(1, 4))
        rank.differs("it is not the exact mean", model.weight.grad, (sum(others) / rank.world_size).reshape(1, 4))


@case(
    "shipped_hooks.bf16_gate",
    level=HAZARD,
    source="nn/parallel/distributed.py: BF16 all reduce communication hook required",
    catalogue=("J03",),
)
def test_whether_the_bf16_hook_is_taken_depends_on_the_build(rank):
    """
    Whether the bf16 hook is taken depends on what torch was built for and not on the backend: over gloo, on a CPU, a CUDA build takes it and a CPU build refuses it with TypeError.

    The documentation says that the hook requires NCCL. What is refused is a function by its name: the same function under another name is taken.
    """
    built = torch.version.cuda is not None or torch.version.hip is not None
    refused = False
    try:
        rank.wrap(linear(2)).register_comm_hook(None, default_hooks.bf16_compress_hook)
    except TypeError as error:
        refused = "BF16 all reduce communication hook required" in str(error)
    rank.law("it is refused where the build is for CPUs only", refused, not built)

    def same(state, bucket):
        return default_hooks.bf16_compress_hook(state, bucket)

    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, same)
    rank.law("under another name it is taken", rank.log(ddp, "comm_hook")["comm_hook"].endswith("same"), True)


@case(
    "shipped_hooks.no_op",
    level=MUST,
    source=f"{HOOKS}.debugging_hooks.noop_hook",
    world=(1, 2, 3),
    catalogue=("J10",),
    torch_tests=(f"{TESTS}::test_ddp_comm_hook_noop_hook",),
)
def test_the_no_op_hook_does_not_communicate(rank):
    """
    With the shipped no-op hook every rank keeps its own gradients, and backward starts no collective.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    for _ in range(3):
        ddp.zero_grad()
        output = ddp(rank.batch(2)).sum()
        before = rank.collectives()
        output.backward()
        rank.law("backward starts no collective", rank.collectives() - before, 0)
        rank.law("every rank keeps its own gradient", model.weight.grad, rank.batch(2))


QUANTIZED = {
    "tensor": quantization_hooks.quantization_pertensor_hook,
    "channel": quantization_hooks.quantization_perchannel_hook,
}


@case(
    "shipped_hooks.quantized",
    level=MUST,
    source=f"{HOOKS}.quantization_hooks.quantization_pertensor_hook",
    each=QUANTIZED,
    catalogue=("J11",),
    torch_tests=(
        f"{TESTS}::test_ddp_comm_hook_quantize_per_tensor_hook",
        f"{TESTS}::test_ddp_comm_hook_quantize_per_channel_hook",
    ),
)
def test_the_quantization_hooks_give_the_mean_within_a_step(rank, hook):
    """
    The quantization hooks give every rank the mean of the ranks' gradients, as near as 256 steps between the smallest and the largest allow.

    Gradients 0 to 255 times r+1 are exact multiples of a rank's own step. Where this is broken backward raises on gloo: there an
    all-gather's future holds the gathered tensors, and the hooks look for them one list deeper.
    """
    model = linear(256)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(dist.group.WORLD, hook)
    x = torch.arange(256.0, device=rank.device).reshape(1, 256)
    ddp(x * (rank.index + 1)).sum().backward()
    mean = rank.mean(lambda r: x * (r + 1))
    rank.law("within one step of the mean", bool(((model.weight.grad - mean).abs() <= 1 + rank.index).all()), True)


@case("shipped_hooks.types", level=OBSERVED, source=f"{HOOKS}.DDPCommHookType", catalogue=("J13",))
def test_every_shipped_hook_has_a_type(rank):
    """
    `DDPCommHookType` has a member for each shipped hook, and `register_ddp_comm_hook` registers the hook of the member it is given; a PowerSGD member takes a process group for its state.
    """
    rank.show("members", sorted(ddp_comm_hooks.DDPCommHookType.__members__))
    for name, hook in (
        ("ALLREDUCE", "allreduce_hook"),
        ("FP16_COMPRESS", "fp16_compress_hook"),
        ("QUANTIZE_PER_TENSOR", "quantization_pertensor_hook"),
        ("QUANTIZE_PER_CHANNEL", "quantization_perchannel_hook"),
        ("POWER_SGD", "powerSGD_hook"),
        ("POWER_SGD_RANK2", "powerSGD_hook"),
        ("BATCHED_POWER_SGD", "batched_powerSGD_hook"),
        ("BATCHED_POWER_SGD_RANK2", "batched_powerSGD_hook"),
        ("NOOP", "noop_hook"),
    ):
        ddp = rank.wrap(linear(2))
        ddp_comm_hooks.register_ddp_comm_hook(ddp_comm_hooks.DDPCommHookType[name], ddp, dist.group.WORLD)
        rank.law(f"{name} registers {hook}", rank.log(ddp, "comm_hook"), {"comm_hook": hook})
