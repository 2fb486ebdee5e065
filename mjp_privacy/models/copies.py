"""Copies of networks to work on."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class _Detached(TorchFunctionMode):
    """In this block what was computed is copied without what it was computed from, wherever a
    network keeps it; torch copies no such tensors."""

    def __torch_function__(
        self, call: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if call is Tensor.__deepcopy__ and is_functorch_wrapped_tensor(args[0]):
            return args[0]  # of a transformation that has ended: it holds nothing any more
        if call is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return call(*args, **(kwargs or {}))


def copied(module: AnyModule, twins: dict[int, Any] | None = None) -> AnyModule:
    """A copy of a network or of a part of one, also where parts keep what they last computed.

    twins  filled with the copies, by the identity of what they are copies of
    """
    with _Detached():
        return deepcopy(module, {} if twins is None else twins)
