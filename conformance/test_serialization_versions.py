"""The versions of modules, by which old state dicts are recognized: in a DDP's state dict, and in what is loaded."""

from ddp_conformance import MUST, case
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


class Third(nn.Linear):
    """A layer that is at version 3, and keeps which version it was told at loading."""

    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        self.told = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


@case(
    "serialization.versions",
    level=MUST,
    source="nn/modules/module.py: `_metadata` of the returned state dict, and thus pickled.",
    catalogue=("N01",),
    reports=("pytorch/pytorch#74162", "pytorch/pytorch#117464"),
)
def test_a_loaded_module_is_told_its_version(rank):
    """
    A module in a DDP is told at loading the version that it was saved at, as it is without DDP, so that no state dict is taken for an older one.

    Whether the bare module is told, once the prefix was taken off, depends on the release.
    """
    model = nn.Sequential(Third(1, 1))
    ddp = rank.wrap(model)
    saved = ddp.state_dict()
    ddp.load_state_dict(saved)
    rank.law("the version that it was saved at", model[0].told, 3)
    consume_prefix_in_state_dict_if_present(saved, "module.")
    bare = nn.Sequential(Third(1, 1)).to(rank.device)
    bare.load_state_dict(saved)
    rank.show("the_bare_module_is_told", bare[0].told)
