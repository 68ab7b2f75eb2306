"""What DDP does not compare between ranks, and what comes of it: dtypes, numbers of dimensions, frozen parameters, buffers."""

import torch
from ddp_conformance import HAZARD, case
from torch import nn

DOCUMENTED = "DistributedDataParallel"
VERIFIED = "include/torch/csrc/distributed/c10d/reducer.hpp: respect to no. of params and matching dtype/size/layout"
CPU = ("gloo:cpu",)
"""What a backend makes of messages of unequal length is its own affair; this is gloo's."""
EMA = ("Tencent/YOLO-Master#154",)


class Held(nn.Module):
    """Parameters and buffers as they are handed in, registered in that order; the forward needs none of them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def filled(value: float, *shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    """A parameter of equal elements."""
    return nn.Parameter(torch.full(shape or (2,), value, dtype=dtype), requires_grad=trained)


def wrap_or_lose_a_peer(rank, model) -> None:
    """Wrap the model on a rank whose peer may die of it: whether this rank hears of that is a matter of timing and no fact."""
    try:
        rank.wrap(model)
    except RuntimeError:
        pass


@case(
    "positional_mismatch.same_width",
    level=HAZARD,
    source=VERIFIED,
    lanes=CPU,
    group_timeout=1,
    catalogue=("A19",),
)
def test_another_dtype_of_the_same_width_is_taken_over_bit_by_bit(rank):
    """Dtypes are not compared: where rank 0 holds float16 and another rank bfloat16, rank 0's bits are read there as numbers of the other dtype, without an error.

    The source's comment on the comparison says that dtypes match afterwards; that is false on every release. Here
    1.0 arrives as 0.0078125.
    """
    model = Held(weight=filled(1.0 + rank.index, dtype=torch.bfloat16 if rank.index else torch.float16))
    rank.wrap(model)
    expected = torch.ones(2, dtype=torch.float16, device=rank.device).view(model.weight.dtype)
    rank.law("the bits are rank 0's", model.weight, expected)
    rank.show("weight", model.weight)


@case("positional_mismatch.wider", level=HAZARD, source=VERIFIED, lanes=CPU, catalogue=("A19",))
def test_a_wider_dtype_than_rank_0s_is_filled_with_garbage(rank):
    """Dtypes are not compared: a rank that holds float64 where rank 0 holds float32 constructs without an error, and holds garbage.

    What it holds is neither rank 0's value nor its own, and no promise of anything.
    """
    dtype = torch.float64 if rank.index else torch.float32
    model = Held(weight=filled(1.0 + rank.index, dtype=dtype))
    rank.wrap(model)
    if rank.index:
        rank.differs("the value is not rank 0's", model.weight, torch.full((2,), 1.0, dtype=dtype, device=rank.device))
        rank.differs("nor the rank's own", model.weight, torch.full((2,), 2.0, dtype=dtype, device=rank.device))


@case(
    "positional_mismatch.narrower",
    level=HAZARD,
    source=VERIFIED,
    lanes=CPU,
    may=("die",),
    group_timeout=1,
    catalogue=("A19",),
)
def test_a_narrower_dtype_than_rank_0s_kills_the_rank(rank):
    """Dtypes are not compared: a rank that holds float32 where rank 0 holds float64 is killed by a signal inside the constructor, without a message of DDP's.

    On gloo the broadcast is longer than the buffer it is meant for, and the transport's assertion ends the process.
    """
    model = Held(weight=filled(1.0, dtype=torch.float32 if rank.index else torch.float64))
    wrap_or_lose_a_peer(rank, model)


@case("positional_mismatch.more_dimensions", level=HAZARD, source=VERIFIED, lanes=CPU, catalogue=("A17",))
def test_more_dimensions_than_on_rank_0_go_unnoticed(rank):
    """Shapes are compared only as far as rank 0's goes: where a rank's parameter has more dimensions, (2, 1, 1, 1) against (2,), it is not refused."""
    model = Held(weight=filled(1.0 + rank.index, *((2, 1, 1, 1) if rank.index else (2,))))
    rank.wrap(model)
    rank.law("the elements are rank 0's", model.weight.reshape(-1), rank.tensor(1.0, 1.0))
    rank.law("the shape is the rank's own", tuple(model.weight.shape), (2, 1, 1, 1) if rank.index else (2,))


@case(
    "positional_mismatch.fewer_dimensions",
    level=HAZARD,
    source=VERIFIED,
    lanes=CPU,
    may=("die",),
    group_timeout=1,
    catalogue=("A17",),
)
def test_fewer_dimensions_than_on_rank_0_kill_the_rank(rank):
    """A rank whose parameter has fewer dimensions than rank 0's is killed by a signal while shapes are compared, instead of being refused."""
    model = Held(weight=filled(1.0, *((2,) if rank.index else (2, 1, 1, 1))))
    wrap_or_lose_a_peer(rank, model)


EXTRA = {"frozen_parameter": True, "buffer": False}


def with_extra(has_extra: bool, is_parameter: bool, value: float) -> Held:
    extra = filled(10 * value, trained=False) if is_parameter else torch.full((2,), 10 * value)
    return Held(weight=filled(value), **({"extra": extra} if has_extra else {}))


@case(
    "positional_mismatch.extra",
    level=HAZARD,
    source=DOCUMENTED,
    each=EXTRA,
    lanes=CPU,
    catalogue=("A16",),
    reports=EMA,
)
def test_a_frozen_parameter_or_buffer_that_rank_0_lacks_goes_unnoticed(rank, is_parameter):
    """Only trainable parameters are counted: a frozen parameter or a buffer that rank 0 does not have goes unnoticed, and keeps the rank's own values."""
    model = with_extra(rank.index == 1, is_parameter, 1.0 + rank.index)
    rank.wrap(model)
    rank.law("what both have is rank 0's", model.weight, rank.tensor(1.0, 1.0))
    if rank.index:
        rank.law("what rank 0 lacks is the rank's own", model.extra, rank.tensor(20.0, 20.0))


@case(
    "positional_mismatch.missing",
    level=HAZARD,
    source=DOCUMENTED,
    each=EXTRA,
    lanes=CPU,
    may=("die",),
    group_timeout=1,
    catalogue=("A16",),
    reports=EMA,
)
def test_a_frozen_parameter_or_buffer_that_only_rank_0_has_kills_the_others(rank, is_parameter):
    """Only trainable parameters are counted: a rank that lacks a frozen parameter or a buffer of rank 0's is killed by a signal inside the constructor."""
    wrap_or_lose_a_peer(rank, with_extra(rank.index == 0, is_parameter, 1.0 + rank.index))


@case(
    "positional_mismatch.extra_dtype",
    level=HAZARD,
    source=DOCUMENTED,
    lanes=CPU,
    group_timeout=1,
    catalogue=("A16",),
    reports=EMA,
)
def test_a_buffer_of_a_dtype_that_rank_0_lacks_waits_in_vain(rank):
    """A buffer of a dtype that occurs nowhere on rank 0 is waited for in vain: that rank's constructor ends with the group's time-out, rank 0's returns.

    One broadcast goes out for each dtype, so the ranks disagree on how many there are. The time-out is 1 s here.
    """
    model = Held(weight=filled(1.0 + rank.index), **({"steps": torch.ones(2, dtype=torch.int64)} if rank.index else {}))
    if rank.index:
        with rank.raises("the_missing_broadcast", RuntimeError, match="Timed out waiting"):
            rank.wrap(model)
    else:
        rank.wrap(model)
        rank.law("rank 0 notices nothing", model.weight, rank.tensor(1.0, 1.0))


@case("positional_mismatch.buffer_order", level=HAZARD, source=DOCUMENTED, world=3, catalogue=("A20",))
def test_buffers_registered_in_another_order_are_cross_wired(rank):
    """Buffers are matched by position too: a rank that registers same-shaped buffers in another order has them swapped, without an error."""
    order = "ba" if rank.index == 1 else "ab"
    values = {"a": 1.0 + 10 * rank.index, "b": 2.0 + 10 * rank.index}
    model = Held(weight=filled(1.0), **{name: torch.full((2,), values[name]) for name in order})
    rank.wrap(model)
    first, second = (getattr(model, name) for name in order)
    rank.law("the buffer registered first holds rank 0's first", first, rank.tensor(1.0, 1.0))
    rank.law("the buffer registered second holds rank 0's second", second, rank.tensor(2.0, 2.0))
    rank.show("a_and_b", [model.a, model.b])
