"""Diagnostics that stand beside the scores of a cell: bounds, the puzzle, regions, the residual.

Each function returns {name: (m,)}. A value is NaN if it does not apply to an image; NaN is not
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attacks.controls import mean_image, oracle_inverse
from attacks.equations import HEAD, TABLE, UNKNOWN
from attacks.equations import PATCH as RESIDUAL_OVER
from attacks.equations.layers import inputs_of
from attacks.equations.patch_system import (
    gradient,
    lacks_gradients,
    lacks_positions,
    least_squares,
    located,
    patch_rows,
    per_image,
    table_rounding,
)
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.experiment.source import Observation
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Reconstruction
from mjp_privacy.metrics.matching import (
    cheapest,
    direct_accuracy,
    matched_patches,
    neighbour_accuracy,
    rearranged,
)
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import Grid, shuffle_patches, to_patches

FAR = 10.0
"""How many times the rounding of weights every visible row must be. The rows of a trained ViT's
table differ by less from one to the next larger one (2.5 times at most on `cifar_vit`)."""


def diagnose(
    seen: Observation,
    reconstruction: Reconstruction,
    images: Tensor,
    limits: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """All diagnostics but those that the attack itself returned and those that need no truth.

    images  (m, C, H, W), the reconstructed images as they are stored
    limits  what `bounds` returned
    """
    inputs, client = seen.inputs, seen.cell.client
    augments = client.augment != "none"  # before the shuffle: then the photograph is another
    return {
        **limits,
        **puzzle(inputs),
        **unshuffled_uploads(seen.view, seen.cell.gamma),
        **mask_agreement(reconstruction.mask, inputs),
        **regions(seen.view, images, inputs, seen.target),
        **jigsaw(reconstruction, images, inputs, seen.plain, seen.view),
        **({"original_psnr": psnr(images, seen.photographs)} if augments else {}),
    }


def bounds(seen: Observation, model: LoadedModel) -> dict[str, Tensor]:
    """PSNR of the ceiling and of the floor. No attack enters them.

    The ceiling is the oracle inverse against the image the client fed: that image, sent through the
    patch embedding W and its pseudo-inverse, so that only the rank of W limits it. In setting c an
    attack reaches it only by putting the patches back in order; the same oracle, in the order that
    was fed, is given too. A network that is no plain ViT has no such ceiling.
    """
    inputs, target = seen.inputs, seen.target
    floor = {"grey_psnr": psnr(torch.full_like(target, 0.5), target)}
    if model.family != "vit":
        return floor
    best = oracle_inverse(model, inputs.images.to(model.like.device)).cpu()
    limits = {"ceiling_psnr": psnr(best, inputs.images), **floor}
    return limits | (
        {"oracle_in_place_psnr": psnr(best, target)} if seen.cell.setting == "c" else {}
    )


def puzzle(inputs: ClientInput) -> dict[str, Tensor]:
    """How much of each image was really shuffled; nothing if the client never shuffles."""
    if inputs.mask is None or inputs.permutation is None:
        return {}
    count = inputs.mask.sum(-1)
    unmoved = torch.arange(inputs.permutation.shape[-1])
    return {
        "shuffled_patches": count,
        "moved_patches": (inputs.permutation != unmoved).sum(-1),
        "empty_mask": (count == 0).double(),
    }


def mask_agreement(named: Tensor | None, inputs: ClientInput) -> dict[str, Tensor]:
    """Precision and recall of the positions that the attack named as shuffled.

    named: the attack's mask, or None. Both are 1 if nothing was shuffled and nothing was named.
    """
    if named is None:
        return {}
    named = named.cpu()
    true = torch.zeros_like(named) if inputs.mask is None else inputs.mask
    hits = (named & true).sum(-1).double()
    nothing = ~(named | true).any(-1)
    return {
        "mask_precision": torch.where(nothing, 1.0, hits / named.sum(-1)),
        "mask_recall": torch.where(nothing, 1.0, hits / true.sum(-1)),
    }


def regions(
    view: AttackerView, images: Tensor, inputs: ClientInput, target: Tensor
) -> dict[str, Tensor]:
    """PSNR over the visible patches (not shuffled) and over the masked ones (shuffled), and the
    PSNR of the public mean image over the visible ones. NaN for images without both kinds."""
    if inputs.mask is None:
        return {}
    size = view.model.patch_size
    visible = ~inputs.mask
    mean = mean_image(view).to(target).expand_as(target)
    psnrs = {
        "visible_psnr": _region_psnr(images, target, visible, size),
        "masked_psnr": _region_psnr(images, target, inputs.mask, size),
        "mean_visible_psnr": _region_psnr(mean, target, visible, size),
    }
    both = visible.any(-1) & inputs.mask.any(-1)
    return {name: values.where(both, torch.nan) for name, values in psnrs.items()}


def _region_psnr(images: Tensor, target: Tensor, region: Tensor, patch_size: int) -> Tensor:
    """(m,) dB over the patches where `region` (m, N) is true."""
    error = to_patches(images.double() - target.double(), patch_size).square().mean(-1)
    return -10 * ((error * region).sum(-1) / region.sum(-1)).log10()


def jigsaw(
    reconstruction: Reconstruction,
    images: Tensor,
    inputs: ClientInput,
    plain: Tensor,
    view: AttackerView,
) -> dict[str, Tensor]:
    """How well an attack that estimates the permutation put the masked patches back.

    `oracle_permutation_psnr` is the PSNR against the plain image that the same patches have in the
    best order.
    """
    if reconstruction.permutation is None or inputs.mask is None or inputs.permutation is None:
        return {}
    size = view.model.patch_size
    if view.against == "input":  # patches are where they were fed: move them as the attack says
        images = shuffle_patches(images, reconstruction.permutation.cpu().argsort(-1), size)
    images = images.nan_to_num(0.5)
    placed = matched_patches(images, plain, inputs.mask, size)
    best = psnr(rearranged(images, placed, size), plain)
    return {
        "jigsaw_direct": direct_accuracy(placed, inputs.mask),
        "jigsaw_neighbour": neighbour_accuracy(placed, inputs.mask, Grid.in_pictures(images, size)),
        "oracle_permutation_psnr": best.where(inputs.mask.any(-1), torch.nan),
    }


def undeclared_error(view: AttackerView) -> dict[str, Tensor]:
    """1 where one of an image's uploads carries an error that its client's defences do not declare,
    else 0; nothing if the client has no defences."""
    known = [update.undeclared for update in view.updates if update.undeclared is not None]
    if not known:
        return {}
    return {"undeclared_error": per_image(view, torch.stack(known).any(0).double())}


# the gradient residual: || g(x) - g || / || g ||, g = dL/dW of the patch embedding ----------------
#
# A check of a reconstruction x that needs no truth: does it have the gradient g that was uploaded?
# g(x) is computed like the client's, with the weights, labels and precision of the round.


class GradientFit(NamedTuple):
    """How a reconstruction's own gradient g(x) compares with the uploaded one, g; (m,) each."""

    residual: Tensor  # || g(x) - g || / || g ||
    factor: Tensor  # f, with which f g(x) is nearest to g: below 1 where a client clips
    scaled: Tensor  # || f g(x) - g || / || g ||


def gradient_fit(
    view: AttackerView,
    images: Tensor,
    mask: Tensor | None,
    models: Sequence[LoadedModel],
    mode: Literal["eval", "train"] = "eval",
    labels: Tensor | None = None,
) -> GradientFit | None:
    """The fit of each image's step, averaged over the uploads.

    None if the labels or the gradient are not known. The pictures of a batch come in no order, so
    that nobody knows which label is whose: they need `labels`, such as `batch_labels` gives.
    images  (m, C, H, W) in [0, 1], the reconstruction
    mask    (m, N), the attack's estimate for the first upload, or None: what each upload shows, of
            a batch that nothing is masked
    models  those that the client trained, one for each upload
    labels  (m,) of these images; None: those that the attacker knows
    """
    batches = any(update.batch > 1 for update in view.updates)
    labels = view.labels if labels is None and not batches else labels
    if labels is None or not view.updates:
        return None
    if any(RESIDUAL_OVER not in update.grads for update in view.updates):
        return None
    images = images.nan_to_num(0.5)  # an image with NaN counts as failed; its value is not used
    ids = tuple(map(str, range(len(images))))
    fits = []
    for model, update in zip(models, view.updates, strict=True):
        hidden = mask if update is view.updates[0] else None
        if hidden is None and TABLE in update.grads and update.batch == 1:
            hidden = located(view, update)
        config = ClientConfig(mode=mode, autocast=update.autocast, batch=update.batch)
        inputs = ClientInput(images, labels, ids, hidden)
        client = FedSGDClient(model, config)
        computed = client.gradients(inputs, names=[RESIDUAL_OVER])[RESIDUAL_OVER]
        uploaded = gradient(view, update, RESIDUAL_OVER)
        difference = (computed - uploaded).double().flatten(1).norm(dim=1)
        own, sent = computed.double().flatten(1), uploaded.double().flatten(1)
        size = sent.norm(dim=1)
        # of nothing, as a classifier of zeros passes back, no multiple is nearer
        factor = (own * sent).sum(1) / own.square().sum(1).clamp_min(torch.finfo(own.dtype).tiny)
        scaled = (factor.unsqueeze(1) * own - sent).norm(dim=1)
        fits.append([difference / size, factor, scaled / size])
    each = (torch.stack(values).mean(0).cpu() for values in zip(*fits, strict=True))
    return GradientFit(*(values.repeat_interleave(len(images) // len(values)) for values in each))


def masks_some(view: AttackerView) -> bool:
    """Whether the first upload's step masked a patch: then E_unk has a gradient."""
    update = view.updates[0]
    if view.model.unk_embed is None or UNKNOWN not in update.grads:
        return False
    return bool((gradient(view, update, UNKNOWN).abs() > table_rounding(view, update)).any())


def batch_labels(
    view: AttackerView, images: Tensor, mask: Tensor | None, model: LoadedModel
) -> Tensor | None:
    """The class of each picture (B, C, H, W) of one step, masked by (B, N), from the classifier's
    gradient.

    With features h of the pictures that is dL/dW = sum_i e_i h_i^T, and e_i, the softmax less the
    label over B, is negative for the picture's own class alone. None of several steps or uploads,
    and where the gradient is missing.
    """
    update, layer = view.updates[0], HEAD.removesuffix(".weight")
    single = len(view.updates) == 1 and update.steps_in_all == 1
    if not single or HEAD not in update.grads:
        return None
    with torch.no_grad(), inputs_of(model, [layer]) as seen:
        model(model.normalize(images.nan_to_num(0.5).to(model.like)), mask)
    features, sent = seen[layer].double().cpu(), gradient(view, update, HEAD)[0].double().cpu()
    if features.shape != (len(images), sent.shape[1]) or not bool(features.isfinite().all()):
        return None
    errors = least_squares(features, sent.mT)  # (B, classes)
    if view.labels is None:
        return errors.argmin(1)
    known = view.labels.cpu()
    return known[cheapest(errors[:, known].numpy())]


# uploads in which nothing was shuffled ------------------------------------------------------------
#
# MJP leaves steps unshuffled by its recipe (`plain_share`), or because a mask turned out empty.
# Such an upload is that of a plain client, and scores must be read with that in mind. Every masked
# patch leaves a zero row in the gradient of the position table, so an upload without such a row
# masked nothing. Noise fills zero rows; quantisation, dropped entries and the rounding of weights
# empty rows that were not masked: of such uploads nothing is said.


def shows_no_mask(view: AttackerView, update: ClientUpdate) -> Tensor | None:
    """(n,) 1 for an upload that masked nothing, 0 for one that masked something, NaN for one that
    does not show it; None where no upload of this kind shows it.

    They can show it for one image and one step, where the table's gradient is uploaded and the
    model has the unknown embedding: images and steps with masks of their own hide each other's
    rows.
    """
    if view.model.unk_embed is None or lacks_positions(view.model) is not None:
        return None
    if update.batch > 1 or update.steps > 1 or update.position_noise:
        return None
    if lacks_gradients(view, TABLE) is not None:
        return None
    hidden = located(view, update)
    # no row may be so small that the rounding of weights could have emptied it
    longest = patch_rows(view.model, gradient(view, update, TABLE)).abs().amax(-1)
    smallest = longest.where(~hidden, torch.inf).amin(-1)
    shown = smallest.isfinite() & (smallest > FAR * table_rounding(view, update))
    # nor may a defence have filled or emptied rows; one that says too little may have done anything
    for errors in (update.noise, update.rounding):
        if TABLE in errors:
            shown &= (errors[TABLE] <= 0).to(shown.device)
    if update.undeclared is not None:
        shown &= ~update.undeclared.to(shown.device)
    return (~hidden.any(-1)).double().where(shown, torch.nan)


def unshuffled_uploads(view: AttackerView, gamma: float) -> dict[str, Tensor]:
    """The diagnostic of that name: (m,) how many of the uploads that were read masked nothing; NaN
    for an image with an upload that does not show it.

    Nothing for a client that never shuffles, and where no upload shows it.
    """
    if not gamma:
        return {}
    shown = [shows_no_mask(view, update) for update in view.updates]
    known = [of_upload for of_upload in shown if of_upload is not None]
    if not known or len(known) < len(shown):
        return {}
    return {"unshuffled_uploads": torch.stack(known).sum(0)}
