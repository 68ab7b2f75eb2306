"""
A DistributedDataParallel in one file: pure Python on torch.distributed, no C++ reducer.

It holds on every MUST claim that it offers, which shows that the claims speak of DDP and not of torch's implementation.
Use it as a start for your own (`pytest --subject tests.reference_ddp:ReferenceDDP`), or break it: every step is a small
method, and a mutant in `tests/mutants/` is a subclass that changes one of them.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

MIB = 1024 * 1024
UNLIMITED = 1 << 62


@dataclass
class Bucket:
    """One all-reduce: its parameters by index, and its flat buffer. A comm hook is handed this object."""

    number: int
    indices: list[int]
    trainable: list[nn.Parameter]
    last: bool = False
    flat: torch.Tensor | None = None
    waiting_for: int = 0

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat = tensor

    def parameters(self) -> list[nn.Parameter]:
        return [self.trainable[index] for index in self.indices]

    def gradients(self) -> list[torch.Tensor]:
        """Views into the flat buffer, shaped like the parameters."""
        if self.flat.is_sparse:
            return []
        parts = self.flat.split([parameter.numel() for parameter in self.parameters()])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters(), strict=True)]


class ReferenceDDP(nn.Module):
    """Data parallelism over `process_group` (default: all ranks): equal replicas in, mean gradients out."""

    def __init__(
        self, module, *, process_group=None, bucket_cap_mb=None, broadcast_buffers=True, find_unused_parameters=False
    ):
        super().__init__()
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.first_limit = MIB if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
        self.cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * MIB)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.hook = None
        self.ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.start_up()

    def start_up(self):
        """All that is not copied along with a copy of this object."""
        module = self.module
        self.trainable = [parameter for parameter in self.parameters_in_care() if parameter.requires_grad]
        tables = [
            each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse
        ]
        self.sparse = {i for i, parameter in enumerate(self.trainable) if any(parameter is t.weight for t in tables)}
        self.refuse_what_cannot_work()
        self.refuse_replicas_that_differ()
        self.make_equal()
        self.ready_order, self.rebuilt, self.expecting = [], False, False
        self.used = set()
        self.set_buckets(self.first_buckets())
        self.watch_gradients()

    # Construction

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, names):
        """Declare parameters and buffers, before the module is wrapped, that are none of our business."""
        module._ddp_params_and_buffers_to_ignore = names

    def parameters_in_care(self):
        return [parameter for name, parameter in self.module.named_parameters() if name not in self.ignored]

    def buffers_in_care(self):
        return [buffer for name, buffer in self.module.named_buffers() if name not in self.ignored]

    def refuse_what_cannot_work(self):
        if not self.trainable:
            raise RuntimeError("DDP is not needed: no parameter of the module requires a gradient")
        if any(isinstance(each, nn.parameter.UninitializedParameter) for each in self.module.parameters()):
            raise RuntimeError("the module has uninitialized parameters: run a forward first")
        devices = {each.device.type for each in self.parameters_in_care()}
        if len(devices) > 1:
            raise ValueError(f"parameters must be on the same type of devices, not on {', '.join(sorted(devices))}")
        if devices == {"cpu"} and any(isinstance(each, nn.SyncBatchNorm) for each in self.module.modules()):
            raise ValueError("SyncBatchNorm layers only work with GPU modules")
        if dist.get_rank(self.process_group) < 0:
            raise ValueError("this rank is no member of the process group")

    def refuse_replicas_that_differ(self):
        """Parameters are matched by position, so their number and shapes must agree on all ranks."""
        own = [(tuple(parameter.shape), parameter.stride()) for parameter in self.trainable]
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, own, group=self.process_group)
        for rank, other in enumerate(everyone):
            if len(other) != len(own):
                raise RuntimeError(f"rank {rank} has {len(other)} parameters, this rank {len(own)}")
            for index, (theirs, ours) in enumerate(zip(other, own, strict=True)):
                if theirs != ours:
                    raise RuntimeError(
                        f"parameter {index}: shape, strides {theirs} on rank {rank}, {ours} on this rank"
                    )

    @property
    def world_size(self):
        return dist.get_world_size(self.process_group)

    def source(self):
        """The global rank that replicas are copied from: the group's first."""
        return dist.get_global_rank(self.process_group, 0) if self.process_group is not dist.group.WORLD else 0

    def initial_state(self):
        """What is made equal at construction: all parameters, frozen ones too, and all buffers."""
        return [*self.parameters_in_care(), *self.buffers_in_care()]

    def make_equal(self):
        self.broadcast(self.initial_state())

    def broadcast(self, tensors):
        """From the source to all; as bytes, so that any dtype goes."""
        for tensor in (tensor.data for tensor in tensors if tensor.numel()):  # autograd does not count this as a change
            sent = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            dist.broadcast(sent, self.source(), group=self.process_group)
            tensor.copy_(sent.view(tensor.dtype).view_as(tensor))

    # Buckets

    def assign(self, order, limits):
        """Greedy fill: a bucket closes when it reaches its limit, the last limit repeats. Dtypes and devices stay apart."""
        filling, closed, size = {}, [], {}
        step = {}
        for index in order:
            parameter = self.trainable[index]
            if index in self.sparse:
                closed.append([index])
                continue
            kind = (parameter.dtype, parameter.device)
            filling.setdefault(kind, []).append(index)
            size[kind] = size.get(kind, 0) + parameter.numel() * parameter.element_size()
            if size[kind] >= limits[min(step.get(kind, 0), len(limits) - 1)]:
                closed.append(filling.pop(kind))
                size[kind], step[kind] = 0, step.get(kind, 0) + 1
        return closed + list(filling.values())

    def first_buckets(self):
        """Before any gradient was seen, the reverse of registration stands for the order of backward."""
        limits = [self.first_limit, self.cap] if self.find_unused_parameters else [UNLIMITED]
        return sorted(self.assign(range(len(self.trainable)), limits), key=min)[::-1]

    def rebuild(self):
        """Once, after the first synchronized backward: buckets in the order in which the group's first rank had gradients."""
        if self.rebuilt or self.find_unused_parameters or len(self.ready_order) < len(self.trainable):
            return
        order = torch.tensor(self.ready_order, device=self.trainable[0].device)
        dist.broadcast(order, self.source(), group=self.process_group)
        self.set_buckets(self.assign(order.tolist(), [self.first_limit, self.cap]))
        self.rebuilt = True

    def set_buckets(self, assignment):
        self.buckets = [Bucket(number, indices, self.trainable) for number, indices in enumerate(assignment)]
        self.buckets[-1].last = True
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}

    # Forward

    def forward(self, *args, **kwargs):
        synchronized = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.refuse_unfinished_reduction()
            self.rebuild()
        if self.broadcast_buffers and self.require_forward_param_sync:
            self.sync_buffers()
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            output = self.module(*args, **kwargs)
        self.require_forward_param_sync = synchronized  # only what was trained together is brought together again
        if synchronized:
            self.expect_gradients(output)
            if self.find_unused_parameters:
                output = self.tie_together(output)
        return output

    def refuse_unfinished_reduction(self):
        if self.expecting and any(bucket.waiting_for for bucket in self.buckets) and self.started:
            late = sorted(set(range(len(self.trainable))) - self.ready)
            message = (
                "Expected to have finished reduction in the prior iteration before starting a new one. "
                f"Parameter indices which did not receive grad for rank {dist.get_rank(self.process_group)}: "
                f"{' '.join(map(str, late))}\nfind_unused_parameters=True lets a module leave some out. "
            )
            if dist.get_debug_level() == dist.DebugLevel.OFF:
                raise RuntimeError(message + "TORCH_DISTRIBUTED_DEBUG=INFO lets this message name them.")
            names = {id(parameter): name for name, parameter in self.module.named_parameters()}
            given = ", ".join(f"module.{names[id(self.trainable[index])]}" for index in late)
            raise RuntimeError(message + "They are " + given)

    def sync_buffers(self):
        self.broadcast(self.buffers_in_care())

    def expect_gradients(self, output):
        self.expecting, self.started, self.next, self.work = True, False, 0, []
        self.ready = set()
        self.ready_order = [] if not self.rebuilt else self.ready_order
        for bucket in self.buckets:
            bucket.waiting_for = len(bucket.indices)
        self.unused = self.find_unused(output) if self.find_unused_parameters else []

    def tie_together(self, output):
        """Let backward pass through every tensor of the output, in the loss or not, so that no gradient stays away."""
        leaves, structure = tree_flatten(output)
        tied = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for i, leaf in zip(tied, Tie.apply(*[leaves[i] for i in tied]) if tied else (), strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, structure)

    def find_unused(self, output):
        """The trainable parameters that no tensor of the output depends on, found by walking the graph."""
        with torch.profiler.record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            leaves = self.leaves_below(output)
        return [index for index, parameter in enumerate(self.trainable) if id(parameter) not in leaves]

    def leaves_below(self, output):
        nodes = [tensor.grad_fn or tensor for tensor in tensors_in(output) if tensor.requires_grad]
        leaves = {id(node) for node in nodes if isinstance(node, torch.Tensor)}
        nodes, seen = [node for node in nodes if not isinstance(node, torch.Tensor)], set()
        while nodes:
            node = nodes.pop()
            if node not in seen:
                seen.add(node)
                nodes += [below for below, _ in node.next_functions if below is not None]
        return leaves | {id(node.variable) for node in seen if hasattr(node, "variable")}

    # Backward

    def watch_gradients(self):
        """Be told after a parameter's gradient has accumulated. (The hook for that came with 2.1; the node's is older.)"""
        self.nodes, me = [], weakref.ref(self)  # a hook does not keep alive what it belongs to
        for index, parameter in enumerate(self.trainable):
            with torch.enable_grad():
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, index=index: me() and me().on_gradient(index))
            self.nodes.append(node)  # it lives only as long as somebody holds it

    def on_gradient(self, index):
        if self.trainable[index].grad is not None:
            self.used.add(index)  # inside no_sync too
        if not self.expecting:
            return
        if not self.started:
            self.started = True
            for unused in self.unused:
                self.mark_ready(unused)
        if not self.rebuilt:
            self.ready_order.append(index)
        self.mark_ready(index)

    def mark_ready(self, index):
        if index in self.ready:
            raise RuntimeError(
                f"Expected to mark a variable ready only once: parameter {index} had its gradient before"
            )
        self.ready.add(index)
        self.bucket_of[index].waiting_for -= 1
        while self.next < len(self.buckets) and not self.buckets[self.next].waiting_for:
            self.fill(self.buckets[self.next])
            self.work.append(self.start(self.buckets[self.next]))  # in bucket order, or ranks would cross
            self.next += 1
            if self.next == len(self.buckets):
                self.work_on_used = self.start_used() if self.find_unused_parameters else None
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def fill(self, bucket):
        """Copy the bucket's gradients, zeros for those that are None, into a new flat buffer."""
        if bucket.indices[0] in self.sparse and bucket.parameters()[0].grad is not None:
            bucket.flat = bucket.parameters()[0].grad.detach().coalesce()
            return
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket.parameters()]
        bucket.flat = torch.cat([grad.detach().reshape(-1).to(grads[0].dtype) for grad in grads])

    def start(self, bucket):
        """Start the bucket's reduction: the future of its mean."""
        work = self.mean(bucket) if self.hook is None else self.hook(bucket)
        if not isinstance(work, torch._C.Future):
            raise RuntimeError(f"a communication hook returns a future, not {type(work).__name__}")
        return work

    def mean(self, bucket):
        """Divided before the sum, so that half precision does not overflow."""
        flat = bucket.buffer()
        flat = flat / self.world_size if flat.is_sparse else flat.div_(self.world_size)
        work = dist.all_reduce(flat, group=self.process_group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def start_used(self):
        """How many ranks used each parameter since the last reduction."""
        device = self.trainable[0].device
        self.counts = torch.tensor([int(i in self.used) for i in range(len(self.trainable))], device=device)
        return dist.all_reduce(self.counts, group=self.process_group, async_op=True)

    def finish(self):
        """At the end of backward: wait, and let every gradient be its bucket's result."""
        if self.work_on_used is not None:
            self.work_on_used.wait()
        for bucket, work in zip(self.buckets, self.work, strict=True):
            bucket.flat = work.wait()
            if not isinstance(bucket.flat, torch.Tensor):
                raise RuntimeError(f"the hook's future holds no tensor but a {type(bucket.flat).__name__}")
            means = bucket.gradients() or [bucket.flat]  # a sparse one is not cut up
            for index, mean in zip(bucket.indices, means, strict=True):
                if self.work_on_used is None or self.counts[index]:  # what nobody used keeps what it had
                    self.write(self.trainable[index], mean)
            bucket.flat = None
        self.expecting = False
        self.used.clear()

    def write(self, parameter, mean):
        with torch.no_grad():
            if parameter.grad is None or mean.is_sparse:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)

    # What the user calls

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside leave gradients local; the next one outside reduces what has accumulated."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state, hook):
        """Reduce each bucket by `hook(state, bucket)`, the future of what the gradients shall be, instead of the mean."""
        self.refuse_what_is_no_hook(hook)
        self.hook = lambda bucket: hook(state, bucket)

    def __getstate__(self):
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError("copies are only supported when using DDP with the default process group")
        gone = {"process_group", "nodes", "buckets", "bucket_of", "work", "hook", "trainable"}
        return {name: value for name, value in vars(self).items() if name not in gone}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.process_group, self.hook = dist.group.WORLD, None
        self.start_up()

    def refuse_what_is_no_hook(self, hook):
        if not callable(hook):
            raise TypeError("a communication hook must be callable")
        signature = inspect.signature(hook)
        takes, returns = list(signature.parameters.values())[-1].annotation, signature.return_annotation
        if takes not in (inspect.Parameter.empty, dist.GradBucket):
            raise ValueError("the bucket's annotation should be dist.GradBucket")
        if returns not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
            raise ValueError("the return annotation should be torch.futures.Future[torch.Tensor]")
        if self.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once")


class Tie(torch.autograd.Function):
    """The tensors as they are; their gradients as they come, None for those that are not in the loss."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors of an output, whatever lists, dictionaries and dataclasses they are in."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]
