"""DDPs that do with gradient_as_bucket_view what they should not, each in one way."""

from torch.nn.parallel import DistributedDataParallel


class NeverViews(DistributedDataParallel):
    """Breaks the promises of gradient_as_bucket_view=True: it takes the option and ignores it."""

    breaks = (
        "bucket_views.share_the_bucket",
        "bucket_views.one_copy_fewer",
        "bucket_views.detach_raises",
        "bucket_views.final_after_first_iteration",
    )

    def __init__(self, module, *args, gradient_as_bucket_view=False, **options):
        super().__init__(module, *args, **options)


class NeverRebuildsViews(DistributedDataParallel):
    """Breaks what is known of a view's storage: buckets of views are not rebuilt, so that it stays from the first iteration on."""

    breaks = ("bucket_views.final_after_first_iteration",)

    def __init__(self, module, *args, gradient_as_bucket_view=False, find_unused_parameters=False, **options):
        search = find_unused_parameters or gradient_as_bucket_view  # with the search buckets stay as they were made
        super().__init__(
            module,
            *args,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=search,
            **options,
        )


class AlwaysViews(DistributedDataParallel):
    """Breaks the promise that gradients are views on request only."""

    breaks = (
        "bucket_views.only_on_request",
        "bucket_views.share_the_bucket",
        "bucket_views.one_copy_fewer",
        "unused_parameters.old_gradient_stays",
    )

    def __init__(self, module, *args, gradient_as_bucket_view=True, **options):
        super().__init__(module, *args, gradient_as_bucket_view=True, **options)


class HalvesViews(DistributedDataParallel):
    """Breaks the promise that views change no value: with gradient_as_bucket_view=True every gradient is half."""

    breaks = (
        "bucket_views.same_numbers",
        "bucket_views.optimizers_zero_grad_works",
        "bucket_views.locally_unused_gets_mean",
        "bucket_views.assigned_gradient_is_taken_in",
    )

    def __init__(self, module, *args, gradient_as_bucket_view=False, **options):
        super().__init__(module, *args, gradient_as_bucket_view=gradient_as_bucket_view, **options)
        if gradient_as_bucket_view:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: gradient / 2)


class AddsTwice(DistributedDataParallel):
    """Breaks the promise that views change no value: a gradient that stays in its bucket is doubled from the second iteration on."""

    breaks = ("bucket_views.same_numbers",)
    forwards = 0

    def forward(self, *inputs, **keywords):
        self.forwards += 1
        if self.gradient_as_bucket_view and self.forwards > 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        return super().forward(*inputs, **keywords)


class TouchesUnused(DistributedDataParallel):
    """Breaks the promise that a view changes nothing for an unused parameter: it gets zeros where it had no gradient."""

    breaks = ("bucket_views.unused_none_stays_none",)

    def forward(self, *inputs, **keywords):
        if self.gradient_as_bucket_view:
            for parameter in self.module.parameters():
                if parameter.grad is None:
                    parameter.grad = parameter.detach() * 0
        return super().forward(*inputs, **keywords)
