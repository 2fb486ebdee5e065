r"""What the classifier's gradient says: each picture's class and feature, and a picture with it.

A client that trains the classifier alone (linear probing) sends

    dL/dW = sum_b d_b h_b^T / B,   dL/db = sum_b d_b / B,   d_b = softmax(W h_b + b) - onehot(c_b),

with h_b the feature of picture b. Of one picture this is h itself. Of a batch it is one equation
for each class, C x D numbers for B x D unknowns: with features at hand the d_b are known, and with
the d_b the features solve a linear system. Rounds of both, then a descent, end at the features
unless a picture hardly has a part in the gradient: `features_misfit` is what they leave unexplained
(after Maui, arXiv 2509.11451). Pictures of one class are alike to the rounds, so a descent starts
from random features near those.

A feature is D numbers of a picture's p N. L-BFGS looks for a picture that has it,

    |f(x) - h|^2 / |h|^2 + prior_weight |z|^2 / pixels + mean of the squares beyond [0, 1],

in coordinates z of a Gaussian field (`attacks.prior`) in which photographs have unit variance:
expect little more of its pixels than colours. What is sure to leak is the feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from attacks.budget import image
from attacks.equations import HEAD, HEAD_BIAS
from attacks.equations.completion import field_energy
from attacks.equations.layers import client_model
from attacks.equations.patch_system import (
    black_and_white,
    gradient,
    lacks_gradients,
    lbfgs,
    least_squares,
    minimised,
    to_unit_range,
)
from mjp_privacy.client.upload import labels_of_batch
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer
from mjp_privacy.models.vit import input_of

ROUNDS = 50  # of features and class probabilities, at most
SETTLED = 1e-12  # relative change of the features from one round to the next at which to stop
REFINED, REFINEMENT = 1e-16, 500  # a misfit, squared, that is not refined; steps of a refinement
DRAWS, JITTER = 4, 0.3  # starts where classes repeat, and how far, in deviations of the features
HISTORY = 20  # steps that L-BFGS remembers


@dataclass(frozen=True)
class HeadFeatures(Usual):
    """The features of a batch, and pictures that have them.

    steps         of L-BFGS for each picture
    prior         `fitted`, `stationary`, or the path of a fitted prior
    prior_weight  of the field's energy beside the features' distance
    """

    steps: Annotated[int, Field(ge=1, le=100_000_000)] = 100
    prior: str = "fitted"
    prior_weight: Annotated[float, Field(ge=0, le=1e9)] = 1e-3
    name: ClassVar[str] = "head_features"
    traits: ClassVar[tuple[str, ...]] = ("batches", "steps", "public photographs", "patches")

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """The gradient of the classifier, weight and bias."""
        return (HEAD, HEAD_BIAS)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload does not tell its pictures' features, or None."""
        if (refusal := lacks_gradients(view, HEAD, HEAD_BIAS)) is not None:
            return refusal
        batch, classes = view.updates[0].batch, len(view.model.get_parameter(HEAD))
        if batch < classes:
            return None
        text = f"{batch} pictures and {classes} classes: features are told apart below the classes"
        return Refusal("underdetermined", text)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """A picture for every feature, and how well both fit."""
        update, model = view.updates[0], client_model(view, view.updates[0])
        weight, bias = gradient(view, update, HEAD), gradient(view, update, HEAD_BIAS)
        pictures, misfits, away = list[Tensor](), list[float](), list[float]()
        for step in range(update.steps_in_all):
            first = step * update.batch
            labels = labels_of_batch(bias[step], update.batch)
            if view.labels is not None:
                labels = view.labels[first : first + update.batch]
            features, misfit = features_of(model, weight[step], bias[step], labels, generator)
            for place, feature in enumerate(features):
                with image(first + place):
                    found, distance = self._with_feature(view, model, feature, generator)
                pictures.append(found)
                misfits.append(misfit)
                away.append(distance)
        return Reconstruction(
            to_unit_range(view, torch.stack(pictures)),
            diagnostics={
                "features_misfit": torch.tensor(misfits, dtype=torch.float64),
                "feature_distance": torch.tensor(away, dtype=torch.float64),
            },
        )

    def _with_feature(
        self,
        view: AttackerView,
        model: MJPVisionTransformer,
        feature: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, float]:
        """A normalised picture (C, H, W) with this feature (D,), and the relative distance left."""
        energy = field_energy(self.prior, model.patch_size, view.pixels).on(feature.device)
        root = torch.linalg.cholesky(torch.linalg.inv(energy.precision.permute(2, 3, 0, 1)))
        mean, like, length = energy.mean.view(-1, 1, 1), model.like, feature.square().sum()
        low, high = black_and_white(view.pixels, mean)

        def picture(z: Tensor) -> Tensor:
            """The picture of the field's coordinates (C, H, W)."""
            spectrum = torch.einsum("hwcd,dhw->chw", root, z)
            return mean + energy.down.mT @ spectrum @ energy.across

        def distance(x: Tensor) -> Tensor:
            seen = input_of(model, model.get_submodule("head"), x.unsqueeze(0).to(like))[0]
            return (seen.double() - feature).square().sum() / length

        noise = torch.randn(energy.precision.shape[1:], generator=generator)

        def value(z: Tensor) -> Tensor:
            x = picture(z)
            beyond = ((low - x).relu() + (x - high).relu()).square().mean()
            return distance(x) + self.prior_weight * z.square().mean() + beyond

        start = (0.1 * noise).to(energy.precision)
        best, _ = minimised(value, start, self.steps, HISTORY)
        with torch.no_grad():
            found = picture(best)
            return found, float(distance(found).sqrt())


def features_of(
    model: MJPVisionTransformer,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, float]:
    """The features (B, D), float64, of pictures of these classes (B,) from one step's gradients
    (C, D) and (C,) of the classifier, and what part of the gradients they leave unexplained."""
    own, offset = (model.get_parameter(name).detach().double() for name in (HEAD, HEAD_BIAS))
    batch = len(labels)
    onehot = nn.functional.one_hot(labels.to(bias.device), len(bias)).double()
    likely = (bias * batch + onehot.sum(0)).clamp_min(0).expand(batch, -1) / batch
    features, before = weight.new_zeros(batch, weight.shape[1]), float("inf")
    for _ in range(ROUNDS):
        to_logits = likely - onehot  # (B, C)
        solved = least_squares(to_logits, batch * weight)
        moved = float((solved - features).norm() / solved.norm().clamp_min(1e-300))
        features = solved
        likely = (features @ own.mT + offset).softmax(-1)
        if batch == 1 or moved < SETTLED or moved >= 2 * before:
            break
        before = moved

    def misfit(features: Tensor) -> Tensor:
        """What the features leave unexplained of both gradients, squared, relative to them."""
        to_logits = (features @ own.mT + offset).softmax(-1) - onehot
        left = (to_logits.mT @ features / batch - weight).square().sum() / weight.square().sum()
        return left + (to_logits.mean(0) - bias).square().sum() / bias.square().sum()

    if batch > 1 and float(misfit(features)) > REFINED:
        starts = [features]
        if len(labels.unique()) < batch:  # equal features of one class would remain equal
            noise = torch.randn(DRAWS, *features.shape, generator=generator, dtype=torch.float64)
            starts = [*(features + JITTER * features.std() * noise.to(features))]

        def descended(start: Tensor) -> Tensor:
            """The local minimum near a start."""
            point = start.clone(memory_format=torch.contiguous_format).requires_grad_()
            optimizer = lbfgs(point, REFINEMENT, HISTORY)

            def closure() -> Tensor:
                optimizer.zero_grad()
                value = misfit(point)
                value.backward()
                return value.detach()

            with torch.enable_grad():
                optimizer.step(closure)
            return point.detach()

        features = min(map(descended, starts), key=misfit)
    return features, float(misfit(features).sqrt())
