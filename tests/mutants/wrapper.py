"""torch's DDP with one defect in what passes through the wrapper: inputs, containers of outputs, modes."""

import torch
from torch.nn.parallel import DistributedDataParallel


class MakesTuplesOfListInputs(DistributedDataParallel):
    """Breaks the promise that inputs are handed on as they are: a list arrives as a tuple."""

    breaks = ("wrapper.inputs",)

    def forward(self, *inputs, **keywords):
        return super().forward(*(tuple(x) if type(x) is list else x for x in inputs), **keywords)


class NeedsAnInput(DistributedDataParallel):
    """Breaks the promise that keywords are handed on: without a positional input the module is not told of them."""

    breaks = ("wrapper.inputs",)

    def forward(self, *inputs, **keywords):
        return super().forward(*inputs, **(keywords if inputs else {}))


class FindUnusedMakesTuples(DistributedDataParallel):
    """Breaks the promise that outputs keep their type: with find_unused_parameters a named tuple comes out as a tuple."""

    breaks = ("wrapper.containers",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        plain = self.find_unused_parameters and isinstance(output, tuple) and torch.is_grad_enabled()
        return tuple(output) if plain else output


class FindUnusedMakesDicts(DistributedDataParallel):
    """Breaks the promise that outputs keep their type: with find_unused_parameters an ordered dictionary comes out as a plain one."""

    breaks = ("wrapper.containers",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        plain = self.find_unused_parameters and isinstance(output, dict) and torch.is_grad_enabled()
        return dict(output) if plain else output


class SortsDictionaries(DistributedDataParallel):
    """Breaks the promise that outputs are the module's: with find_unused_parameters a dictionary comes out sorted by its keys."""

    breaks = ("wrapper.containers",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        if self.find_unused_parameters and isinstance(output, dict):
            return type(output)(sorted(output.items()))
        return output


class KeepsItsModesToItself(DistributedDataParallel):
    """Breaks the promise that eval() and train() reach the module: they change the wrapper alone."""

    breaks = ("wrapper.modes",)

    def train(self, mode=True):
        self.training = mode
        return self


class EvalAnswersNothing(DistributedDataParallel):
    """Breaks the promise that eval() and train() return the wrapper: they return None."""

    breaks = ("wrapper.modes",)

    def train(self, mode=True):
        super().train(mode)
