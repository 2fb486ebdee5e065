"""Block 0 of a live network under timm's names, whatever its own layers are called.

Its layers are found by the order in which they run, an attention's queries, keys and values by what
they compute, its layer scales by what they multiply.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor, nn

from mjp_privacy.core.machine import torch_generator
from mjp_privacy.models.network_parts import Ran
from mjp_privacy.models.vit import ACTIVATION_LAYERS, first_tensor, token_norm

FIRST, GATED = "fc1", ("fc1_g", "fc1_x")
"""timm's names of a two-layer network's first layer, and of two whose outputs gate each other."""
QUERIES = 4  # of the tokens by whose sums an attention is told
SAME_SUMS = 1e-4  # relative error up to which an attention computes what was seen


def queries_keys_values(attention: Any) -> Any:
    """The layer of an attention's queries, keys and values, or its own layers as that; None where
    they, or the number of heads, are not known."""
    layer = getattr(attention, "joined", getattr(attention, "qkv", None))
    is_told = isinstance(layer, nn.Linear | JoinedLayers) and hasattr(attention, "num_heads")
    return layer if is_told else None


# block 0 under timm's names -----------------------------------------------------------------------


Scale = tuple[nn.Module, str]
"""A parameter that multiplies what a branch adds, by the part that holds it and its name there."""


class Named(nn.Module):
    """A part of a network with some of the layers inside it under these names and whatever else it
    holds under its own. It never runs: its hooks are the part's."""

    scales: tuple[Scale | None, Scale | None] = (None, None)
    """Of a block's attention and of its two-layer network (`find_scales`)."""

    def __init__(self, part: nn.Module, **layers: nn.Module) -> None:
        super().__init__()
        self.__dict__["part"] = part
        self._parameters, self._buffers = part._parameters, part._buffers
        self._modules.update(layers)
        named = {id(module) for layer in layers.values() for module in layer.modules()}
        for name, child in part.named_children():
            if named.isdisjoint(id(module) for module in child.modules()):
                self._modules.setdefault(name, child)

    def __getattr__(self, name: str) -> Any:
        """What timm does not name is the part's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["part"], name)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        return self.part.register_forward_pre_hook(hook, **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        return self.part.register_forward_hook(hook, **options)


class Pair(nn.Module):
    """A block that is no module of its own: attention and the two-layer network, beside each of
    which the sum goes on."""

    def __init__(self, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp = attn, mlp

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        return self.attn.register_forward_pre_hook(hook, **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        def ended(mlp: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            hook(mlp, given, given[0] + output)

        return self.mlp.register_forward_hook(ended, **options)


def named_block(block: nn.Module, run: list[Ran]) -> Named | None:
    """Block 0 with the layers behind its attention under timm's names, where they run as timm's do:
    a linear layer, a norm, and two linear layers, of which the first may be two that gate each
    other (`fc1_g` and `fc1_x`), each branch perhaps scaled. A norm behind them is `norm3`: that of
    a block that normalises sums, as torch's do where nothing else is said; its attention is given
    block 0's input itself. `beside` says that the two layers are given it, too, and not the sum
    with attention's.
    """
    names = {part: name for name, part in block.named_modules()}
    end = next((at for at, ran in enumerate(run) if ran.part is block), len(run))
    run = run[:end]  # it may be run again
    seen = {ran.part: ran for ran in run}
    inside = [seen[ran.part] for ran in run if ran.part in names]
    layers = [at for at, ran in enumerate(inside) if isinstance(ran.part, nn.Linear)]
    norms = [at for at, ran in enumerate(inside) if token_norm(ran.part)]
    gated = len(layers) > 3 and inside[layers[-3]].given is inside[layers[-2]].given
    firsts = layers[-3 if gated else -2 : -1]
    earlier = [at for at in layers if firsts and at < firsts[0]]
    between = [inside[at] for at in norms if earlier and earlier[-1] < at < firsts[0]]
    if not between and earlier:  # attention's own norm may be that of the two layers beside it
        between = [inside[at] for at in norms if inside[at].output is inside[firsts[0]].given]
    if len(between) != 1:
        return None
    norm, out = between[0], inside[earlier[-1]]
    if out.part.out_features != norm.given.shape[-1]:
        return None  # of a part of the tokens, as an attention's head
    last = [inside[at].part for at in norms if at > layers[-1]]
    first_norm = [inside[at].part for at in norms if at < layers[0]]

    def holder(part: nn.Module) -> nn.Module:
        return block.get_submodule(names[part].rpartition(".")[0])

    called = [inside[at] for at in (*firsts, layers[-1])]
    called_parts = [ran.part for ran in called]
    mlp = holder(called_parts[0])
    is_one = all(layer in [*mlp.children()] for layer in called_parts[1:])
    if not is_one or norm.part in mlp.modules() or mlp not in seen:
        ran_between = [ran.part for ran in inside[firsts[0] + 1 : layers[-1]]]
        middle = _middle([part for part in ran_between if part not in called_parts], called)
        mlp = Inline(called_parts[:-1], middle, called_parts[-1])
    attn = Named(holder(out.part) if "." in names[out.part] else nn.Module(), proj=out.part)
    known = isinstance(getattr(attn, "qkv", None), nn.Linear) and hasattr(attn, "num_heads")
    ways = (_order_of,) if known else (_order_of, _order_by_values)
    attn.__dict__.update(_queries_keys_values([inside[at] for at in earlier[:-1]], out.given, ways))
    timms = (*(GATED if gated else (FIRST,)), "fc2")
    named = Named(
        block,
        attn=attn,
        mlp=Named(mlp, **dict(zip(timms, called_parts, strict=True))),
        norm1=first_norm[0] if first_norm else nn.Identity(),
        **({"norm3": last[0]} if last else {}),
        **({"norm2": norm.part} if norm.part not in first_norm else {}),
    )
    named.__dict__.setdefault("norm2", norm.part)
    named.__dict__["beside"] = bool(first_norm) and norm.given is seen[first_norm[0]].given
    return named


class Inline(nn.Module):
    """A two-layer network whose parts their block itself calls."""

    def __init__(self, firsts: list[nn.Module], middle: list[nn.Module], second: nn.Module) -> None:
        super().__init__()
        self.firsts, self.middle = nn.ModuleList(firsts), nn.Sequential(*middle)
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([layer(x) for layer in self.firsts], -1)
        out: Tensor = self.second(self.middle(hidden))
        return out


class Gate(nn.Module):
    """One half of what it is given times an activation of the other half."""

    def __init__(self, activation: nn.Module, *, of_first: bool) -> None:
        super().__init__()
        self.activation, self.of_first = activation, of_first

    def forward(self, hidden: Tensor) -> Tensor:
        one, other = hidden.chunk(2, -1)
        if self.of_first:
            one, other = other, one
        gated: Tensor = one * self.activation(other)
        return gated


@dataclass(frozen=True)
class JoinedLayers:
    """An attention's layers of queries, keys and values as timm's one of all three. The layers
    stand in the network under their own names."""

    layers: tuple[nn.Module, ...]
    order: Tensor  # (3 D,) of timm's outputs among theirs
    factors: Tensor  # (3 D,) of those outputs, where the attention is scaled otherwise than timm's

    def __call__(self, y: Tensor) -> Tensor:
        split = torch.cat([layer(y) for layer in self.layers], -1)
        return split[..., self.order] * self.factors.to(y)


Told = tuple[Tensor, int, tuple[float, float, float]]
"""Which numbers (3 D,) of all outputs are queries, keys and values, the number of heads, and what
each of the three is multiplied by."""


def _queries_keys_values(
    before: list[Ran], attended: Tensor, ways: Sequence[Callable[..., Told | None]]
) -> dict[str, Any]:
    """`joined` layers and `num_heads` of the attention that computes what its last layer was given,
    of one to three of the linear layers that ran before that one; nothing where none of their
    orders does. Where values alone are told, tokens count as if all looked at all others alike."""
    width = attended.shape[-1]
    attended = attended.reshape(-1, width)
    for tells in ways:
        for count in (1, 2, 3):
            group = before[-count:]
            kinds = [ran.output.numel() / attended.numel() for ran in group]  # 1 of the values
            if len(group) < count or sum(kinds) != 3 or not all(map(float.is_integer, kinds)):
                continue
            if tells is _order_of and any(ran.given is not group[0].given for ran in group):
                continue
            split = torch.cat([ran.output.reshape(len(attended), -1) for ran in group], -1)
            if (found := tells(split, attended, [*map(int, kinds)])) is not None:
                order, heads, factors = found
                each = torch.tensor(factors, dtype=torch.float64).repeat_interleave(width)
                joined = JoinedLayers(tuple(ran.part for ran in group), order, each)
                return {"joined": joined, "num_heads": heads}
    return {}


def _orders(width: int, kinds: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The number of heads, and an order (3, D) in which the outputs of layers, of so many kinds of
    numbers each, may hold three kinds."""
    of_layers = torch.arange(3 * width).split([width * count for count in kinds])
    for heads in (h for h in range(1, width // 2 + 1) if width % h == 0):
        yield heads, torch.arange(3 * width).view(3, width)
        if max(kinds) > 1:
            by_heads = [of.view(heads, -1, width // heads).transpose(0, 1) for of in of_layers]
            yield heads, torch.cat(by_heads).reshape(3, width)
            each = [of.view(heads, width // heads, -1).permute(2, 0, 1) for of in of_layers]
            yield heads, torch.cat(each).reshape(3, width)


def _order_of(split: Tensor, attended: Tensor, kinds: Sequence[int]) -> Told | None:
    """The order of outputs (T, 3 D) whose attention comes nearest to what was seen (T, D), with the
    usual scale of the products of queries and keys or others; None where none computes it."""
    found: Told | None = None
    width = attended.shape[-1]
    least = SAME_SUMS * float(attended[:QUERIES].norm())
    if torch.allclose(split, split[:1]):  # tokens that are all alike tell nothing
        return None
    for scale, share in ((None, 1.0), (width**-0.5, 1.0), (1.0, 1.0), (1.0, width**-0.5)):
        for heads, order in _orders(width, kinds):
            usual = (width // heads) ** -0.5
            for turn in itertools.permutations(range(3)):
                taken = order[list(turn)].flatten()
                q, k, v = split[:, taken].unflatten(1, (3, heads, -1)).movedim(0, 2)
                weights = (q[:, :QUERIES] @ k.mT * (scale or usual)).softmax(-1)
                sums = share * (weights @ v).transpose(0, 1).flatten(1)
                if (off := float((sums - attended[:QUERIES]).norm())) < least:
                    least, found = off, (taken, heads, ((scale or usual) / usual, 1.0, share))
        if found is not None:
            break
    return found


def _order_by_values(split: Tensor, attended: Tensor, kinds: Sequence[int]) -> Told | None:
    """The order in which values alone are told: what an attention adds up lies among them, head by
    head, however it looks at them."""
    split, attended = split.double(), attended.double()
    for heads, order in _orders(attended.shape[-1], kinds):
        sums = attended[:QUERIES].unflatten(1, (heads, -1)).transpose(0, 1)
        least = SAME_SUMS * float(sums.norm(dim=-1).max())
        rights = torch.cat((sums, sums.new_ones(*sums.shape[:2], 1)), 2).numpy()
        for kind in (2, 1, 0):
            values = split[:, order[kind]].unflatten(1, (heads, -1)).transpose(0, 1)
            lefts = torch.cat((values, values.new_ones(*values.shape[:2], 1)), 2).mT.numpy()
            try:
                lie_inside = all(
                    scipy.optimize.nnls(left, one, maxiter=10_000)[1] <= least
                    for left, of_head in zip(lefts, rights, strict=True)
                    for one in of_head
                )
            except (RuntimeError, ValueError):  # it did not converge, or met no number
                continue
            if lie_inside:
                others = [place for place in range(3) if place != kind]
                return order[[*others, kind]].flatten(), heads, (0.0, 1.0, 1.0)
    return None


def _middle(between: list[nn.Module], called: list[Ran]) -> list[nn.Module]:
    """What stands between the first layers of a network and its last that their block itself calls:
    the parts that ran there or, where an activation among them is no module, the one that computes
    the same, or gates one half by the other."""
    *firsts, second = called
    given, output = torch.cat([ran.output for ran in firsts], -1), second.given
    ran = [part for part in between if not [*part.children()]]
    activations: list[nn.Module] = [*(make() for make in ACTIVATION_LAYERS.values()), nn.SiLU()]
    halves = itertools.product([*ran, *activations, nn.Sigmoid(), nn.Identity()], (True, False))
    gates = [Gate(one, of_first=of_first) for one, of_first in halves]
    for middle in [ran, *([one] for one in (*activations, *gates))]:
        try:
            with torch.no_grad():
                got = nn.Sequential(*middle)(given)
        except Exception:  # parts that were given something else
            continue
        if got.shape == output.shape and torch.allclose(got, output, atol=1e-6):
            return middle
    return ran


# layer scales -------------------------------------------------------------------------------------

MULTIPLIES = 1e-2  # relative error up to which a branch's outputs are multiplied by a scale


def find_scales(block: nn.Module, named: Named, run: Callable[..., list[Ran]]) -> None:
    """Tell block 0 its scales, where there are any.

    They are drawn, each number by itself, and the network run: the one that times a branch's output
    is what the branch adds to the sum is that branch's, whatever it is called.

    run  runs the network on a random picture, and keeps what these parts were given
    """
    width = named.attn.proj.out_features
    candidates = [
        (part, name)
        for part in block.modules()
        if not isinstance(part, nn.Linear) and token_norm(part) is None
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.numel() in (1, width)
    ]
    if not candidates:
        return
    ends = (block.attn, block.mlp) if isinstance(block, Pair) else (block, block)
    held: list[Any] = [part._parameters[name] for part, name in candidates]
    before = [parameter.data for parameter in held]
    generator = torch_generator("numbers by which layer scales are told")
    for parameter in held:
        drawn = 0.5 + torch.rand(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter)
    try:
        seen: dict[nn.Module, Ran] = {}
        for ran in run(*ends):
            if ran.part not in seen or ends[1] not in seen:  # the block's first run
                seen[ran.part] = ran
        values = [parameter.detach().flatten().clone() for parameter in held]
    finally:
        for parameter, value in zip(held, before, strict=True):
            parameter.data = value
    norm, out, second = (seen.get(one) for one in (named.norm2, named.attn.proj, named.mlp.fc2))
    first, last = (seen.get(end) for end in ends)
    if norm is None or out is None or second is None or first is None or last is None:
        return
    z, summed, end = (_rows(one, width) for one in (first.given, norm.given, last.output))
    attended, widened = (_rows(ran.output, width) for ran in (out, second))
    if isinstance(block, Pair):
        end = end + _rows(last.given, width)
    middle, target = summed, end
    if (after := getattr(named, "norm3", None)) is not None:  # of sums that are normalised
        middle, target = _rows(norm.output, width), _rows(seen[after].given, width)
    factors = [*_factors(summed - z, attended), *_factors(target - middle, widened)]
    if named.beside:
        factors = [*_factors(end - z, attended, widened)]
    nothing: tuple[Scale | None, Tensor] = (None, torch.ones(1))
    choices = [nothing, *zip(candidates, values, strict=True)]

    def nearest(factor: Tensor) -> Scale | None:
        off, which = min((float((factor - one).norm()), at) for at, (_, one) in enumerate(choices))
        return choices[which][0] if off <= MULTIPLIES * float(factor.norm()) else None

    named.__dict__["scales"] = tuple(map(nearest, factors))


def _factors(moved: Tensor, *added: Tensor) -> Tensor:
    """By what each branch's outputs (T, D) are multiplied, (branches, D), where their sum is what
    tokens were moved by."""
    outputs = torch.stack(added, -1).transpose(0, 1).double()
    return torch.linalg.lstsq(outputs, moved.mT.double().unsqueeze(-1)).solution.squeeze(-1).mT


def _rows(tokens: Any, width: int) -> Tensor:
    """The tokens (T, D) of one picture."""
    return first_tensor(tokens).reshape(-1, width)
