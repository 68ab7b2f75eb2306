"""DDPs that treat outputs, second backwards or the wrapped module in another way than torch's, each in one way."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LeavesDictionariesLocal(DistributedDataParallel):
    """Breaks the promise that tensors in containers are reduced: an output that is a dictionary trains each rank alone."""

    breaks = ("outputs.find_unused_containers", "outputs.static_containers")

    def forward(self, *inputs, **keywords):
        output = self.module(*inputs, **keywords)
        return output if isinstance(output, dict) else super().forward(*inputs, **keywords)


class MakesTuplesOfLists(DistributedDataParallel):
    """Breaks the promise that outputs keep their type: a list comes out as a tuple."""

    breaks = ("outputs.static_containers",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        return tuple(output) if isinstance(output, list) else output


class FillsInZeros(DistributedDataParallel):
    """Breaks the promise that a parameter whose output is not in the loss gets no gradient: it gets zeros."""

    breaks = ("outputs.find_unused_part",)

    def forward(self, *inputs, **keywords):
        if self.find_unused_parameters:
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().forward(*inputs, **keywords)


class TrainsNewParameters(DistributedDataParallel):
    """Breaks the promise that DDP trains the module's own parameters: it puts equal new ones in their place."""

    breaks = ("after_wrapping.own_copy",)

    def __init__(self, module, *args, **options):
        for each in module.modules():
            for name, parameter in list(each.named_parameters(recurse=False)):
                setattr(each, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
        super().__init__(module, *args, **options)


class LooksAtTheModelAgain(DistributedDataParallel):
    """Breaks what is known of changes after wrapping: it wraps the module anew before every forward."""

    breaks = ("after_wrapping.added_parameter", "after_wrapping.unfrozen_later", "after_wrapping.changed_dtype")

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        object.__setattr__(self, "again", lambda: DistributedDataParallel(module, *args, **options))

    def forward(self, *inputs, **keywords):
        object.__setattr__(self, "inner", self.again())
        return self.inner(*inputs, **keywords)


class ArmsEveryBackward(DistributedDataParallel):
    """Breaks what is known of second backwards: every backward that starts at an output is reduced."""

    breaks = ("second_backward.retained_graph", "second_backward.two_forwards")

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        if torch.is_tensor(output) and output.requires_grad and not self.static_graph:
            output.register_hook(lambda gradient: self.reducer.prepare_for_backward([]))
        return output


class ReducesBypasses(DistributedDataParallel):
    """Breaks what is known of bypasses: calling the inner module arms a reduction too."""

    breaks = ("bypass.inner_module", "bypass.other_method")

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        module.register_forward_hook(lambda *_: self.reducer.prepare_for_backward([]))
