"""What is wrong with a recorded upload, and what its header cannot know.

`faults` make an upload unusable: a file cut off, another model's, numbers that are none.
`remarks` are what silently breaks attacks: momentum, several local steps, a wrong normalisation,
names that were not uploaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attacks import ATTACKS, find_attack
from attacks.equations.names import HEAD, HEAD_BIAS, PATCH, TABLE
from attacks.equations.requirements import lacks_gradients
from attacks.equations.span import combine, upload_span
from attacks.equations.system import gradient, patch_system, weights
from attacks.equations.weight_difference import holds_no_gradient
from attacks.prior import find_prior
from mjp_privacy.client.recorded.groups import Group, Series
from mjp_privacy.client.recorded.loading import (
    UNKNOWN_LABEL,
    labels_of,
    load_recorded,
    stacked,
)
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Attack, AttackerView, Control, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.jigsaw import to_images

OUTSIDE = 0.02  # of [0, 1]: what a right normalisation never leaves, up to rounding
EIGHT_BIT = 0.02  # of a grey level
HEAD_FITS = 1e-3
TRIED = 5  # series whose pixels are looked at


def remarks(group: Group, model: LoadedModel) -> Iterator[str]:
    """What to know of a line's uploads; none of it makes them unusable."""
    header = group.header
    if header.kind == "weight_difference":
        yield from _difference_remarks(group)
    own = [name for name, _ in model.named_parameters()]
    held = set(group.series[0].first.names())
    absent = [name for name in own if name not in held]
    if absent and not header.partial:
        yield (
            f"{len(absent)} of {len(own)} parameters were not uploaded, {absent[0]} among them; "
            "attacks that read them do not apply"
        )
    declared = read_metadata(str(group.series[0].first.weights_path))
    for name, given in (("mean", header.mean), ("std", header.std)):
        if name in declared and json.loads(declared[name]) != list(given):
            yield f"the weights file says {name} {declared[name]}, the header {list(given)}"
    if header.gamma and model.unk_embed is None:
        yield f"gamma is {header.gamma:g}, and the model of {header.weights} has no unk_embed"
    yield from _head_remarks(group, model)
    yield from _pixel_remarks(group, model)


def _difference_remarks(group: Group) -> Iterator[str]:
    header, first = group.header, group.series[0].first
    refusal = holds_no_gradient(stacked([first], [], torch.device("cpu")))
    if refusal is not None:
        yield f"{refusal.text}; train with plain SGD, or upload gradients"
    elif header.client_config(first.name).pseudo_gradient == "approximate":
        yield (
            f"a weight difference of {header.steps} {header.optimizer} step(s) with momentum "
            f"{header.momentum:g}: its pseudo-gradient is approximate, and rows say so"
        )


def _head_remarks(group: Group, model: LoadedModel) -> Iterator[str]:
    """Cross-entropy on one image x gives the classifier b = softmax(W f + c) - onehot and b f^T:
    f is read off, and with other weights than the client's the first equation fails."""
    header, first = group.header, group.series[0].first
    if header.batch > 1 or header.steps > 1 or header.recipe.get("defenses"):
        return
    view = view_of(Series((first,), group.series[0].records), model)
    update = view.updates[0]
    if lacks_gradients(view, HEAD, HEAD_BIAS) or update.optimizer != "sgd":
        return
    outer, pushed = gradient(view, update, HEAD)[0], gradient(view, update, HEAD_BIAS)[0]
    feature = outer.mT @ pushed / pushed.square().sum().clamp_min(1e-300)
    state = weights(view, update)
    found = (state[HEAD].double() @ feature + state[HEAD_BIAS].double()).softmax(0)
    found[pushed.argmin()] -= 1
    worst = float((found - pushed).abs().max())
    if worst > HEAD_FITS:
        yield (
            f"the classifier's gradient in {first.name} does not fit {header.weights} (off by "
            f"{worst:.2g} where rounding is expected): other weights than the client's, another "
            "sign or learning rate, or another loss than cross-entropy on one label"
        )


def _pixel_remarks(group: Group, model: LoadedModel) -> Iterator[str]:
    """Pixels that the header's mean and std take out of [0, 1] mean that they are not the
    client's. Tried on the first series whose gradients determine every patch."""
    if group.header.batch > 1 or group.header.steps > 1 or group.header.recipe.get("defenses"):
        return
    for series in group.series[:TRIED]:
        pixels = recovered_pixels(series, model)
        if pixels is None:
            continue
        outside = float(((pixels < -OUTSIDE) | (pixels > 1 + OUTSIDE)).double().mean())
        levels = pixels * 255
        whole = float(((levels - levels.round()).abs() < EIGHT_BIT).double().mean())
        if outside > 0 or whole < 0.5:
            yield (
                f"with the header's mean {group.header.mean} and std {group.header.std}, "
                f"{100 * outside:.1f} % of the pixels of {series.first.name} leave [0, 1] and "
                f"{100 * whole:.0f} % are 8-bit levels; of a decoded picture none and nearly all "
                "are. The client probably normalised with others (put them into the header), or "
                "altered its pixels"
            )
        return


def recovered_pixels(series: Series, model: LoadedModel) -> Tensor | None:
    """(C, S, S), not clipped, where the uploads leave no patch open; else None."""
    view = view_of(series, model)
    if lacks_gradients(view, TABLE, PATCH) or model.patch_embed.num_patches > model.embed_dim:
        return None
    spans = [upload_span(patch_system(view, update), 0) for update in view.updates]
    known = combine(spans)
    if len(known.basis):
        return None
    image = to_images(known.known, model.patch_size, len(view.pixels.mean))
    std = torch.tensor(view.pixels.std, dtype=torch.float64).view(-1, 1, 1)
    mean = torch.tensor(view.pixels.mean, dtype=torch.float64).view(-1, 1, 1)
    return image * std + mean


def view_of(series: Series, model: LoadedModel, uploads: int | None = None) -> AttackerView:
    """What an attacker sees of a series, each upload with its own weights."""
    names = [name for name, _ in model.named_parameters()]
    updates = [stacked([one], names, torch.device("cpu")) for one in series.uploads[:uploads]]
    for place, upload in enumerate(series.uploads[:uploads]):
        if upload.header.weights != series.first.header.weights:
            before = {n: p.detach() for n, p in load_recorded(upload).named_parameters()}
            updates[place] = replace(updates[place], weights_before=before)
    card, header = model.card, series.first.header
    found = labels_of(series.first, model)
    known = None if (found == UNKNOWN_LABEL).any() else found
    pixels = Pixels(card.img_size, card.mean, card.std)
    return AttackerView(model, updates, pixels, known, "plain" if header.gamma else "input")


def applicability(group: Group, model: LoadedModel) -> dict[str, str]:
    """Each attack's name to why it does not apply to this line, or to nothing."""
    fewest = min(len(one.uploads) for one in group.series)
    reasons: dict[str, str] = {}
    for name in ATTACKS:
        attack = find_attack(name)
        assert not isinstance(attack, Control)
        if attack.victim == "april_block" and model.first_block != "closed_form":
            reasons[name] = "the client trained the intact block 0"
        elif attack.uploads > fewest:
            reasons[name] = f"needs {attack.uploads} uploads of the same images, {fewest} recorded"
        else:
            view = view_of(group.series[0], model, attack.uploads)
            refusal = attack.unsupported(view)
            reasons[name] = _lacks_prior(attack, model) if refusal is None else refusal.text
    return reasons


def _lacks_prior(attack: Attack, model: LoadedModel) -> str:
    name = getattr(attack, "prior", None)
    if name is None:
        return ""
    try:
        find_prior(name, patch=model.patch_size, size=model.card.img_size)
    except UserError as error:
        return str(error)
    return ""
