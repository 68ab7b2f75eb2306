"""DDPs that wait for nobody where they should, or reduce some parameters in another way than others."""

import torch
from torch.nn.parallel import DistributedDataParallel


class ConstructsAlone(DistributedDataParallel):
    """Breaks the promise that the constructor is a synchronization point: it starts no collective."""

    breaks = ("collectives.constructor_waits",)

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, init_sync=False, **options)


class LeavesOneElementAlone(DistributedDataParallel):
    """Breaks the promise that backward is a synchronization point: a model of a single number trains each rank alone."""

    breaks = ("collectives.backward_waits",)

    def forward(self, *inputs, **keywords):
        alone = sum(parameter.numel() for parameter in self.module.parameters()) == 1
        return (self.module if alone else super().forward)(*inputs, **keywords)


class ForwardsAlone(DistributedDataParallel):
    """Breaks the promise that the forward of a module with buffers is a synchronization point: it broadcasts none."""

    breaks = ("collectives.forward_waits_for_buffers",)

    def _sync_buffers(self):
        return


class LeavesHalvesLocal(DistributedDataParallel):
    """Breaks the promise that parameters of several dtypes mix: those in half precision stay local."""

    breaks = ("reduction.mixed_dtypes",)

    def __init__(self, module, *args, **options):
        halves = [parameter for parameter in module.parameters() if parameter.dtype is torch.float16]
        everything = all(parameter.dtype is torch.float16 for parameter in module.parameters())
        for parameter in () if everything else halves:
            parameter.requires_grad_(False)
        super().__init__(module, *args, **options)
        for parameter in halves:
            parameter.requires_grad_(True)


class SumsWhatForwardLeftOut(DistributedDataParallel):
    """Breaks the promise about parameters used outside the forward: their gradients are summed, not averaged."""

    breaks = ("autograd.used_outside_forward",)
    hooks = ()

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        for hook in self.hooks:
            hook.remove()
        nodes = [output.grad_fn] if torch.is_tensor(output) and output.grad_fn else []
        used = set()
        while nodes:
            node = nodes.pop()
            used.add(id(getattr(node, "variable", None)))
            nodes += [below for below, _ in node.next_functions if below is not None]
        left_out = [p for p in self.module.parameters() if p.requires_grad and id(p) not in used]
        world = self.process_group.size()
        self.hooks = [p.register_hook(lambda gradient: gradient * world) for p in left_out]
        return output


class SumsBeforeItDivides(DistributedDataParallel):
    """Breaks what is known of half precision: gradients are summed first and divided afterwards, so large ones overflow."""

    breaks = ("reduction.divided_first", "reduction.smallest_vanish")

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        if any(parameter.dtype is torch.float16 for parameter in module.parameters()):
            world = self.process_group.size()

            def late(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
                work = torch.distributed.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)
                return work.get_future().then(lambda done: done.value()[0].div_(world))

            self.register_comm_hook(None, late)
