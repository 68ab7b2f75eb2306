"""DDPs with one defect in no_sync that only torch's own options show; for the others see of_no_sync."""

from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel


class SyncsStaticGraphs(DistributedDataParallel):
    """Breaks no_sync with static_graph=True: gradients are reduced inside as they are outside."""

    breaks = ("no_sync.static_graph_after_a_synced_step",)

    @contextmanager
    def no_sync(self):
        if self.static_graph:
            yield
        else:
            with super().no_sync():
                yield


class DropsTheEarlierMean(DistributedDataParallel):
    """Breaks accumulation: entering no_sync throws away what was reduced before."""

    breaks = ("no_sync.reduced_part_is_kept",)

    @contextmanager
    def no_sync(self):
        self.module.zero_grad(set_to_none=True)
        with super().no_sync():
            yield
