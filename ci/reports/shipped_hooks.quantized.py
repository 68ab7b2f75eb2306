"""
shipped_hooks.quantized/tensor on 2 ranks, gloo:cpu (MUST)

The quantization hooks give every rank the mean of the ranks' gradients, as near as 256 steps between the smallest and the largest allow.

Source: torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks.quantization_pertensor_hook
"""


import datetime
import importlib
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks


# ---- facts.py

LONGEST = 2048

WRITTEN_OUT = 8

SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}

def text(value: Any) -> str:
    """
    The value as text, at most 2 kB.

    A float32 tensor is its nested list; any other dtype, and an empty tensor, is led by dtype and shape
    (`bf16[2] 1.0 2.0`); a constant one is `262144 x 1.5`. A sparse tensor is its coalesced indices and values.
    Strings must be printable ASCII, for a golden file is read and reviewed as text.
    """
    written = _text(value)
    if len(written) > LONGEST:
        raise ValueError(f"a fact is at most {LONGEST} characters, this one has {len(written)}: show less")
    if not (written.isascii() and written.isprintable()):
        raise ValueError(f"a fact is printable ASCII in one line: {written!r}")
    return written

def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value.detach())
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, (bool, int, float, complex)):
        return str(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_text(item) for item in value)) + "}"
    if isinstance(value, (list, tuple, torch.Size)):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if is_dataclass(value):
        return _text({field.name: getattr(value, field.name) for field in fields(value)})
    raise TypeError(
        f"no canonical text for a {type(value).__name__}: show a tensor, a number, a string, or lists of them"
    )

def _tensor(tensor: torch.Tensor) -> str:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return f"sparse{list(tensor.shape)} at {tensor.indices().tolist()}: {_tensor(tensor.values())}"
    tensor = tensor.cpu()
    name = SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    head = "" if tensor.dtype is torch.float32 and tensor.numel() else f"{name}{list(tensor.shape)} "
    values = tensor.reshape(-1)
    if tensor.numel() > WRITTEN_OUT and bool((values == values[0]).all()):
        return f"{head}{tensor.numel()} x {values[0].item()}"
    if head:
        return (head + " ".join(str(item) for item in values.tolist())).rstrip()
    return str(tensor.tolist())

def brief(value: Any) -> str:
    """The value for a report: canonical where it can be, cut short where it is long."""
    try:
        written = _text(value)
    except TypeError:
        written = repr(value)
    return written if len(written) <= 300 else f"{written[:290]}... ({len(written)} characters)"


# ---- subject.py

AFTER_BACKWARD = ("after_backward", "ddp_on_after_backward", "gradients")

def _torch() -> Any:
    import torch  # here, for pytest's own process has no need of torch until a case module imports it

    return torch

class NotOffered(Exception):
    """The subject, or this torch, does not have what the case asks for."""

class NoData(Exception):
    """This build of torch, this Python or this machine cannot show the claim."""

class SubjectError(Exception):
    """The subject cannot be used at all; the message says why in one line."""

class Subject:
    """
    A way to wrap a module. `package.module:name` names a callable `wrap(module, **ddp_options)`, or an object with a
    method `wrap`; `package.module` alone a module with such functions. All else that the object may offer is optional:

    setup()             called in every rank before the first wrap
    forward(w, *inputs) the output, where the wrapped module's own forward is not it
    after_backward(w)   called at the end of every backward, for subjects that reduce or wait there, or would at step time
    gradients(w)        pairs of a parameter and its gradient, asked for after that, where gradients are kept elsewhere
    parameters(w), buffers(w)   what takes the place of the wrapped module's methods of these names
    no_sync(w)          a context manager, where the wrapped module has none of its own
    teardown()          called in every rank at the end

    There is none for backward or step: cases call `loss.backward()` and `optimizer.step()` and read `.grad`, as users do.

    The names of the CS336 assignment, `get_ddp(module)` and `ddp_on_after_backward(w, optimizer)`, stand for wrap and
    after_backward; no optimizer is handed over.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.changed: list[str] = []  # what its import changed for everybody
        self.target = _load(spec)
        own = _method(self.target, "wrap") or _method(self.target, "get_ddp")
        self._wrap: Callable[..., Any] = own or self.target
        self._made: set[type] = set()
        self._supposed: list[str] = []  # to be had by what wrap returns, which is not known before
        self._adapter = self.target if own else None

    def wrap(self, module: "nn.Module", **options: Any) -> Any:
        """The wrapped module; options that the subject does not know raise NotOffered, unless they ask for nothing."""
        for option, value in list(options.items()):
            if not self._takes(option):
                if value is not _default_of(option):
                    raise NotOffered(f"{self.spec} takes no {option}")
                del options[option]
        if not self._made and (setup := _method(self._adapter, "setup")):
            setup()
        made = self._wrap(module, **options)
        self._made.add(type(made))
        for name in ("forward", "parameters", "buffers", "no_sync"):
            method = _method(self._adapter, name)
            if method is not None and not (name == "no_sync" and hasattr(made, name)):
                setattr(made, name, partial(method, made))
        if any(_method(self._adapter, name) for name in AFTER_BACKWARD):
            made.register_forward_hook(_AfterBackward(self.spec))
        for name in self._supposed:
            if not hasattr(made, name):
                raise NotOffered(f"{self.spec} has no {name}")
        return made

    def close(self) -> None:
        """Let the subject clean up after itself at the end of a case."""
        if self._made and (teardown := _method(self._adapter, "teardown")):
            teardown()

    def offers(self, name: str) -> bool:
        """
        Whether the subject has this constructor option, attribute or method.

        What a function will return is not known before it has: a method is supposed to be there, until `wrap` sees that
        it is not.
        """
        if self._takes(name) or hasattr(self.target, name):
            return True
        if inspect.isclass(self.target) or _default_of(name) is not inspect.Parameter.empty:
            return False
        self._supposed.append(name)
        return True

    def _takes(self, option: str) -> bool:
        """Whether the option can be handed over; `**options` takes all."""
        try:
            parameters = inspect.signature(self._wrap).parameters.values()
        except (TypeError, ValueError):
            return True
        return any(each.kind is each.VAR_KEYWORD or each.name == option for each in parameters)

def _load(spec: str) -> Any:
    module_name, colon, name = spec.partition(":")
    if not module_name or (colon and not name):
        raise SubjectError(f"--subject {spec}: write package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).splitlines())}"
        raise SubjectError(f"--subject {spec}: {module_name} does not import: {why}") from error
    if not colon:
        if not (_method(found, "wrap") or _method(found, "get_ddp")):
            raise SubjectError(f"--subject {spec}: write package.module:name (the module has neither wrap nor get_ddp)")
        return found
    for part in name.split("."):
        if not hasattr(found, part):
            raise SubjectError(f"--subject {spec}: {module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found) and not (_method(found, "wrap") or _method(found, "get_ddp")):
        raise SubjectError(f"--subject {spec}: neither callable nor an object with a method wrap")
    return found

def _method(target: Any, name: str) -> Callable[..., Any] | None:
    found = getattr(target, name, None)
    return found if callable(found) else None

def _default_of(option: str) -> Any:
    """What torch's DDP takes when the option is left out: to ask for that of a subject without it is to ask for nothing."""
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters.get(option)
    return inspect.Parameter.empty if known is None else known.default

class _AfterBackward:
    """
    A forward hook that calls the adapter's functions once at the end of each backward through an output.

    It names the adapter and holds no module, so that a copy of a module, pickled or not, has a hook of its own.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.queued = False

    def __call__(self, made: Any, inputs: Any, output: Any) -> None:
        self.queued = False  # a backward that raised never came to its end

        def queue(gradient: Any) -> None:
            if not self.queued:
                self.queued = True
                _torch().autograd.Variable._execution_engine.queue_callback(finish)

        def finish() -> None:
            self.queued = False
            reduce, finish_cs336, gradients = (_method(_load(self.spec), name) for name in AFTER_BACKWARD)
            if reduce is not None:
                reduce(made)
            if finish_cs336 is not None:
                finish_cs336(made, None)
            for parameter, gradient in gradients(made) if gradients is not None else ():
                parameter.grad = gradient

        for tensor in _tensors(output, set()):
            if tensor.requires_grad:
                tensor.register_hook(queue)

def _tensors(output: Any, seen: set[int]) -> Iterator[Any]:
    """All tensors of an output, also those in dataclasses and plain objects; what belongs to a module is no output."""
    from torch.utils._pytree import tree_flatten

    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, _torch().Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and id(leaf) not in seen and not isinstance(leaf, (type, _torch().nn.Module)):
            seen.add(id(leaf))
            yield from _tensors(list(vars(leaf).values()), seen)


# ---- rank.py

facts = sys.modules[__name__]

class Rank:
    """
    One rank of a case.

    index, world_size   of the default process group (0 and 1 without one)
    device              where modules and batches belong in this lane
    """

    def __init__(
        self,
        index: int,
        world_size: int,
        device: torch.device,
        subject: Subject,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.index = index
        self.world_size = world_size
        self.device = device
        self._subject = subject
        self._tell = tell
        self._shown: set[str] = set()
        self._collectives_before = 0
        if dist.is_initialized():
            with suppress(NoData):
                self._collectives_before = self._sequence_number()

    def wrap(self, module: nn.Module, **ddp_options: Any) -> Any:
        """Move the module to `device` in place and wrap it with the subject, `device_ids` set where the device has an index."""
        if not ddp_options.pop("stay", False):
            module.to(self.device)
            if self.device.type != "cpu" and self._subject.offers("device_ids"):
                ddp_options.setdefault("device_ids", [self.device.index])
        return self._subject.wrap(module, **ddp_options)

    def mean(self, value: Callable[[int], torch.Tensor], ranks: Sequence[int] | None = None) -> torch.Tensor:
        """The mean of `value(r)` over all ranks r, or those named; worked out here, without communication."""
        chosen = range(self.world_size) if ranks is None else ranks
        total = sum(value(rank) for rank in chosen)
        assert isinstance(total, torch.Tensor)
        return total / len(chosen)

    def law(self, text: str, got: Any, expected: Any) -> None:
        """State what must hold from first principles: `got` is exactly `expected`, in values, dtype and shape."""
        if _share_storage(got, expected):
            raise TypeError(f"law {text!r} compares a tensor with itself and could not fail: clone one side")
        self._tell_law(text, _same(got, expected), f"got      {facts.brief(got)}\nexpected {facts.brief(expected)}")

    def _sequence_number(self) -> int:
        # It starts at 0 on new releases of torch and at a random number on 1.13, so only differences mean anything.
        group: Any = dist.distributed_c10d._get_default_group()
        try:
            return int(group._get_sequence_number_for_group())
        except RuntimeError as error:  # torch asks this of its own backends only
            raise NoData(f"backend {dist.get_backend()} does not count its collectives") from error

    def _tell_law(self, text: str, holds: bool, detail: str) -> None:
        self._tell({"law": text, "holds": holds, "detail": detail})

def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)):
            return False
        got, expected = got.detach(), expected.detach()
        if (got.dtype, got.shape, got.layout, got.device) != (
            expected.dtype,
            expected.shape,
            expected.layout,
            expected.device,
        ):
            return False
        if got.layout is torch.sparse_coo:
            return bool(torch.equal(got.coalesce().to_dense(), expected.coalesce().to_dense()))
        return bool(torch.equal(got, expected))
    if type(got) is not type(expected):
        return False
    if isinstance(got, (list, tuple)):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(got, dict):
        return got.keys() == expected.keys() and all(_same(got[key], expected[key]) for key in got)
    return bool(got == expected)

def _share_storage(got: Any, expected: Any) -> bool:
    if got is expected:
        return isinstance(got, (torch.Tensor, list, dict))
    if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        if torch.sparse_coo in (got.layout, expected.layout) or "meta" in (got.device.type, expected.device.type):
            return False
        return got.numel() > 0 and _storage(got) == _storage(expected)
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return any(map(_share_storage, got, expected))
    return False

def _storage(tensor: torch.Tensor) -> int:
    any_tensor: Any = tensor  # torch 1.13 has no untyped_storage, and later releases warn of storage
    storage = any_tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else any_tensor.storage()
    return int(storage.data_ptr())


# ---- models.py

def linear(inputs: int = 2, outputs: int = 1, *, dtype: torch.dtype = torch.float32, start: float = 1.0) -> nn.Linear:
    """A bias-free Linear whose weights all equal `start`: the gradient of its summed output is its input."""
    module = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    nn.init.constant_(module.weight, start)
    return module


# ---- the case

QUANTIZED = {
    "tensor": quantization_hooks.quantization_pertensor_hook,
    "channel": quantization_hooks.quantization_perchannel_hook,
}

def test_the_quantization_hooks_give_the_mean_within_a_step(rank, hook):
    """
    The quantization hooks give every rank the mean of the ranks' gradients, as near as 256 steps between the smallest and the largest allow.

    Gradients 0 to 255 times r+1 are exact multiples of a rank's own step. Where this is broken backward raises on gloo: there an
    all-gather's future holds the gathered tensors, and the hooks look for them one list deeper.
    """
    model = linear(256)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(dist.group.WORLD, hook)
    x = torch.arange(256.0, device=rank.device).reshape(1, 256)
    ddp(x * (rank.index + 1)).sum().backward()
    mean = rank.mean(lambda r: x * (r + 1))
    rank.law("within one step of the mean", bool(((model.weight.grad - mean).abs() <= 1 + rank.index).all()), True)


PROGRAM = test_the_quantization_hooks_give_the_mean_within_a_step
VALUE = (QUANTIZED['tensor'],)
WORLD = 2
BACKEND = 'gloo'
DEVICE = 'cpu'
SUBJECT = 'torch.nn.parallel:DistributedDataParallel'
GROUP = True
MAY = ()
WAIT = 30.0
TIMEOUT = 20.0
RENDEZVOUS = 20.0


def _main(index, world_size, path):
    """One rank: join the group, run the case, print what it shows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(DEVICE if DEVICE == "cpu" else f"{DEVICE}:{index % max(1, torch.cuda.device_count())}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if GROUP:
        options = {"timeout": datetime.timedelta(seconds=max(TIMEOUT, RENDEZVOUS))}
        if path is not None:
            options.update(store=dist.FileStore(path, world_size), rank=index, world_size=world_size)
        dist.init_process_group(BACKEND, **options)
        store = dist.distributed_c10d._get_default_store()
        if TIMEOUT < RENDEZVOUS and hasattr(dist.distributed_c10d, "_set_pg_timeout"):
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), dist.group.WORLD)

    broken = []

    def tell(said):
        if "fact" in said:
            sys.stdout.write(f"rank {index}: {said['fact']} = {said['text']}\n")
        elif "law" in said:
            verdict = "holds" if said["holds"] else f"BROKEN\n{said['detail']}\n"
            broken.extend([] if said["holds"] else [said["law"]])
            sys.stdout.write(f"rank {index}: law {said['law']}: {verdict}\n")
        sys.stdout.flush()

    subject = Subject(SUBJECT)
    PROGRAM(Rank(index, world_size, device, subject, tell), *VALUE)
    if "hang" in MAY:
        tell({"fact": "outcome", "text": f"returned, and stays for {WAIT:.0f} s: a peer that waits fails once this one leaves"})
        time.sleep(WAIT)
    elif GROUP and not MAY:
        # A rank that leaves while a peer still talks makes gloo fail there; and a group that timed out has no barrier.
        store.set(f"left/{index}", "")
        store.wait([f"left/{each}" for each in range(world_size)])
    if broken and path is not None:
        open(f"{path}.broken", "w").close()  # a rank that fails would have the others ended
        broken.clear()
    os._exit(1 if broken else 0)  # interpreter exit with live gloo threads can abort


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != WORLD:
            sys.exit(f"this case is one of {WORLD} ranks: torchrun --nproc-per-node {WORLD}")
        _main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.start_processes(_main, (WORLD, store), nprocs=WORLD, start_method="fork")
        sys.exit(os.path.exists(f"{store}.broken"))
