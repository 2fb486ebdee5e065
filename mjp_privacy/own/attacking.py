"""`attack_gradients`: every attack that applies to a user's own model and gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor

from attacks import ATTACKS, find_attack, traits_of
from attacks.controls import mean_image
from attacks.equations.names import PATCH as RESIDUAL_OVER
from attacks.shared_picture import CERTAIN
from attacks.step import BREAKDOWN, run_steps
from mjp_privacy.client.autocast import Autocast
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import torch_generator
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.experiment.diagnostics import gradient_fit
from mjp_privacy.experiment.refusals import refused_by_block
from mjp_privacy.interfaces import Attack, AttackerView, Control, Reconstruction, Refusal
from mjp_privacy.metrics.pixel import psnr
from mjp_privacy.own.batch_notes import batch_notes
from mjp_privacy.own.client import ClientStep, Kind, is_whole, said
from mjp_privacy.own.joined import joined
from mjp_privacy.own.labels import Labels, number_of
from mjp_privacy.own.leak import Leak
from mjp_privacy.own.misfit import check_patches
from mjp_privacy.own.private_images import private_images
from mjp_privacy.own.reading import Held
from mjp_privacy.own.reconstructed import Reconstructed
from mjp_privacy.own.uploads import Channels, Models, OwnUploads, own_uploads
from mjp_privacy.uploads.normalisation import declared_wrongly, fed_pixels

Images = Tensor | npt.NDArray[Any]


def attack_gradients(
    model: Models,
    gradients: Held = None,
    *,
    labels: Labels | None = None,
    mean: Channels = None,
    std: Channels = None,
    attacks: Literal["all"] | str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "all",
    images: Images | None = None,
    kind: Kind = "gradient",
    batch: int | None = None,
    lr: float | None = None,
    steps: int = 1,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    dal_lambda: float = 0.0,
    noise: float = 0.0,
    rounding: float = 0.0,
    autocast: Autocast = "none",
    seed: int = 0,
) -> Leak:
    """What the pictures of a client's step look like to whoever sees its gradients.

    leak = attack_gradients(model, gradients, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    leak.best.image; leak["patch_gradient"].residual; leak.refused; leak.show("leak.png")

    Of several uploads of batches, which need not hold the same pictures, it finds those that they
    share, with the weights of each upload if they moved:

    leak = attack_gradients(models, [monday, tuesday], batch=8, mean=0.5, std=0.5)
    shared = leak["shared_picture"]
    shared.images[shared.certain]   # verified; the other places hold guesses

    model      the ViT as it was before the step: of timm, torchvision, transformers, open_clip or
               this package; a list of models if each of several uploads had its own weights
    gradients  {parameter name: tensor}, a list in parameter order, a model whose parameters hold
               `.grad`, or None for the .grad of `model`; a list of these for several uploads, of
               the same images if batch is 1. With kind="weight_difference": weights after minus
               before
    labels     classes of the images; None: read off the classifier's gradient if batch is 1
    mean, std  with which the client normalised its images: one number or three; never guessed
    attacks    "all" (every closed form), names, or {name: options}
    images     the private images (B, 3, S, S) in [0, 1], to score against; those of all uploads
               where several hold batches
    batch      images in a step; None: as the number of labels or images says, else 1
    lr, steps, optimizer, momentum, weight_decay
               of the client's training, for weight differences
    dal_lambda weight of MJP's extra loss, where the client's loss has it
    noise      standard deviation, in the gradient's units, of what a defence added to every entry
    rounding   the same for errors that leave a zero entry zero (quantised or dropped entries);
               half-precision tensors need none
    autocast   "fp16" or "bf16" where the client computed under torch.autocast; a float32 gradient
               that was rounded so shows it, and need not say it
    """
    client = ClientStep(
        kind,
        1 if batch is None else batch,
        lr,
        steps,
        optimizer,
        momentum,
        weight_decay,
        dal_lambda,
        noise,
        rounding,
        autocast,
    )
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise UserError(f"seed: expected a whole number from 0, less than 2^63, got {said(seed)}.")
    given = images_given(labels, images) if batch is None else None
    uploads = own_uploads(model, gradients, client, labels=labels, mean=mean, std=std, images=given)
    view = uploads.view()
    private = None
    if images is not None:
        private = private_images(images, _pictures(uploads, images), view.pixels.size)
    chosen, refused = _chosen(attacks, len(uploads.updates))
    results: dict[str, Reconstructed] = {}
    doubts = _doubts(view)
    for name, attack in chosen.items():
        outcome = _run(name, attack, uploads, view, seed)
        if isinstance(outcome, str):
            refused[name] = outcome
        else:
            results[name] = outcome.without(doubts).scored(private, uploads.updates[0].batch)
    ordered = {name: refused[name] for name in ATTACKS if name in refused}
    floor = None if private is None else _floor(view, private)
    size = uploads.updates[0].batch
    notes = (*batch_notes(size, len(uploads.updates), results), *uploads.notes)
    doubt = "; ".join(dict.fromkeys(doubts.values()))
    source = uploads.label_source
    known = declared_residual(view)
    return Leak(results, ordered, view.labels, source, private, floor, notes, size, doubt, known)


def _pictures(uploads: OwnUploads, images: Images) -> int:
    """How many private images are expected: those of a step or, of several uploads of batches, as
    many as were given, for these need not hold the same ones."""
    several, given = len(uploads.updates), next(iter(getattr(images, "shape", ())), 0)
    if several > 1 and uploads.updates[0].batch > 1 and 0 < given <= several * uploads.images:
        return int(given)
    return uploads.images


def declared_residual(view: AttackerView) -> float:
    """The residual that the declared noise and rounding of the uploads give a perfect picture."""
    shares = []
    for update in view.updates:
        sent = update.grads.get(RESIDUAL_OVER)
        if sent is None or update.batch > 1 or update.kind != "gradient":
            return 0.0
        errors = [e[RESIDUAL_OVER] for e in (update.noise, update.rounding) if RESIDUAL_OVER in e]
        variance = sum((error.double().cpu().square() for error in errors), torch.zeros(len(sent)))
        spread = (variance * sent[0].numel()).sqrt()
        shares.append(spread / sent.double().cpu().flatten(1).norm(dim=1))
    return float(torch.stack(shares).mean())


def _doubts(view: AttackerView) -> dict[int, str]:
    """What speaks against the declared normalisation, by the place of a picture of the upload."""
    doubts: dict[int, str] = {}
    steps = len(next(iter(view.updates[0].grads.values())))
    for place in range(steps):
        try:
            fed = fed_pixels(view, place)
        except BREAKDOWN:  # of numbers at the edge of their range: nothing is certain then
            continue
        if fed is not None and (doubt := declared_wrongly(fed, view.pixels.mean, view.pixels.std)):
            doubts[place] = doubt
    return doubts


def _floor(view: AttackerView, private: Tensor) -> float:
    """The mean PSNR of the mean colour of photographs, for which no gradient is needed."""
    return float(psnr(mean_image(view).double().cpu().expand_as(private), private).mean())


def images_given(labels: Labels | None, images: Images | None) -> int | None:
    """How many images a call is about, as far as what was given says it."""
    if images is not None and getattr(images, "ndim", 0) == 4:
        return len(images)
    return None if labels is None else number_of(labels)


def _chosen(
    attacks: str | Sequence[str] | Mapping[str, Mapping[str, Any]], uploads: int
) -> tuple[dict[str, Attack], dict[str, str]]:
    """The attacks to run, built, and the reasons why others are not."""
    everything = isinstance(attacks, str) and attacks == "all"
    options = _options(list(ATTACKS) if everything else attacks)
    chosen: dict[str, Attack] = {}
    refused: dict[str, str] = {}
    for name, given in options.items():
        if name not in ATTACKS:
            raise unknown_name("attack", shown(name, 60), list(ATTACKS))
        if everything and "steps" in traits_of(name):
            refused[name] = (
                "it optimises for minutes, so attacks='all' leaves it out; name it to run it"
            )
            continue
        attack = find_attack(name, dict(given))
        assert not isinstance(attack, Control)
        if attack.uploads > 1 and uploads < 2:
            refused[name] = (
                "it needs two uploads or more of batches that share pictures, and one was given"
                if "shared pictures" in traits_of(name)
                else "it reads several uploads of the same images, and one was given"
            )
        elif attack.uploads > uploads or (attack.uploads > 1 and "uploads" not in given):
            built = find_attack(name, {**given, "uploads": uploads})
            assert not isinstance(built, Control)
            chosen[name] = built
        else:
            chosen[name] = attack
    return chosen, refused


def _options(
    attacks: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Mapping[str, Any]]:
    """Options by attack; none for attacks that were only named."""
    if isinstance(attacks, str):
        return {attacks: {}}
    options = attacks if isinstance(attacks, Mapping) else {}
    if isinstance(attacks, list | tuple | set) and all(isinstance(n, str) for n in attacks):
        options = {name: {} for name in attacks}
    if not options or not all(
        isinstance(name, str) and isinstance(given, Mapping) for name, given in options.items()
    ):
        raise UserError(
            f"attacks: expected 'all', a name, a list of names or {{name: options}}, got "
            f"{said(attacks)}. `mjp list attacks` has the names."
        )
    return options


def _run(
    name: str, attack: Attack, uploads: OwnUploads, view: AttackerView, seed: int
) -> Reconstructed | str:
    """What one attack gives, or the reason why it gives nothing."""
    model = uploads.models[0]
    seen = AttackerView(
        model, view.updates[: attack.uploads], view.pixels, view.labels, view.against
    )
    if "shared pictures" in traits_of(name) and seen.updates[0].batch > 1:
        together = joined(seen)
        if isinstance(together, Refusal):
            return together.text
        seen = together
    refusal = refused_by_block(model, attack) or attack.unsupported(seen)
    if refusal is not None:
        return refusal.text
    steps = len(next(iter(seen.updates[0].grads.values())))
    started = time.perf_counter()
    done = run_steps(
        attack,
        seen,
        steps * seen.updates[0].batch,
        lambda step: torch_generator("own gradients", seed, name, step),
    )
    seconds = time.perf_counter() - started
    made = done.reconstruction
    reasons = {**made.inapplicable, **done.failed}
    if made.images is not None and len(reasons) == len(made.images):
        return next(iter(reasons.values()))
    if made.images is None and made.mask is None:
        return next(iter(reasons.values()), "it returned no reconstruction")
    return _measured(name, made, uploads, seen, seconds, reasons)


def _measured(
    name: str,
    made: Reconstruction,
    uploads: OwnUploads,
    view: AttackerView,
    seconds: float,
    reasons: Mapping[int, str],
) -> Reconstructed:
    """The reconstruction with the checks that need no truth."""
    images = None if made.images is None else made.images.float().cpu()
    fit = check = None
    if images is not None:
        images[list(reasons)] = torch.nan
        fit = gradient_fit(view, images, made.mask, uploads.models[: len(view.updates)])
        check = check_patches(view, images)
    residual, factor, scaled = fit or (None, None, None)
    for values in fit or ():
        values[list(reasons)] = torch.nan
    verified = made.diagnostics.get(CERTAIN)
    if verified is None and check is not None:
        verified = check.certain
    return Reconstructed(
        name,
        images,
        None if residual is None else residual.double(),
        factor,
        scaled,
        None if check is None else check.misfits,
        None if verified is None else verified.cpu().bool(),
        seconds,
        mask=None if made.mask is None else made.mask.cpu(),
        diagnostics={key: values.cpu() for key, values in made.diagnostics.items()},
        reasons=dict(reasons),
    )
