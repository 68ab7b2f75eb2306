"""DDPs with one defect in what torch has since 2.15: buckets allocated lazily, and backwards that are finalized by hand."""

from torch.nn.parallel import DistributedDataParallel


class TakesLazyForItsOpposite(DistributedDataParallel):
    """Breaks the promise that lazy buckets go after backward, and that others stay: it is the other way round."""

    breaks = ("lazy_buckets.released",)

    def __init__(self, module, *arguments, lazy_bucket_allocation=False, **options):
        super().__init__(module, *arguments, lazy_bucket_allocation=not lazy_bucket_allocation, **options)


class DoublesLazily(DistributedDataParallel):
    """Breaks the promise that lazy buckets change no value: with them every gradient is doubled."""

    breaks = ("lazy_buckets.same_training", "lazy_buckets.unused")

    def __init__(self, module, *arguments, lazy_bucket_allocation=False, **options):
        super().__init__(module, *arguments, lazy_bucket_allocation=lazy_bucket_allocation, **options)
        if lazy_bucket_allocation:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)


class FinalizesAtOnce(DistributedDataParallel):
    """Breaks finalization by hand: backward completes the reduction, and finalize_backward() does nothing at any time."""

    breaks = ("manual_finalization.completes", "manual_finalization.refusals", "manual_finalization.when")
    require_manual_backward_finalization = False
    should_finalize_after_backward = False

    def finalize_backward(self):
        pass


class WaitsFromTheStart(DistributedDataParallel):
    """Breaks the promise that finalization by hand is off until it is set: it is on in a new DDP."""

    breaks = ("manual_finalization.off_by_default",)

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)
        self.require_manual_backward_finalization = True
