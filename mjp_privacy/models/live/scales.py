"""Layer scales of a live network's block 0, found by what they do.

They are drawn, each number by itself, and the network run: the one that times a branch's output is
what the branch adds to the sum is that branch's, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.live.blocks import Named, Pair, Scale
from mjp_privacy.models.live.runs import Ran
from mjp_privacy.models.vit import first_tensor, token_norm

MULTIPLIES = 1e-4  # relative error up to which a branch adds what a scale says


def find_scales(
    block: nn.Module, named: Named, run: Callable[[Sequence[nn.Module]], list[Ran]]
) -> None:
    """Tell block 0 its scales, where there are any.

    run  runs the network on a random picture, and keeps what these parts were given
    """
    width = named.attn.proj.out_features
    candidates = _candidates(block, width)
    if not candidates:
        return
    ends = (block.attn, block.mlp) if isinstance(block, Pair) else (block, block)
    with _drawn(candidates):
        seen: dict[nn.Module, Ran] = {}
        for ran in run(ends):
            if ran.part not in seen or ends[1] not in seen:  # the block's first run
                seen[ran.part] = ran
        values = [_value(scale) for scale in candidates]
    norm, out, second = (seen.get(one) for one in (named.norm2, named.attn.proj, named.mlp.fc2))
    first, last = (seen.get(end) for end in ends)
    if norm is None or out is None or second is None or first is None or last is None:
        return
    z, summed, end = (_rows(one, width) for one in (first.given, norm.given, last.output))
    added = [_rows(ran.output, width) for ran in (out, second)]
    if isinstance(block, Pair):
        end = end + _rows(last.given, width)
    choices: list[int | None] = [None, *range(len(values))]

    def scaled(choice: int | None, branch: int) -> Tensor:
        return added[branch] if choice is None else values[choice] * added[branch]

    def nearest(moved: Tensor, sums: dict[Any, Tensor]) -> Any:
        """Which of the sums the tokens were moved by; the first where it is none."""
        off = {key: float((moved - one).norm() / moved.norm()) for key, one in sums.items()}
        best = min(off, key=lambda key: off[key])
        return best if off[best] <= MULTIPLIES else next(iter(sums))

    if named.beside:
        both = product(choices, choices)
        sums = {(a, b): scaled(a, 0) + scaled(b, 1) for a, b in both}
        found = nearest(end - z, sums)
    else:
        after = getattr(named, "norm3", None)
        middle, target = summed, end
        if after is not None:  # of sums that are normalised
            middle, target = _rows(norm.output, width), _rows(seen[after].given, width)
        moves = summed - z, target - middle
        found = [
            nearest(moved, {choice: scaled(choice, branch) for choice in choices})
            for branch, moved in enumerate(moves)
        ]
    named.__dict__["scales"] = tuple(
        None if choice is None else candidates[choice] for choice in found
    )


def _candidates(block: nn.Module, width: int) -> list[Scale]:
    """The parameters of a block that are one number or a vector of this width, but for layers' and
    norms'."""
    return [
        (part, name)
        for part in block.modules()
        if not isinstance(part, nn.Linear) and token_norm(part) is None
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.numel() in (1, width)
    ]


def _value(scale: Scale) -> Tensor:
    parameter = scale[0]._parameters[scale[1]]
    assert parameter is not None
    return parameter.detach().flatten().clone()


def _rows(tokens: Any, width: int) -> Tensor:
    """The tokens (T, D) of one picture."""
    return first_tensor(tokens).reshape(-1, width)


@contextmanager
def _drawn(scales: Sequence[Scale]) -> Iterator[None]:
    """Other numbers in these parameters in this block."""
    generator = torch_generator("numbers by which layer scales are told")
    held = [part._parameters[name] for part, name in scales]
    before = [one.data for one in held if one is not None]
    parameters = [one for one in held if one is not None]
    for one in parameters:
        one.data = (0.5 + torch.rand(one.shape, generator=generator)).to(one)
    try:
        yield
    finally:
        for one, value in zip(parameters, before, strict=True):
            one.data = value
