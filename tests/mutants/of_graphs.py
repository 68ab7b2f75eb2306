"""DDPs with one defect that a graph of a certain shape, a returned parameter, or hundreds of parameters show."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import ReferenceDDP, tensors_in


class GivesUpInDeepGraphs(ReferenceDDP):
    """Breaks the search for unused parameters in deep graphs: after a thousand nodes it gives up, and all count as used."""

    breaks = ("unused_parameters.any_graph",)

    def leaves_below(self, output):
        nodes, seen = [tensor.grad_fn for tensor in tensors_in(output)], set()
        while nodes:
            node = nodes.pop()
            if node not in seen:
                seen.add(node)
                nodes += [below for below, _ in node.next_functions if below is not None]
            if len(seen) > 1000:
                return {id(parameter) for parameter in self.trainable}
        return {id(node.variable) for node in seen if hasattr(node, "variable")}


class GivesUpInForkedGraphs(ReferenceDDP):
    """Breaks the search in graphs that fork and join: it forgets where it was, gives up after 100,000 steps, and all count as used."""

    breaks = ("unused_parameters.any_graph",)

    def leaves_below(self, output):
        nodes, leaves, steps = [tensor.grad_fn for tensor in tensors_in(output)], set(), 0
        while nodes:
            node, steps = nodes.pop(), steps + 1
            leaves.add(id(getattr(node, "variable", None)))
            nodes += [below for below, _ in node.next_functions if below is not None]
            if steps > 100_000:
                return {id(parameter) for parameter in self.trainable}
        return leaves


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
