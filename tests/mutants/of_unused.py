"""Reference DDPs with one defect in what happens to parameters that a forward leaves out."""

import torch

from tests.reference_ddp import ReferenceDDP


class WritesZeros(ReferenceDDP):
    """Breaks the promise that None stays None: what no rank used gets a gradient of zeros."""

    breaks = ("unused_parameters.none_stays_none",)

    def finish(self):
        if self.work_on_used is not None:
            self.work_on_used.wait()
            self.counts.fill_(1)
            self.work_on_used = None
        super().finish()


class ClearsOldGradients(ReferenceDDP):
    """Breaks the promise that what nobody used keeps its gradient: it is set to None."""

    breaks = ("unused_parameters.old_gradient_stays",)

    def finish(self):
        super().finish()
        if self.find_unused_parameters:
            for parameter, count in zip(self.trainable, self.counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None


class AveragesOverUsers(ReferenceDDP):
    """Breaks the divisor: the gradient is the mean over the ranks that used the parameter, not over all."""

    breaks = ("unused_parameters.locally_unused_gets_mean",)

    def write(self, parameter, mean):
        if self.find_unused_parameters:
            index = next(index for index, each in enumerate(self.trainable) if each is parameter)
            mean = mean * self.world_size / max(1, int(self.counts[index]))
        super().write(parameter, mean)


class SkippersKeepTheirs(ReferenceDDP):
    """Breaks the promise that all ranks get the same gradient: one that did not use the parameter gets none."""

    breaks = ("unused_parameters.locally_unused_gets_mean",)

    def write(self, parameter, mean):
        index = next(index for index, each in enumerate(self.trainable) if each is parameter)
        if index in self.used or not self.find_unused_parameters:
            super().write(parameter, mean)


class NeverComplains(ReferenceDDP):
    """Breaks the promise that a missing gradient makes the next forward raise."""

    breaks = ("missing_gradient.next_forward_raises",)

    def refuse_unfinished_reduction(self):
        pass


class AlwaysSearches(ReferenceDDP):
    """Breaks the default of find_unused_parameters: the graph is searched always, and a missing gradient goes unnoticed."""

    breaks = ("missing_gradient.next_forward_raises", "first_iteration.one_collective")

    def __init__(self, module, **options):
        super().__init__(module, **{**options, "find_unused_parameters": True})


class NamesTheWrongIndices(ReferenceDDP):
    """Breaks the error message: it lists the parameters that did get a gradient."""

    breaks = ("missing_gradient.message_lists_indices",)

    def refuse_unfinished_reduction(self):
        if self.expecting and self.started:
            self.ready = set(range(len(self.trainable))) - self.ready
        super().refuse_unfinished_reduction()


class NeverNamesThem(ReferenceDDP):
    """Breaks the error message at INFO and DETAIL: no name is given."""

    breaks = ("missing_gradient.message_names_parameters",)

    def refuse_unfinished_reduction(self):
        try:
            super().refuse_unfinished_reduction()
        except RuntimeError as error:
            raise RuntimeError(str(error).partition("They are")[0] + " Set TORCH_DISTRIBUTED_DEBUG.") from None


class SearchesOnce(ReferenceDDP):
    """Breaks the search of every iteration: the unused parameters of the first one are taken for those of all."""

    breaks = ("unused_parameters.any_set_on_any_rank",)
    found = None

    def find_unused(self, output):
        if self.found is None:
            self.found = super().find_unused(output)
        return self.found

    def mark_ready(self, index):
        if index not in self.ready:
            super().mark_ready(index)


class SeesPlainOutputsOnly(ReferenceDDP):
    """Breaks the search in outputs: tensors inside lists and dictionaries are not seen."""

    breaks = ("outputs.find_unused_containers", "unused_parameters.output_left_out_of_loss")

    def find_unused(self, output):
        return super().find_unused(output if isinstance(output, torch.Tensor) else None)

    def mark_ready(self, index):
        if index not in self.ready:
            super().mark_ready(index)


class HooksSeeNothing(ReferenceDDP):
    """Breaks what a hook finds in the place of an unused parameter: not zeros but ones."""

    breaks = ("unused_parameters.hook_sees_zeros",)

    def fill(self, bucket):
        super().fill(bucket)
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=False):
            if parameter.grad is None and self.hook:
                part.fill_(1)


class SendsTheMapAlways(ReferenceDDP):
    """Breaks the economy of an iteration: the map of used parameters travels twice."""

    breaks = ("unused_parameters.one_collective_more",)

    def start_used(self):
        super().start_used().wait()
        return super().start_used()
