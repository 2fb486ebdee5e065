"""The FedSGD client: the gradient of each step, of the parameters that are asked for.

Gradients are computed in the model's own precision, which is part of every result, or as
`client.autocast` computes them. Linear layers are left to torch's default library: with oneDNN the
gradient is 1.6 times faster on AMD processors, but rounds by up to a third more, and APRIL in
float32 then loses .2 to 1.3 dB. An attack that looks weaker is no gain in speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches

STEPS_AT_ONCE = 20  # independent steps differentiated together under vmap; bounds the memory
TOKENS_AT_ONCE, TOKENS_ELSEWHERE = 1024, 4096
"""Tokens of all images that pass through the network together, on a CPU and elsewhere. What a layer
of 1024 keeps stays in a processor's cache, and below the size from which every tensor gets fresh
pages of the system. The numbers are fixed and do not follow the free memory, so that the same bits
come every time."""


HALF: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The half precision of each kind of autocast."""
FIRST_SCALE, LAST_SCALE = 2.0**16, 2.0**-16
"""Loss scales of fp16: what GradScaler starts with, and below which no gradient is left."""


class Objective(nn.Module):
    """The client's loss: cross-entropy on the hard label, plus lambda * L_DAL if asked.

    A model without a localization regressor has no L_DAL, and its rows say `dal: false`.
    """

    def __init__(self, model: LoadedModel, config: ClientConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, images: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Images (B, C, H, W) in [0, 1]; the mean loss of one step."""
        logits = self.model(self.model.normalize(images), mask)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.config.dal and self.model.dal_regressor is not None:
            loss = loss + self.config.dal_lambda * self.model.dal_loss(mask)
        return loss


@dataclass(frozen=True)
class FedSGDClient:
    """Computes the gradient of one step on `batch` images, for many independent steps at once.

    `FedSGDClient(model, ClientConfig(batch=2)).gradients(inputs)` has a gradient for every two
    images. Precision and device are the model's.
    """

    model: LoadedModel
    config: ClientConfig = field(default_factory=ClientConfig)

    def described(self, values: Mapping[str, Tensor], **further: Any) -> ClientUpdate:
        """An upload of these values, with what the recipe says of it and further fields."""
        stated = self.config.stated
        if not self.localizes:
            stated["dal_lambda"] = 0.0
        return ClientUpdate(values, dtype=self.model.like.dtype, **stated, **further)

    @property
    def localizes(self) -> bool:
        return self.config.dal and self.model.dal_regressor is not None

    def gradients(
        self, inputs: ClientInput, *, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Gradients by parameter name, (n, *parameter.shape): one for each step."""
        wanted = self.wanted(names)
        steps = self.steps(inputs)
        plain = not self.localizes and self.config.autocast == "none"
        in_one_pass = plain and self.model.family in ("vit", "timm")
        with self.differentiating():
            if in_one_pass and all(is_simple(self.model, name) for name in wanted):
                return self._per_image(wanted, steps)
            shared = {name: self.model.get_parameter(name).detach() for name in wanted}
            return self.step_gradients(shared, steps, own_weights=False)

    def mean_gradient(self, inputs: ClientInput) -> dict[str, Tensor]:
        """The gradient of the mean loss of all steps, for every parameter that is not withheld.

        Gradients of single steps are never kept, so it takes the memory of one gradient.
        """
        parameters = {name: self.model.get_parameter(name) for name in self.wanted(None)}
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        objective, steps = Objective(self.model, self.config), self.steps(inputs)
        alone = self.config.autocast != "none"  # each client rounds its own gradient
        at_once, number = 1 if alone else STEPS_AT_ONCE, len(steps[0])
        with self.differentiating():
            for chunk in zip(*(step.split(at_once) for step in steps), strict=True):
                if alone:
                    own = self.step_gradients(weights, chunk, own_weights=False)
                    parts = {name: gradient[0] / number for name, gradient in own.items()}
                else:
                    images, labels, mask = (*(tensor.flatten(0, 1) for tensor in chunk), None)[:3]
                    loss = objective(images, labels, mask) * len(chunk[0]) / number
                    parts = _gradients(loss, parameters)
                for name, part in parts.items():
                    totals[name] += part
        return totals

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """A `with` block for gradients: the model is in the client's mode, and attention uses one
        kernel, the plain mathematical one: it repeats its bits, works in both precisions and can
        be differentiated twice."""
        was_training = self.model.training
        self.model.train(self.config.mode == "train")
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            self.model.train(was_training)

    def _per_image(self, names: Sequence[str], steps: Sequence[Tensor]) -> dict[str, Tensor]:
        """One batched backward pass; a step's gradient is the mean of its images' gradients."""
        batch, parts = self.config.batch, {name: list[Tensor]() for name in names}
        together = max(1, images_at_once(self.model) // batch)
        for chunk in zip(*(step.split(together) for step in steps), strict=True):
            images, labels, mask = (*(tensor.flatten(0, 1) for tensor in chunk), None)[:3]
            x = self.model.normalize(images)
            for name, grads in per_image_gradients(self.model, x, labels, mask, names).items():
                parts[name].append(grads.unflatten(0, (-1, batch)).mean(1))
        return {name: torch.cat(chunks) for name, chunks in parts.items()}

    def step_gradients(
        self, weights: Mapping[str, Tensor], steps: Sequence[Tensor], *, own_weights: bool
    ) -> dict[str, Tensor]:
        """The gradient of each step at these weights, (n, *shape), for any parameter and any loss:
        whole steps are differentiated under vmap, which on a CPU is slower than `_per_image`.

        Parameters that are not given are the model's. own_weights: the weights have a leading
        axis n, one entry for each step; otherwise all steps share them.
        """
        objective = Objective(self.model, self.config)
        free = {f"model.{name}": weight for name, weight in weights.items()}
        fixed = {name: p.detach() for name, p in objective.named_parameters() if name not in free}

        def loss(free: dict[str, Tensor], *step: Tensor) -> Tensor:
            images, labels, mask = (*step, None) if len(step) == 2 else step
            return functional_call(objective, {**fixed, **free}, (images, labels, mask))

        if self.config.autocast != "none":
            return self._by_autocast(loss, weights, steps, own_weights)
        in_dims = (0 if own_weights else None, *[0] * len(steps))
        per_step: Callable[..., dict[str, Tensor]] = vmap(
            grad(loss), in_dims, chunk_size=STEPS_AT_ONCE, randomness="different"
        )
        gradients = per_step(free, *steps)
        return {name: gradients[f"model.{name}"].detach() for name in weights}

    def _by_autocast(
        self,
        loss: Callable[..., Tensor],
        weights: Mapping[str, Tensor],
        steps: Sequence[Tensor],
        own_weights: bool,
    ) -> dict[str, Tensor]:
        """Gradients (n, *shape) of a `loss` of weights and a step, one step after the other.

        With fp16 they come by the largest loss scale with which the gradients of all weights that
        are trained are finite, and are divided by it.
        """
        kind = self.config.autocast
        trained = {name: self.model.get_parameter(name) for name in self.wanted(None)}
        prefixed = {f"model.{name}": weight for name, weight in {**trained, **weights}.items()}
        names = [f"model.{name}" for name in weights]
        gradients = []
        for place, step in enumerate(zip(*steps, strict=True)):
            own = {n: prefixed[n][place] for n in names} if own_weights else {}
            leaves = {n: w.detach().requires_grad_() for n, w in {**prefixed, **own}.items()}
            with torch.autocast(self.model.like.device.type, HALF[kind]):
                value = loss(leaves, *step)
            if kind == "bf16":
                gradients.append(_gradients(value, {name: leaves[name] for name in names}))
                continue
            scale = FIRST_SCALE
            while True:
                found = _gradients(value * scale, leaves, again=True)
                if all(bool(g.isfinite().all()) for g in found.values()):
                    break
                scale /= 2
                if scale < LAST_SCALE:
                    raise UserError(
                        "client.autocast: expected a step whose gradients fit into half precision, "
                        "got infinite or undefined ones with every loss scale, since numbers of "
                        "fp16 end at 65504. Set autocast: bf16, or none."
                    )
            gradients.append({name: found[name] / scale for name in names})
        return {name: torch.stack([g[f"model.{name}"] for g in gradients]) for name in weights}

    def wanted(self, names: Sequence[str] | None) -> list[str]:
        """The parameters asked for (None: all), without those that are withheld or, where low-rank
        adapters or the classifier alone are trained, frozen."""
        existing = [name for name, p in self.model.named_parameters() if p.is_floating_point()]
        withheld = self.config.withheld
        # A grid may withhold a table that only some of its models have.
        for name in (*(names or ()), *(name for name in withheld if name not in TABLES)):
            if name not in existing:
                hint = did_you_mean(name, existing, " See model.named_parameters().")
                raise UserError(
                    f"The model has no parameter {name!r}, so no gradient of it exists.{hint}"
                )
        adapters = self.config.adapters
        sent = [name for name in (existing if names is None else names) if name not in withheld]
        if self.config.train == "head":
            sent = [name for name in sent if name.startswith("head")]
        return sent if adapters is None else [name for name in sent if adapters.trains(name)]

    def steps(self, inputs: ClientInput) -> list[Tensor]:
        """The input split into n steps: images (n, B, C, H, W), labels (n, B) and, where there is
        one, the mask (n, B, N)."""
        like, batch = self.model.like, self.config.batch
        if len(inputs.image_ids) % batch:
            raise UserError(
                f"{len(inputs.image_ids)} images do not fill steps of {batch}: expected a "
                f"multiple of {batch}. Give that many, or set client.batch: 1."
            )
        tensors = [inputs.images.to(like.dtype), inputs.labels]
        if inputs.mask is not None:
            tensors.append(inputs.mask)
        return [tensor.to(like.device).unflatten(0, (-1, batch)) for tensor in tensors]


def images_at_once(model: LoadedModel) -> int:
    """How many images pass through the network together: by the model's tokens and the kind of
    device alone, so that equal inputs give equal bits on every day."""
    tokens = TOKENS_AT_ONCE if model.like.device.type == "cpu" else TOKENS_ELSEWHERE
    return max(1, tokens // model.tokens)


@torch.no_grad()
def predict(model: LoadedModel, images: Tensor, mask: Tensor | None) -> Tensor:
    """Predicted classes (m,) of images (m, C, H, W) in [0, 1], on the CPU."""
    like, together = model.like, images_at_once(model)
    masks = None if mask is None else mask.to(like.device)
    classes = []
    for first in range(0, len(images) or 1, together):
        own = slice(first, first + together)
        x = model.normalize(images[own].to(like))
        classes.append(model(x, None if masks is None else masks[own]).argmax(-1).cpu())
    return torch.cat(classes)


TABLES = ("pos_embed", "unk_embed", "cls_token", "index_embed")


def is_simple(model: LoadedModel, name: str) -> bool:
    """Whether `per_image_gradients` can compute this parameter's gradient."""
    if name in TABLES:
        return True
    if name.startswith("dal_regressor."):  # the logits do not depend on it
        return False
    owner = model.get_submodule(name.rpartition(".")[0])
    if model.family != "vit":  # what calls its other layers, and with what, is timm's own affair
        # one of `live.parts.FlattenedPatches` is given patches, and no pictures
        return owner is model.patch_embed.proj and type(owner) is nn.Conv2d
    return isinstance(owner, nn.Linear) or owner is model.patch_embed.proj


def per_image_gradients(
    model: LoadedModel, x: Tensor, labels: Tensor, mask: Tensor | None, names: Sequence[str]
) -> dict[str, Tensor]:
    """Cross-entropy gradients by name, (m, *parameter.shape), of parameters that are `is_simple`.

    x (m, C, H, W) normalised, labels (m,), mask (m, N) or None.
    """
    if not names:
        return {}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    leaves = {
        name: parameters[name].expand(len(x), *parameters[name].shape[1:]).clone().requires_grad_()
        for name in names
        if name in TABLES
    }
    owners = {name: name.rpartition(".")[0] for name in names if name not in TABLES}
    taps = {owner: _Tap(model.get_submodule(owner)) for owner in dict.fromkeys(owners.values())}
    try:
        logits = functional_call(model, {**parameters, **leaves}, (x, mask))
    finally:
        for tap in taps.values():
            tap.handle.remove()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    wanted = [*leaves.values(), *(tap.output for tap in taps.values())]
    raw = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, raw, strict=True)]
    # A leaf has the image axis where its parameter has a first axis of length 1.
    grads = {name: grad.unsqueeze(1) for name, grad in zip(leaves, filled, strict=False)}
    of_outputs = dict(zip(taps, filled[len(leaves) :], strict=True))
    for name, owner in owners.items():
        grads[name] = taps[owner].gradient(of_outputs[owner], name.endswith(".bias"))
    return {name: grads[name] for name in names}


class _Tap:
    """Keeps what went into a linear layer or the patch convolution, and what came out."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.handle = layer.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Tensor
    ) -> Tensor:
        self.input = next(iter((*inputs, *named.values()))).detach()
        self.output = output if output.requires_grad else output.requires_grad_()
        # what follows may write into it, which nobody may do with a leaf
        return self.output.clone() if self.output.is_leaf else self.output

    def gradient(self, of_output: Tensor, bias: bool) -> Tensor:
        """Per-image gradient of the weight or the bias, from the gradient of the output."""
        entered = self.input
        if isinstance(self.layer, nn.Conv2d):  # the patch embedding: one output for each patch
            entered = to_patches(entered, self.layer.kernel_size[0])
            of_output = of_output.flatten(2).mT
        if entered.ndim == 2:  # the head sees one vector for each image
            entered, of_output = entered.unsqueeze(1), of_output.unsqueeze(1)
        if bias:
            return of_output.sum(1)
        return (of_output.mT @ entered).unflatten(2, self.layer.get_parameter("weight").shape[1:])


def _gradients(
    value: Tensor, leaves: Mapping[str, Tensor], again: bool = False
) -> dict[str, Tensor]:
    """Gradients by name; zero for a leaf that the value does not depend on. again: the value is
    differentiated once more afterwards."""
    computed = torch.autograd.grad(
        value, list(leaves.values()), retain_graph=again, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, computed, strict=True))
