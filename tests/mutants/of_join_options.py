"""Torch's own DDP with one defect in join(): with another option, by position, for the second module, or after a throw."""

from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel


class DividesViewsByTheInitial(DistributedDataParallel):
    """Breaks divide_by_initial_world_size=False: where gradients are views it is ignored."""

    breaks = ("join.divisor_with_options",)

    def join_hook(self, **options):
        if self.gradient_as_bucket_view:
            options["divide_by_initial_world_size"] = True
        return super().join_hook(**options)


class DividesAStaticGraphByTheInitial(DistributedDataParallel):
    """Breaks divide_by_initial_world_size=False: with a static graph it is ignored."""

    breaks = ("join.divisor_with_options",)

    def join_hook(self, **options):
        if self.static_graph:
            options["divide_by_initial_world_size"] = True
        return super().join_hook(**options)


class DividesByTheInitialInASearch(DistributedDataParallel):
    """Breaks divide_by_initial_world_size=False: where unused parameters are looked for it is ignored."""

    breaks = ("join.divisor_with_options",)

    def join_hook(self, **options):
        if self.find_unused_parameters:
            options["divide_by_initial_world_size"] = True
        return super().join_hook(**options)


class ExchangesTheArguments(DistributedDataParallel):
    """Breaks the order of join()'s arguments: the first one switches it on or off."""

    breaks = ("join.positional_arguments",)

    def join(self, enable=True, divide_by_initial_world_size=True, throw_on_early_termination=False):
        return super().join(divide_by_initial_world_size, enable, throw_on_early_termination)


class EndsTheFirstModuleOnly(DistributedDataParallel):
    """Breaks the end of join() for several modules: only the first one is the last joiner's on every rank."""

    breaks = ("join.ends_with_every_module",)

    def _sync_final_model(self, is_last_joiner):
        if self._join_config.is_first_joinable:
            super()._sync_final_model(is_last_joiner)


class EndsWithIgnoredBuffers(DistributedDataParallel):
    """Breaks the end of join(): buffers that DDP is to ignore are brought, too."""

    breaks = ("join.ends_without_ignored_buffers",)

    def _sync_final_model(self, is_last_joiner):
        ignored = self.parameters_to_ignore
        self.parameters_to_ignore = set(ignored) - {name for name, _ in self.module.named_buffers()}
        super()._sync_final_model(is_last_joiner)
        self.parameters_to_ignore = ignored


class StopsAfterAThrow(DistributedDataParallel):
    """Breaks the promise that a throw of join() can be recovered from: from then on gradients stay local."""

    breaks = ("join.goes_on_after_a_throw",)

    @contextmanager
    def join(self, *arguments, **options):
        try:
            with super().join(*arguments, **options):
                yield
        except RuntimeError:
            self.require_backward_grad_sync = False
            raise
