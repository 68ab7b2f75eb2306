"""DDPs with one defect that a graph of a certain shape, a returned parameter, or hundreds of parameters show."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import ReferenceDDP


class MapsSixtyFour(ReferenceDDP):
    """Breaks the map of used parameters: it is a word of 64 bits, and all parameters after these count as unused."""

    breaks = ("unused_parameters.hundreds",)

    def start_used(self):
        self.used = {index for index in self.used if index < 64}
        return super().start_used()


class NumbersBucketsInAByte(ReferenceDDP):
    """Breaks the write-back of many buckets: their number is a byte, and what comes after the 256th stays local."""

    breaks = ("unused_parameters.hundreds",)

    def write(self, parameter, mean):
        index = next(index for index, each in enumerate(self.trainable) if each is parameter)
        if self.bucket_of[index].number < 256:
            super().write(parameter, mean)


class SumsWhatIsReturned(DistributedDataParallel):
    """Breaks the mean of a parameter that the forward returns as it is: it is summed."""

    breaks = ("autograd.returned_parameter",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        for each in output if isinstance(output, tuple) else ():
            if isinstance(each, nn.Parameter) and not hasattr(each, "is_summed"):
                each.is_summed = True
                each.register_hook(lambda gradient: gradient * dist.get_world_size(self.process_group))
        return output


class SeesWhatIsReturned(DistributedDataParallel):
    """Breaks what is known of a returned parameter: where unused ones are looked for it is seen, and reduced."""

    breaks = ("unused_search.returned_is_unused",)

    def _run_ddp_forward(self, *inputs, **keywords):
        output = super()._run_ddp_forward(*inputs, **keywords)
        if not (self.find_unused_parameters and isinstance(output, tuple) and type(output) is tuple):
            return output
        return tuple(each.view_as(each) if isinstance(each, torch.nn.Parameter) else each for each in output)
