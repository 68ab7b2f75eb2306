"""torch's DDP with one defect in PowerSGD: in what its state is told, or in which tensors it compresses."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class _PowerSGD(DistributedDataParallel):
    """A PowerSGD hook is changed, and no other: `change` makes another hook of it, or changes its state."""

    def register_comm_hook(self, state, hook):
        if hasattr(state, "matrix_approximation_rank"):
            hook = self.change(state, hook) or hook
        super().register_comm_hook(state, hook)

    def change(self, state, hook):
        raise NotImplementedError


class LeavesConvolutions(_PowerSGD):
    """Breaks the promise that every tensor worth it is compressed: what has more than two dimensions is averaged whole."""

    breaks = ("power_sgd.convolution",)

    def change(self, state, hook):
        def compressing_matrices(state, bucket):
            if all(parameter.dim() <= 2 for parameter in bucket.parameters()):
                return hook(state, bucket)
            state.maybe_increase_iter(bucket)
            return allreduce_hook(state.process_group, bucket)

        return compressing_matrices


class StartsCold(_PowerSGD):
    """Breaks warm start: every iteration begins anew."""

    breaks = ("power_sgd.warm_start",)

    def change(self, state, hook):
        state.warm_start = False


class StartsWarm(_PowerSGD):
    """Breaks warm_start=False: it is ignored."""

    breaks = ("power_sgd.warm_start",)

    def change(self, state, hook):
        state.warm_start = True


class AlwaysFeedsBack(_PowerSGD):
    """Breaks use_error_feedback=False: it is ignored."""

    breaks = ("power_sgd.no_error_feedback",)

    def change(self, state, hook):
        state.use_error_feedback = True


class PowerSGDTakesTheWorld(_PowerSGD):
    """Breaks the mean over the state's process group: its size is taken to be the world's."""

    breaks = ("power_sgd.in_a_group",)

    def change(self, state, hook):
        def dividing_by_the_world(state, bucket):
            bucket.set_buffer(bucket.buffer() * (dist.get_world_size(state.process_group) / dist.get_world_size()))
            return hook(state, bucket)

        return dividing_by_the_world


class MixesUpTheBatch(_PowerSGD):
    """Breaks batch_tensors_with_same_shape: from the start on each tensor gets the answer of another one of its shape."""

    breaks = ("power_sgd.same_shapes",)

    def change(self, state, hook):
        def mixing(state, bucket):
            compressing = state.iter >= state.start_powerSGD_iter
            answer = hook(state, bucket)
            return answer.then(lambda done: mixed(done.value(), bucket)) if compressing else answer

        def mixed(flat, bucket):
            pieces = flat.split([parameter.numel() for parameter in bucket.parameters()])
            of_a_shape = {}
            for piece, parameter in zip(pieces, bucket.parameters(), strict=True):
                of_a_shape.setdefault(parameter.shape, []).append(piece)
            for same in of_a_shape.values():
                for piece, other in zip(same, [same[-1].clone(), *(each.clone() for each in same[:-1])], strict=True):
                    piece.copy_(other)
            return flat

        return mixing if state.batch_tensors_with_same_shape else None
