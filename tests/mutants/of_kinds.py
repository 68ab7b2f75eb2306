"""DDPs with one defect that sparse, complex or strided gradients show beside something else."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.of_hook_buckets import Handed
from tests.mutants.values import _Changes
from tests.reference_ddp import ReferenceDDP


class TakesBagsForDense(ReferenceDDP):
    """Breaks sparse gradients of an EmbeddingBag: they are expected of an Embedding only."""

    breaks = ("reduction.sparse_bag",)

    def set_buckets(self, assignment):
        bags = [each.weight for each in self.module.modules() if isinstance(each, nn.EmbeddingBag)]
        self.sparse = {i for i in self.sparse if not any(self.trainable[i] is bag for bag in bags)}
        super().set_buckets(assignment)

    def fill(self, bucket):
        for parameter in bucket.parameters():
            dense = bucket.indices[0] not in self.sparse
            if dense and parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        super().fill(bucket)


class SendsSparseDoublesAsSingles(ReferenceDDP):
    """Breaks sparse gradients in double precision: they travel in single precision."""

    breaks = ("reduction.sparse_double",)

    def fill(self, bucket):
        super().fill(bucket)
        if bucket.flat.is_sparse and bucket.flat.dtype is torch.float64:
            bucket.flat = bucket.flat.float().double().coalesce()


class _SparseTwice(_Changes):
    """A sparse gradient is doubled under an option."""

    def __init__(self, module, *args, **options):
        self.twice = any(options.get(option) for option in self.under)
        super().__init__(module, *args, **options)

    under = ()

    def change(self, gradient):
        return gradient * 2 if self.twice and gradient is not None and gradient.is_sparse else gradient


class SparseViewsCountTwice(_SparseTwice):
    """Breaks sparse gradients where the others are views: they are doubled."""

    breaks = ("reduction.sparse_options",)
    under = ("gradient_as_bucket_view",)


class SparseStaticGraphsCountTwice(_SparseTwice):
    """Breaks sparse gradients in a static graph: they are doubled."""

    breaks = ("reduction.sparse_options",)
    under = ("static_graph",)


class SparseSearchCountsTwice(_SparseTwice):
    """Breaks sparse gradients where unused parameters are looked for: they are doubled."""

    breaks = ("reduction.sparse_options",)
    under = ("find_unused_parameters",)


class SendsComplexDoublesAsSingles(_Changes):
    """Breaks complex gradients in double precision: they are rounded to single precision."""

    breaks = ("reduction.complex_double",)

    def change(self, gradient):
        wide = gradient is not None and gradient.dtype is torch.complex128
        return gradient.to(torch.complex64).to(gradient.dtype) if wide else gradient


class ViewsAreReal(_Changes):
    """Breaks complex gradients that are views: they lose their imaginary part."""

    breaks = ("reduction.complex_options",)

    def change(self, gradient):
        flat = self.gradient_as_bucket_view and gradient is not None and gradient.is_complex()
        return gradient.real.to(gradient.dtype) if flat else gradient


class CountsBucketsByDtype(DistributedDataParallel):
    """Breaks is_last where there are several dtypes: the bucket with a dtype's first parameter says that it is the last."""

    breaks = ("grad_bucket.last_of_all",)

    def register_comm_hook(self, state, hook):
        first = {}
        for parameter in self.module.parameters():
            first.setdefault(parameter.dtype, parameter)

        def counting(state, bucket):
            last = any(first[each.dtype] is each for each in bucket.parameters())
            return hook(state, Handed(bucket, is_last=lambda: last))

        super().register_comm_hook(state, counting)


class SparseIsNeverLast(DistributedDataParallel):
    """Breaks is_last where the last bucket is sparse: it says that it is not."""

    breaks = ("grad_bucket.last_of_all",)

    def register_comm_hook(self, state, hook):
        def never(state, bucket):
            return hook(state, Handed(bucket, is_last=lambda: bucket.is_last() and not bucket.buffer().is_sparse))

        super().register_comm_hook(state, never)


class ViewsKeepTheirBuffer(DistributedDataParallel):
    """Breaks set_buffer where gradients are views: the bucket keeps its tensor."""

    breaks = ("grad_bucket.set_buffer_in_views",)

    def register_comm_hook(self, state, hook):
        def keeping(state, bucket):
            return hook(state, Handed(bucket, set_buffer=lambda tensor: None))

        super().register_comm_hook(state, keeping if self.gradient_as_bucket_view else hook)


class PutsPiecesInPlace(DistributedDataParallel):
    """Breaks what is known of strided parameters in a bucket: a piece is the gradient element by element."""

    breaks = ("grad_bucket.strided",)

    def register_comm_hook(self, state, hook):
        def in_place(bucket):
            pieces = bucket.buffer().split([each.numel() for each in bucket.parameters()])
            return [
                p.as_strided(each.shape, each.stride(), p.storage_offset())
                for p, each in zip(pieces, bucket.parameters(), strict=True)
            ]

        def placing(state, bucket):
            return hook(state, Handed(bucket, gradients=lambda: in_place(bucket)))

        super().register_comm_hook(state, placing)


class StaticGraphsDivideByTheWorld(_Changes):
    """Breaks the mean in a sub-group where the graph is static: it is divided by the size of the world."""

    breaks = ("sub_groups.options",)

    def change(self, gradient):
        share = dist.get_world_size(self.process_group) / dist.get_world_size()
        return gradient * share if self.static_graph and gradient is not None else gradient


class ViewsDivideByTheWorld(_Changes):
    """Breaks the mean in a sub-group where gradients are views: it is divided by the size of the world."""

    breaks = ("sub_groups.options",)

    def change(self, gradient):
        share = dist.get_world_size(self.process_group) / dist.get_world_size()
        return gradient * share if self.gradient_as_bucket_view and gradient is not None else gradient
