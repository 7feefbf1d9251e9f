"""A second device on a machine that has none: for programs of their own, never in a test process.

Tensors on it hold a tensor of the processor's and compute there, but torch takes them for another
device's: it refuses to mix the two, and everything that crosses from one to the other passes here
and is counted with the line of the engine that asked. So the one thing that is not tried is the
arithmetic of real hardware.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# Views made in inference mode of what was made outside cannot be wrapped.
torch.inference_mode = torch.no_grad  # type: ignore[misc, assignment]
torch.__future__.set_overwrite_module_params_on_conversion(True)
_setup_privateuseone_for_python_backend("second")

DEVICE = torch.device("second:0")
_ENGINE = f"{Path(__file__).parents[2] / 'engine'}/"
READS = "reads of the host that wait for the device"
WAITING_WRITES = "writes that the host waits for"
WRITES = "writes that the host does not wait for"
crossings: Counter[tuple[str, str]] = Counter()  # (kind, line of the engine)


class SecondTensor(torch.Tensor):
    """Looks like a tensor on DEVICE; `held` has its numbers, shape and strides."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "SecondTensor":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        _cross(READS)
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(operator, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def _cross(kind: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE):
        frame = frame.f_back  # type: ignore[assignment]
    line = f"{frame.f_code.co_filename.removeprefix(_ENGINE)}:{frame.f_lineno}" if frame else ""
    crossings[kind, line] += 1


def _held(value: Any) -> Any:
    return value.held if isinstance(value, SecondTensor) else value


def _compute(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = operator._schema.name
    if name == "aten::_local_scalar_dense":
        _cross(READS)
        return args[0].held.item()
    if name == "aten::_to_copy":
        return _moved(args[0], dict(kwargs))
    if name in ("aten::copy_", "aten::_copy_from"):
        target, source = (args[0], args[1]) if name == "aten::copy_" else (args[1], args[0])
        is_reading = isinstance(source, SecondTensor)
        if is_reading != isinstance(target, SecondTensor):
            _cross(READS if is_reading else WAITING_WRITES)
        _held(target).copy_(_held(source))
        return target
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    if any(isinstance(t, SecondTensor) for t in tensors) and any(
        t.dim() for t in tensors if not isinstance(t, SecondTensor)
    ):
        raise RuntimeError(f"{name}: tensors on two devices")
    if name == "aten::nonzero" or (
        name in ("aten::index", "aten::index_put", "aten::index_put_")
        and any(index is not None and index.dtype == torch.bool for index in args[1])
    ):
        _cross(READS)  # only the device knows the size of the result
    kwargs = {key: tree_map(_held, value) for key, value in kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = None
    found = operator(*tree_map(_held, args), **kwargs)
    return _placed(operator._schema, args, found)


def _moved(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    target = torch.device(kwargs.pop("device", None) or source.device)
    may_run_ahead = kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    made = torch.ops.aten._to_copy.default(_held(source), **kwargs)
    if target.type != DEVICE.type:
        _cross(READS)
        return made  # type: ignore[no-any-return]
    if not isinstance(source, SecondTensor):
        _cross(WRITES if may_run_ahead else WAITING_WRITES)
    return SecondTensor(made)


def _placed(schema: Any, args: Any, found: Any) -> Any:
    """Results are on the device; an operator in place gives back what it was given."""
    if any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        return next(
            value
            for argument, value in zip(schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return tree_map(lambda t: SecondTensor(t) if isinstance(t, torch.Tensor) else t, found)


def _register() -> tuple[torch.library.Library, ...]:
    """What has no kernel for the device by itself, factories among them, goes through _compute."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(lambda op, *args, **kwargs: _compute(op, args, kwargs), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    keys = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or not any(
            torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key) for key in keys
        ):
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(
            name,
            lambda *args, _operator=operator, **kwargs: _compute(_operator, args, kwargs),
            "PrivateUse1",
        )
    return every, aten


_libraries = _register()  # registrations last as long as these
