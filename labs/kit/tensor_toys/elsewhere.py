"""A second device for a machine that has only one: its name is torch's "meta", and its tensors hold values.

`moved(tensor)` is a tensor on it. Inside `with Elsewhere():` a tensor of the CPU does not go with one
from there, as on a GPU, so code that forgets `device=` fails with torch's own words.
"""

# torch does not annotate what is overridden here.
# mypy: disable-error-code="override,no-untyped-call"

from contextlib import ExitStack
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the other device, with these values."""
    return Moved(tensor)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of either device, on the CPU."""
    return tensor.values_here if isinstance(tensor, Moved) else tensor


def model(net: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model on the other device."""
    net = deepcopy(net)
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = moved(parameter.data)  # type: ignore[assignment]
    return net


class Moved(torch.Tensor):
    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        shape = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        make: Any = cls._make_wrapper_subclass
        return make(cls, values.shape, dtype=values.dtype, device="meta", **shape)

    def __init__(self, values: torch.Tensor):
        self.values_here = values

    def __repr__(self) -> str:
        return f"elsewhere {self.values_here!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, dict(kwargs or {}))


class Elsewhere(TorchDispatchMode):
    """While it is entered, what is made with device="meta" holds values."""

    def __enter__(self) -> Any:
        self.stack = ExitStack()
        self.stack.enter_context(_Lists())
        # Inference mode does not know wrapped tensors; what it switches off is not what is looked at here.
        self.stack.enter_context(patch.object(torch._C, "_InferenceMode", lambda mode: torch.no_grad()))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, dict(kwargs or {}))


class _Lists(TorchFunctionMode):
    """The ways between tensors and lists, which torch takes without asking the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist:
            return here(args[0]).tolist()
        if func in INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x) if isinstance(x, list) else x for x in index)
            return func(args[0], index, *args[2:])
        if func in FROM_LISTS and is_elsewhere(kwargs.get("device")) and not isinstance(args[0], Moved):
            return moved(func(*args, **kwargs | {"device": "cpu"}))
        if func is torch.Tensor.new_tensor and isinstance(args[0], Moved):
            return moved(here(args[0]).new_tensor(*args[1:], **kwargs))
        return func(*args, **kwargs)


def is_elsewhere(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """One of torch's operations, computed here and kept where its arguments are, or where `device` says."""
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, Moved)]
    # A single number goes with everything.
    on_cpu = [x for x in tensors if not isinstance(x, Moved) and x.dim() > 0]
    # A copy goes from one device to another, and what is elsewhere can be indexed from the CPU.
    free = name == "copy_" or (name.lstrip("_").startswith("index") and isinstance(args[0], Moved))
    if there and on_cpu and not free:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} was given one on the CPU "
            "and one on the device of the caches; make every tensor with device="
        )
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = "cpu"
    result = func(*tree_map(here, args), **tree_map(here, kwargs))
    if not (there if device is None else is_elsewhere(device)):
        return result
    if name.endswith("_"):  # in place
        return args[0]
    return tree_map(lambda x: Moved(x) if isinstance(x, torch.Tensor) else x, result)
