"""torch's DDP with one defect in join() from the second epoch on, inside no_sync, or in what its end brings."""

from torch.nn.parallel import DistributedDataParallel


class KeepsTheDivisor(DistributedDataParallel):
    """Breaks the promise that join() takes the divisor it is given: once one divided by the ranks that remain, all later ones do."""

    breaks = ("join.every_epoch",)
    remaining = False

    def join_hook(self, **options):
        self.remaining = self.remaining or not options.get("divide_by_initial_world_size", True)
        return super().join_hook(**{**options, "divide_by_initial_world_size": not self.remaining})


class EndsOneEpoch(DistributedDataParallel):
    """Breaks the end of join() in a second epoch: each rank keeps the model that it had when it ran out."""

    breaks = ("join.every_epoch",)
    ended = 0

    def _sync_final_model(self, is_last_joiner):
        self.ended += 1
        if self.ended == 1:
            super()._sync_final_model(is_last_joiner)


class ThrowsOutsideNoSyncOnly(DistributedDataParallel):
    """Breaks throw_on_early_termination=True inside no_sync: nothing is thrown there, and the loop goes on."""

    breaks = ("join.throws_inside_no_sync",)

    def forward(self, *inputs, **keywords):
        if self._join_config.throw_on_early_termination and not self.require_backward_grad_sync:
            return self.module(*inputs, **keywords)
        return super().forward(*inputs, **keywords)


class EndsWithoutFrozen(DistributedDataParallel):
    """Breaks the end of join(): frozen parameters are not brought."""

    breaks = ("join.ends_with_frozen_parameters",)

    def _sync_final_model(self, is_last_joiner):
        kept = [(each, each.data.clone()) for each in self.module.parameters() if not each.requires_grad]
        super()._sync_final_model(is_last_joiner)
        for parameter, value in kept:
            parameter.data.copy_(value)


class EndsWithIgnored(DistributedDataParallel):
    """Breaks the end of join(): parameters that DDP is to ignore are brought, too."""

    breaks = ("join.ends_without_ignored_parameters",)

    def _sync_final_model(self, is_last_joiner):
        ignored, self.parameters_to_ignore = self.parameters_to_ignore, set()
        super()._sync_final_model(is_last_joiner)
        self.parameters_to_ignore = ignored
