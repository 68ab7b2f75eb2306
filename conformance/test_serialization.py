"""State dicts, pickles and copies of a DDP: what is in them, what they need, and what they lose."""

import copy
import io
import pickle

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from ddp_conformance.rank import as_it_is
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

DDP = "DistributedDataParallel"
COPY = {"deepcopy": copy.deepcopy, "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp))}


@case(
    "serialization.state_dict",
    level=MUST,
    source=DDP,
    catalogue=("N01",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_save_load_checkpoint",),
)
def test_the_state_dict_carries_a_prefix(rank):
    """
    The state dict of a DDP has the module's entries under `module.`; `consume_prefix_in_state_dict_if_present` takes the prefix off, and what is left loads into the bare module.
    """
    model = linear(2, start=3.0)
    state = rank.wrap(model).state_dict()
    rank.law("every name carries the prefix", list(state), ["module.weight"])
    consume_prefix_in_state_dict_if_present(state, "module.")
    bare = linear(2)
    bare.load_state_dict(state)
    rank.law(
        "without it the bare module takes it", bare.weight.to(rank.device), torch.full((1, 2), 3.0, device=rank.device)
    )


@case(
    "serialization.saved_on_rank_0",
    level=MUST,
    source=DDP,
    world=(2, 3),
    catalogue=("N01",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_save_load_checkpoint",),
)
def test_a_state_dict_saved_on_one_rank_is_the_one_of_all(rank):
    """
    After training a state dict saved on rank 0 alone, loaded on every rank, changes nothing: all ranks had the same parameters.

    The loss is (w*x)^2/2 with x = W*(r+1); the rate is 1/1024.
    """
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    x = rank.batch(1, dtype=torch.float64)
    for _ in range(4):
        ddp.zero_grad()
        (ddp(x) ** 2 / 2).backward()
        with torch.no_grad():
            model.w -= model.w.grad / 1024
    trained = model.w.detach().clone()
    saved = io.BytesIO()
    torch.save(ddp.state_dict(), saved)
    files = [saved.getvalue() if rank.index == 0 else None]
    dist.broadcast_object_list(files, src=0)
    ddp.load_state_dict(torch.load(io.BytesIO(files[0])))
    rank.law("rank 0's parameters are everybody's", model.w, trained)
    mean = rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2)
    rank.law("and they are trained", model.w, (1 - mean / 1024) ** 4)


@case(
    "serialization.default_group_only",
    level=MUST,
    source="nn/parallel/distributed.py: def _check_default_group(self)",
    each=COPY,
    catalogue=("N02",),
    reports=("pytorch/pytorch#76927", "pytorch/pytorch#73825", "pytorch/pytorch#12261", "open-mmlab/mmengine#1664"),
)
def test_a_copy_needs_the_default_group(rank, make_copy):
    """
    A DDP that was made with another group than the default one is refused a copy, be it by pickle or by deepcopy, with RuntimeError.
    """
    ddp = rank.wrap(linear(2), process_group=dist.new_group([0, 1]))
    with rank.raises("refused", RuntimeError, match="only supported when using DDP with the default process group"):
        make_copy(ddp)
    again = make_copy(rank.wrap(linear(2)))
    rank.law("with the default group it is copied", again.process_group is dist.group.WORLD, True)


@case(
    "serialization.copy_reduces",
    level=MUST,
    source=DDP,
    world=(2, 3),
    each=COPY,
    catalogue=("N03", "N04"),
    torch_tests=("distributed_test.py::_DistTestBase::test_DistributedDataParallelCPU",),
)
def test_a_copy_reduces_like_its_original(rank, make_copy):
    """
    A copy made in the middle of training reduces by itself, follows the trajectory of one process on all data, and leaves its original alone.

    The loss is (w*x)^2/2 with x = W*(r+1); the rate is 1/1024.
    """
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    x = rank.batch(1, dtype=torch.float64)
    factor = 1 - rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2) / 1024

    def step(ddp):
        ddp.zero_grad()
        (ddp(x) ** 2 / 2).backward()
        with torch.no_grad():
            ddp.module.w -= ddp.module.w.grad / 1024
        return ddp.module.w.detach().clone()

    step(ddp)
    step(ddp)
    again = make_copy(ddp)
    for count in range(3, 7):
        rank.law("the copy goes on by the mean", step(again), factor**count)
    rank.law("the original stays where it was", model.w, factor**2)
    rank.law("and goes on from there", step(ddp), factor**3)


@case(
    "serialization.options_kept",
    level=MUST,
    source="nn/parallel/distributed.py: def __setstate__(self, state)",
    each=COPY,
    catalogue=("N03",),
)
def test_a_copy_keeps_the_options(rank, make_copy):
    """
    A copy keeps cap, views, search for unused parameters, and static graph.
    """
    ddp = rank.wrap(linear(2), bucket_cap_mb=3, gradient_as_bucket_view=True, static_graph=True)
    again = make_copy(ddp)
    keys = ("bucket_cap_bytes", "gradient_as_bucket_view", "find_unused_parameters")
    rank.law("cap and views are kept", rank.log(again, *keys), {keys[0]: 3 * 2**20, keys[1]: 1, keys[2]: 0})
    rank.law("static graph is kept", again.static_graph, True)
    again(rank.batch(2)).sum().backward()
    shared = again.module.weight.grad._is_view()
    rank.law("gradients are views in the copy", shared, True)
    other = make_copy(rank.wrap(linear(2), find_unused_parameters=True))
    rank.law("search is kept", rank.log(other, *keys), {keys[0]: 25 * 2**20, keys[1]: 0, keys[2]: 1})


@case(
    "serialization.static_copy_reduces",
    level=MUST,
    source="nn/parallel/distributed.py: def __setstate__(self, state)",
    each=COPY,
    catalogue=("N03", "U15"),
    torch_tests=("distributed_test.py::_DistTestBase::test_DistributedDataParallel",),
    reports=("pytorch/pytorch#112277",),
)
def test_a_copy_of_a_static_graph_reduces(rank, make_copy):
    """
    A copy of a DDP with `static_graph` reduces, whether it was made before the first step or after.

    Where this is broken, a copy made after the first step never reduces, without an error: it takes over the note that the
    reduction of the first iteration is under way, and its new reducer waits for that.
    """
    model = linear(2)
    ddp = rank.wrap(model, static_graph=True)
    early = make_copy(ddp)
    ddp(rank.batch(2)).sum().backward()
    late = make_copy(ddp)
    for _ in range(4):
        for copied in (early, late):
            copied.zero_grad()
            copied(rank.batch(2)).sum().backward()
        mean = rank.mean(lambda r: rank.batch(2, of=r))
        rank.law("the early copy reduces", early.module.weight.grad, mean)
        rank.law("the late copy reduces", late.module.weight.grad, mean)


@case("serialization.hook_lost", level=HAZARD, source=f"{DDP}.register_comm_hook", each=COPY, catalogue=("U19",))
def test_a_copy_has_lost_its_communication_hook(rank, make_copy):
    """
    A copy of a DDP with a communication hook reduces without it, and its logging data names no hook.

    The hook leaves gradients local; the copy takes the mean, and would take a hook of its own.
    """
    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, as_it_is)
    again = make_copy(ddp)
    for _ in range(3):
        for each in (ddp, again):
            each.zero_grad()
            each(rank.batch(2)).sum().backward()
        rank.law("the original has its hook", ddp.module.weight.grad, rank.batch(2))
        rank.law("the copy has none", again.module.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
    rank.law("no hook is named", rank.log(again, "comm_hook"), {"comm_hook": "absent"})
    again.register_comm_hook(None, as_it_is)
    rank.law("it takes one of its own", rank.log(again, "comm_hook"), {"comm_hook": "as_it_is"})


@case(
    "serialization.weights_follow_their_module",
    level=OBSERVED,
    source=DDP,
    catalogue=("N04",),
    reports=("pytorch/pytorch#34076",),
)
def test_a_state_dict_loaded_on_one_rank_is_not_shared(rank):
    """
    A state dict loaded into a DDP on rank 0 alone stays on rank 0: replicas then differ, and training does not bring them together.

    Shown over four steps, in which gradients are the mean as ever and the difference stays what it was.
    """
    model = linear(2, dtype=torch.float64)
    ddp = rank.wrap(model)
    if rank.index == 0:
        ddp.load_state_dict({"module.weight": torch.full((1, 2), 9.0, dtype=torch.float64)})
    start = 9.0 if rank.index == 0 else 1.0
    mean = rank.mean(lambda r: rank.batch(2, of=r, dtype=torch.float64))
    for count in range(1, 5):
        ddp.zero_grad()
        ddp(rank.batch(2, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            model.weight -= model.weight.grad / 4
        rank.law("every rank goes on from its own weights", model.weight, start - count * mean / 4)
