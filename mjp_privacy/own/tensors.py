"""Arrays and tensors of any kind as plain tensors on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Floating-point numbers that everything here computes with; those of 8 bits are not."""


def as_tensor(value: Any) -> Tensor | None:
    """The numbers of an array or tensor, dense and on the CPU; None if it is nothing of the kind.

    as_tensor(np.ones(2, ">f4")) is a tensor of float32.
    """
    if isinstance(value, np.ndarray):
        return _of_array(value)
    if not isinstance(value, Tensor) or value.device.type == "meta" or value.is_quantized:
        return None
    dense = value if value.layout == torch.strided else value.to_dense()
    return dense.detach().cpu()


def _of_array(array: np.ndarray[Any, Any]) -> Tensor | None:
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        return None
    if np.issubdtype(array.dtype, np.floating) and array.itemsize > 8:
        array = array.astype(np.float64)
    native = array.astype(array.dtype.newbyteorder("="))  # a copy, without negative strides
    try:
        return torch.from_numpy(np.asarray(native))
    except TypeError:  # numbers that torch has not
        return None
