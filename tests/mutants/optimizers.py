"""torch's DDP with one defect in the optimizer that it steps by itself."""

from torch.nn.parallel import DistributedDataParallel


class FusedForgetsArguments(DistributedDataParallel):
    """Breaks the promise that arguments are forwarded to a fused optimizer: of them all only the learning rate is."""

    breaks = ("optimizer_overlap.fused_arguments",)

    def _register_fused_optim(self, optim, *args, optim_params=None, **kwargs):
        kept = {name: value for name, value in kwargs.items() if name == "lr"}
        super()._register_fused_optim(optim, *args[:1], optim_params=optim_params, **kept)
