"""Runs what it is given as if the machine had a GPU, where it has none, to find tensors that are on the wrong side.

Everything is computed on the CPU. But a tensor that was made on "cuda", or moved there, is marked, as is all that is
computed from it, and says that its device is cuda:0. An operation on tensors of both sides raises, as with CUDA, unless
CUDA allows it: copies, single numbers of the CPU, indices from the CPU. accelerate is told that its device is cuda:0.
What a GPU computes, and how much memory it has, is not looked at, nor what a backward pass computes anew
(--gradient_checkpointing): torch takes the first mode away there, and tensors say that they are on the CPU.
"""

from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
COPIES = ("_to_copy", "copy_", "set_", "lift_fresh", "detach", "alias", "_local_scalar_dense")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
sides: dict[StorageWeakRef, torch.device] = {}  # a weak reference keeps the storage's address from being used again


def side(tensor: torch.Tensor) -> torch.device:
    return sides.get(StorageWeakRef(tensor.untyped_storage()), CPU)


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    sides[StorageWeakRef(tensor.untyped_storage())] = CUDA if device.type == "cuda" else CPU
    return tensor


def tensors_in(*tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]


class Operations(TorchDispatchMode):
    """What reaches the kernels: checks the sides of the inputs, and marks the outputs."""

    made_on = None  # device that the call in progress asked for

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, inputs = function.__name__.partition(".")[0], tensors_in(args, kwargs)
        checked = [] if name in COPIES else inputs
        if name in INDEXING and side(args[0]) == CUDA:  # indices may come from the CPU, values may not
            checked = [args[0], *tensors_in(args[2:])]
        found = {side(tensor) for tensor in checked if side(tensor) == CUDA or tensor.dim() > 0}
        if len(found) > 1:
            where = [f"{tuple(tensor.shape)} on {side(tensor)}" for tensor in checked]
            raise RuntimeError(f"{name}: tensors on both sides: {', '.join(where)}")
        device = self.made_on or (CUDA if CUDA in map(side, inputs) else CPU)
        if name == "lift_fresh":  # a new tensor from numbers
            put(args[0], device)
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = function(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            if tensor.untyped_storage()._cdata not in before:
                put(tensor, device)
        return outputs


class Calls(TorchFunctionMode):
    """What a program calls: CPU takes the place of CUDA in the arguments, and a tensor's device is its side."""

    def __init__(self, operations: Operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, tensor, name = dict(kwargs or {}), torch.Tensor, getattr(function, "__name__", "")
        if name == "_parse_to":  # of Module.to, which calls Tensor.to then
            return function(*args, **kwargs)
        if function in (tensor.device.__get__, tensor.is_cuda.__get__) and args[0].device.type == "cpu":
            return side(args[0]) if function == tensor.device.__get__ else side(args[0]) == CUDA
        if function in (tensor.to, tensor.cpu, tensor.cuda):
            return self.move(function, *args, **kwargs)
        if function in (tensor.numpy, tensor.__array__) and side(args[0]) == CUDA:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "new_tensor":  # a device that it is not given is that of its tensor
            kwargs = {"device": side(args[0])} | kwargs
        if kwargs.get("device") is None or torch.device(kwargs["device"]).type == "meta":
            return function(*args, **kwargs)
        outer, self.operations.made_on = self.operations.made_on, torch.device(kwargs["device"])
        try:
            return function(*args, **kwargs | {"device": CPU})
        finally:
            self.operations.made_on = outer

    def move(self, function, source: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Tensor.to, .cpu and .cuda: the result has a storage of its own if it changes sides."""
        devices = {torch.Tensor.cpu: [CPU], torch.Tensor.cuda: [CUDA]}.get(function, [kwargs.pop("device", None)])
        devices += [torch.device(x) for x in args if isinstance(x, (str, torch.device))]
        devices += [side(x) for x in args if isinstance(x, torch.Tensor)]
        dtypes = [getattr(x, "dtype", x) for x in args if isinstance(x, (torch.dtype, torch.Tensor))]
        device = next((torch.device(x) for x in reversed(devices) if x is not None), side(source))
        if "meta" in (device.type, source.device.type):
            return function(source, *args, **kwargs)
        result = source.to(*dtypes, **kwargs) if dtypes or kwargs else source
        if device.type != side(source).type:
            result = put(result.clone(), device)
        return result


@contextmanager
def pretend_gpu():
    """accelerate's device is cuda:0, and tensors keep to their sides."""
    device, fork_rng, load = Accelerator.device, torch.random.fork_rng, torch.load
    Accelerator.device = property(lambda accelerator: CUDA)
    torch.random.fork_rng = lambda devices=(), enabled=True, **kwargs: fork_rng([], enabled)

    def load_to(file, map_location=None, **kwargs):
        loaded = load(file, map_location="cpu", **kwargs)
        if map_location is None or torch.device(map_location).type == "cpu":
            return loaded
        return tree_map(lambda leaf: leaf.to(CUDA) if isinstance(leaf, torch.Tensor) else leaf, loaded)

    torch.load = load_to
    try:
        with Operations() as operations, Calls(operations):
            yield
    finally:
        Accelerator.device, torch.random.fork_rng, torch.load = device, fork_rng, load
