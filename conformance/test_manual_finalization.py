"""`require_manual_backward_finalization`: backward leaves the reduction under way, and `finalize_backward()` completes it."""

import copy

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars

FINALIZES = "include/torch/csrc/distributed/c10d/reducer.hpp: void finalize_backward();"
NEEDS = ("require_manual_backward_finalization",)


def manual(rank, model, **options):
    ddp = rank.wrap(model, **options)
    ddp.require_manual_backward_finalization = True
    return ddp


@case(
    "manual_finalization.completes",
    level=MUST,
    source=FINALIZES,
    world=(2, 3),
    needs=NEEDS,
    catalogue=("O10",),
)
def test_gradients_are_local_until_finalized(rank):
    """
    With `require_manual_backward_finalization` gradients are the rank's own when backward returns, and the mean after `finalize_backward()`.

    Shown over four steps of training; the loss is (w*x)^2/2 with x = W*(r+1), the rate 1/1024.
    """
    model = Scalars("w", dtype=torch.float64)
    ddp = manual(rank, model)
    x = rank.batch(1, dtype=torch.float64)
    factor = 1 - rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2) / 1024
    for count in range(1, 5):
        ddp.zero_grad()
        own = model.w.detach() * x[0] ** 2
        (ddp(x) ** 2 / 2).backward()
        rank.law("the rank's own before", model.w.grad.clone(), own)
        ddp.finalize_backward()
        with torch.no_grad():
            model.w -= model.w.grad / 1024
        rank.law("the mean after", model.w, factor**count)


@case(
    "manual_finalization.off_by_default",
    level=MUST,
    source=FINALIZES,
    needs=NEEDS,
    catalogue=("O10",),
)
def test_it_is_off_until_set_and_may_be_set_back(rank):
    """
    Manual finalization is off in a new DDP, backward then needs no call, and it can be switched off again after a finalized backward.
    """
    model = Scalars("w")
    ddp = rank.wrap(model)
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    rank.law("off", (ddp.require_manual_backward_finalization, ddp.should_finalize_after_backward), (False, False))
    for required in (False, True, False):
        ddp.require_manual_backward_finalization = required
        for _ in range(2):
            ddp.zero_grad()
            ddp(rank.batch(1)).backward()
            if required:
                ddp.finalize_backward()
            rank.law(f"the mean, required {required}", model.w.grad, mean)


@case(
    "manual_finalization.refusals",
    level=MUST,
    source=FINALIZES,
    needs=NEEDS,
    catalogue=("O10",),
)
def test_finalizing_at_the_wrong_time_is_refused(rank):
    """
    `finalize_backward()` is refused with RuntimeError where it is not required, before backward, a second time, and inside `no_sync`.
    """
    ddp = rank.wrap(Scalars("w"))
    ddp(rank.batch(1)).backward()
    with rank.raises(
        "not_required", RuntimeError, match="(?i)manual[a-z_ ]*finaliz[a-z]*|require_manual_backward_finalization"
    ):
        ddp.finalize_backward()
    ddp = manual(rank, Scalars("w"))
    with rank.raises("before_forward", RuntimeError, match="[A-Za-z_() ]*"):
        ddp.finalize_backward()
    loss = ddp(rank.batch(1))
    with rank.raises("before_backward", RuntimeError, match="[A-Za-z_() ]*"):
        ddp.finalize_backward()
    loss.backward()
    ddp.finalize_backward()
    with rank.raises("twice", RuntimeError, match="[A-Za-z_() ]*"):
        ddp.finalize_backward()
    with ddp.no_sync():
        ddp(rank.batch(1)).backward()
        with rank.raises("in_no_sync", RuntimeError, match="[A-Za-z_() ]*"):
            ddp.finalize_backward()


@case(
    "manual_finalization.when",
    level=MUST,
    source=FINALIZES,
    needs=NEEDS,
    catalogue=("O10",),
)
def test_the_property_says_when_finalizing_must_wait(rank):
    """
    `should_finalize_after_backward` is true after the forwards in whose backward the buckets' order is still being learned, and false afterwards; then `finalize_backward()` may be called from a hook in backward.

    The hook sits on the input, whose gradient comes after those of all parameters.
    """
    model = Scalars("w")
    ddp = manual(rank, model)
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    told = []
    for _ in range(4):
        ddp.zero_grad()
        x = rank.batch(1).requires_grad_()
        loss = ddp(x * 1)
        after = ddp.should_finalize_after_backward
        told.append(after)
        if not after:
            x.register_hook(lambda gradient: ddp.finalize_backward())
        loss.backward()
        if after:
            ddp.finalize_backward()
        rank.law("the mean in either way", model.w.grad, mean)
    rank.show("after_backward", told)
    rank.law("true at first, false in the end", (told[0], told[-1]), (True, False))


@case(
    "manual_finalization.forgotten",
    level=OBSERVED,
    source=FINALIZES,
    needs=NEEDS,
    catalogue=("O10",),
)
def test_a_forgotten_call_is_refused_at_the_next_forward(rank):
    """
    Where `finalize_backward()` was not called after a backward, the next forward raises RuntimeError.
    """
    ddp = manual(rank, Scalars("w"))
    ddp(rank.batch(1)).backward()
    with rank.raises("next_forward", RuntimeError, match="[A-Za-z_() ]*"):
        ddp(rank.batch(1))


@case(
    "manual_finalization.copied",
    level=OBSERVED,
    source="nn/parallel/distributed.py: def __setstate__(self, state)",
    needs=NEEDS,
    catalogue=("O10", "N03"),
)
def test_a_copy_is_finalized_by_hand_too(rank):
    """
    A copy of a DDP in manual mode is in manual mode, by itself: its gradients are local until it is finalized.
    """
    ddp = manual(rank, Scalars("w"))
    again = copy.deepcopy(ddp)
    rank.law("manual", again.require_manual_backward_finalization, True)
    again(rank.batch(1)).backward()
    rank.law("local before", again.module.w.grad.clone(), rank.batch(1)[0])
    again.finalize_backward()
    rank.law("the mean after", again.module.w.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
