"""Bugs that other implementations of data parallelism had, put back."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import ReferenceDDP


class DoublesWhereItIsAlone(ReferenceDDP):
    """Breaks the mean in a group of one rank: what accumulated is added again (NVIDIA/Megatron-LM#6660)."""

    breaks = ("sub_groups.of_one",)

    def expect_gradients(self, output):
        super().expect_gradients(output)
        self.before = {id(p): p.grad.clone() for p in self.trainable if p.grad is not None and not p.grad.is_sparse}

    def write(self, parameter, mean):
        doubled = self.world_size == 1 and id(parameter) in self.before
        super().write(parameter, mean + self.before[id(parameter)] if doubled else mean)


class HandsOverTheNewPartWhereItIsAlone(ReferenceDDP):
    """Breaks what a hook is handed in a group of one rank: it is the last backward's gradient alone (NVIDIA/Megatron-LM#6660)."""

    breaks = ("sub_groups.hook_of_one",)

    def expect_gradients(self, output):
        super().expect_gradients(output)
        self.before = {id(p): p.grad.clone() for p in self.trainable if p.grad is not None and not p.grad.is_sparse}

    def fill(self, bucket):
        super().fill(bucket)
        if self.world_size == 1 and self.hook is not None:
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=False):
                part.sub_(self.before.get(id(parameter), 0))


class ReducesWhatIsFrozen(ReferenceDDP):
    """Breaks what is known of frozen parameters: a gradient that one still has is reduced (deepspeedai/DeepSpeed#3777)."""

    breaks = ("wrapper.frozen_gradients",)

    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            if not parameter.requires_grad and parameter.grad is not None:
                parameter.grad.div_(self.world_size)
                dist.all_reduce(parameter.grad, group=self.process_group)


class SavesNothingIgnored(DistributedDataParallel):
    """Breaks what is known of state dicts: ignored parameters and buffers are not in them (hpcaitech/ColossalAI#2443)."""

    breaks = ("wrapper.state_dict_of_ignored",)

    def state_dict(self, *args, **options):
        saved = super().state_dict(*args, **options)
        for name in self.parameters_to_ignore:
            saved.pop(f"module.{name}", None)
        return saved


class FillsAsGradientsArrive(ReferenceDDP):
    """Breaks the matching of gradients in a bucket: they lie in it in the order of their arrival on the rank (deepspeedai/DeepSpeed#2343)."""

    breaks = ("firing.arrival_in_one_bucket",)

    def expect_gradients(self, output):
        super().expect_gradients(output)
        self.arrived = []

    def mark_ready(self, index):
        self.arrived.append(index)
        super().mark_ready(index)

    def fill(self, bucket):
        bucket.indices.sort(key=self.arrived.index)
        super().fill(bucket)
