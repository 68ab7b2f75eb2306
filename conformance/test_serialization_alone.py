"""A copy is made by a rank alone, with what this rank holds, and in the mode of its original."""

import copy
import pickle

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import WithBuffers
from torch import nn

COPY = {"pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)), "deepcopy": copy.deepcopy}
SETSTATE = "nn/parallel/distributed.py: def __setstate__(self, state)"


@case("serialization.copy_of_one_rank", level=OBSERVED, source=SETSTATE, each=COPY, catalogue=("N03", "N04"))
def test_a_rank_copies_by_itself(rank, copied):
    """A copy starts no collective, so that a rank may make it alone, and has the values that this rank holds."""
    model = WithBuffers(b=torch.zeros(1))
    ddp = rank.wrap(model)
    nn.init.constant_(model.weight, rank.index + 5)
    model.b.fill_(rank.index + 7)
    before = rank.collectives()
    again = copied(ddp)
    rank.law("its own weight", again.module.weight.data, rank.tensor(rank.index + 5))
    rank.law("its own buffer", again.module.b, rank.tensor(rank.index + 7))
    rank.law("no collective", rank.collectives() - before, 0)


@case("serialization.copy_keeps_mode", level=OBSERVED, source=SETSTATE, each=COPY, world=1, catalogue=("N03",))
def test_a_copy_is_in_the_mode_of_its_original(rank, copied):
    """A copy is in training or in evaluation mode as its original is, and so is every module in it."""
    model = nn.Sequential(WithBuffers(b=torch.zeros(1)), nn.Dropout(0.5))
    ddp = rank.wrap(model)
    for mode in (False, True):
        ddp.train(mode)
        model[1].eval()
        again = copied(ddp)
        rank.law("modes", [each.training for each in again.modules()], [mode, mode, mode, False])
