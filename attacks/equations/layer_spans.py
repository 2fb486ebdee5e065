r"""What the weight gradients of the first blocks say of a picture: where its layers' inputs lie.

The weight gradient of a linear layer is a sum over all tokens t of all B pictures of a step,

    dL/dW = sum_t d_t h_t^T,

d_t the gradient at the layer's output, h_t its input. Its row space is the span of the h_t, T = B
(N + 1) directions of the layer's width. So a picture stands in the batch only if all inputs of all
layers lie in their spans, which a run of the network *forward* shows: no label enters, nothing is
differentiated twice, and each picture is tested by itself. For block 0's first layer this adds
nothing to the span of the patches (`equations.batch_span`). The layers after it see sums over
attention's softmax, so that a picture put together from patches of several ones does not pass.

The same check of discrete tokens: SPEAR (Dimitrov et al. 2024), DAGER (Petrov et al. 2024); as an
objective for text: TIGER (Kalikman et al. 2026, arXiv 2606.18312).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mjp_privacy.interfaces import Grads, Refusal
from mjp_privacy.models import MJPVisionTransformer

GAP = 30.0
"""Times the singular value after it that the T-th of a layer's gradient must be. Elsewhere some of
the batch's tokens do not show, as in a last block, whose class token alone has a gradient."""


def layers_of(model: MJPVisionTransformer, blocks: int) -> list[str]:
    """Names of the linear layers of the first blocks, such as blocks.0.mlp.fc1."""
    return [
        f"blocks.{number}.{name}"
        for number, block in enumerate(list(model.blocks.children())[:blocks])
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    ]


def lacks_layer_spans(model: MJPVisionTransformer, batch: int) -> Refusal | None:
    """Why the layers' inputs of so many pictures fill their whole width, or None."""
    tokens, width = model.tokens, model.embed_dim
    if batch * tokens < width:
        return None
    most = (width - 1) // tokens
    way_out = f"batches of at most {most} do" if most else "no batch of this model does"
    return Refusal(
        "underdetermined",
        f"B (N + 1) = {batch * tokens} tokens of a batch >= D = {width}: their spans leave a "
        f"layer's inputs unknown unless B (N + 1) < D; {way_out}",
    )


FOUND = 1e5
"""Times the precision of the gradients, squared, that may lie outside for a picture to count as
found: a patch that is off by one part in 10^4 leaves as much."""


@dataclass(frozen=True)
class LayerSpans:
    """Orthonormal bases of the spans of layers' inputs."""

    model: MJPVisionTransformer
    bases: Mapping[str, Tensor]  # by layer, (T, width), float64
    blocks: int

    @classmethod
    def of(
        cls, model: MJPVisionTransformer, grads: Grads, batch: int, blocks: int
    ) -> LayerSpans | None:
        """The spans in one step's gradients (*shape) of `batch` pictures; None where no layer of
        the first blocks shows all tokens."""
        tokens, bases = batch * model.tokens, {}
        for name in layers_of(model, blocks):
            if f"{name}.weight" not in grads:
                continue
            sent = grads[f"{name}.weight"].double()
            s, vh = torch.linalg.svd(sent, full_matrices=False)[1:]
            if tokens < len(s) and s[tokens - 1] > GAP * s[tokens]:
                bases[name] = vh[:tokens]
        return cls(model, bases, blocks) if bases else None

    def precise(self) -> LayerSpans:
        """The same, looked at in float64."""
        return replace(self, model=deepcopy(self.model).double())

    def off(self, pictures: Tensor) -> Tensor:
        """What share of the layers' inputs lies outside their spans, squared, the mean over layers;
        (m,) for normalised pictures (m, C, H, W)."""
        shares = []
        with inputs_of(self.model, self.bases) as seen:
            tokens = self.model.embed(pictures)
            for block in list(self.model.blocks.children())[: self.blocks]:
                tokens = block(tokens)
            for name, basis in self.bases.items():
                inputs = seen[name]
                basis = basis.to(inputs)
                rest = inputs - (inputs @ basis.mT) @ basis
                length = inputs.detach().square().sum((1, 2))
                shares.append(rest.square().sum((1, 2)) / length)
        return torch.stack(shares).mean(0)


@contextmanager
def inputs_of(model: MJPVisionTransformer, layers: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """A `with` block in which the inputs of these layers are kept, by name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """The hook that keeps the input of one layer."""

        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0]

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
