"""Reference DDPs with one defect in what is compared between ranks."""

import torch.distributed as dist

from tests.reference_ddp import ReferenceDDP


class Compares(ReferenceDDP):
    """What `part` gives of a rank's list of parameters has to be the same on all ranks; by itself, numbers are compared."""

    def part(self, parameters):
        return len(parameters)

    def refuse_replicas_that_differ(self):
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, self.part(self.trainable), group=self.process_group)
        if any(other != everyone[0] for other in everyone):
            raise RuntimeError("parameters differ")


class ComparesElements(Compares):
    """Breaks the promise that shapes are compared: only numbers of elements are, and whether these lie row by row."""

    breaks = ("positional_matching.any_parameter",)

    def part(self, parameters):
        return [(parameter.numel(), parameter.is_contiguous()) for parameter in parameters]


class ComparesTheFirst(Compares):
    """Breaks the promise that parameters are compared: of several only the first one's shape is."""

    breaks = ("positional_matching.any_parameter",)

    def part(self, parameters):
        return len(parameters), parameters[0].shape, parameters[0].stride()


class ComparesTheLast(Compares):
    """Breaks the promise that parameters are compared: of several only the last one's shape is."""

    breaks = ("positional_matching.any_parameter",)

    def part(self, parameters):
        return len(parameters), parameters[-1].shape, parameters[-1].stride()


class ComparesInTheWorld(ReferenceDDP):
    """Breaks the promise that parameters are compared: in a process group of its own they are not."""

    breaks = ("positional_matching.in_a_group",)

    def refuse_replicas_that_differ(self):
        if self.process_group is dist.group.WORLD:
            super().refuse_replicas_that_differ()
