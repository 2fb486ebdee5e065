"""The error of autocast: what is declared against what is measured, and what attacks make of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations import PATCH, QKV, TABLE, UNKNOWN
from attacks.equations.patch_system import PatchSystem, error_of, patch_system
from attacks.equations.sent_gradients import autocast_error, multiplied_rows, shows_its_rows
from attacks.equations.span import combine, upload_span
from mjp_privacy import load_images, load_model
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.traces import HALF, rounded
from mjp_privacy.client.upload import make_upload
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from tests.contract.defense_errors import allowance, deviation
from tests.helpers.models import some_images, some_labels, tiny
from tests.helpers.night import nightly

NAMES = [TABLE, UNKNOWN, PATCH, QKV]
SIZE, COUNT = 56, 4
BOUND = 1.05
"""How many times too small the declared error may be; those of defences are held to 1.4."""

each_kind = pytest.mark.parametrize("kind", ["bf16", "fp16"])


@cache
def trained() -> LoadedModel:
    """A packaged ViT that was trained with MJP."""
    return load_model("cifar_vit_mjp")


@cache
def photographs() -> Tensor:
    return torch.stack([image for image, *_ in load_images("embedded", size=SIZE, limit=COUNT)])


@cache
def fed(round: int) -> ClientInput:
    """What an MJP client feeds in this round."""
    model, ids = trained(), [f"image {place}" for place in range(COUNT)]
    named = {"patch_size": model.patch_size, "gamma": 0.27, "round": round, "seed": 0}
    return SETTINGS["c"].prepare(photographs(), torch.arange(COUNT), ids, **named)


@cache
def upload(kind: str, round: int = 0) -> ClientUpdate:
    client = ClientConfig(autocast=kind)
    return make_upload(trained(), [fed(round)], client, names=NAMES, round=round)


@cache
def plain_upload(kind: str) -> ClientUpdate:
    """That of a client without MJP."""
    inputs = replace(fed(0), images=photographs(), mask=None, permutation=None)
    client = ClientConfig(autocast=kind)
    return make_upload(trained(), [inputs], client, names=NAMES)


def view_of(*updates: ClientUpdate) -> AttackerView:
    card = trained().card
    return AttackerView(trained(), updates, Pixels(SIZE, card.mean, card.std), None, "plain")


def multiplied_patches(kind: str) -> Tensor:
    """h(x) (n, N, p), float64, of the photographs."""
    model = trained()
    return rounded(to_patches(model.normalize(photographs()), model.patch_size), HALF[kind])


# what is declared ---------------------------------------------------------------------------------


@each_kind
def test_the_rows_that_were_multiplied_are_known_exactly(kind: str) -> None:
    """G is their product with the rounded patches, up to the declared rounding of its entries."""
    update = plain_upload(kind)
    system = patch_system(view_of(update), update)
    left = system.total - system.rows.mT @ multiplied_patches(kind)
    declared = error_of(update, PATCH)
    entries = left[0].numel()
    assert (deviation(left) < declared * allowance(entries, BOUND)).all()
    assert (declared < deviation(left) * allowance(entries, BOUND)).all()
    assert (error_of(update, TABLE) == 0).all()
    as_sent = update.grads[TABLE][:, 0, 1:].double()
    of_rows = (system.total - as_sent.mT @ multiplied_patches(kind)).flatten(1).norm(dim=1)
    assert (of_rows > 1.05 * left.flatten(1).norm(dim=1)).all()


@each_kind
@pytest.mark.parametrize("tail", [1.0, 3.0])
def test_declared_and_measured_error_of_planted_gradients(kind: Any, tail: float) -> None:
    """Entries of even sizes, and with long tails."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 96, 192, generator=generator).double()
    exact = exact.sign() * exact.abs() ** tail * 1e-4
    exact[:, :7] = 0
    sent = rounded(exact, HALF[kind]).float()
    update = ClientUpdate({PATCH: sent}, autocast=kind)
    declared, measured = error_of(update, PATCH), deviation(sent - exact)
    bound = allowance(exact[0].numel(), 1.1 if tail > 1 else BOUND)
    assert (measured < declared * bound).all()
    assert (declared < measured * bound).all()


@each_kind
def test_errors_of_several_local_steps(kind: Any) -> None:
    """Each step's product is rounded, and so are the rows that went into it."""
    rate, generator = 0.1, torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 5, 64, 96, generator=generator).double()
    rows = drawn[:, :1] + 0.1 * drawn[:, 1:]  # of four steps, whose weights moved a little
    patches = torch.randn(1, 64, 192, generator=generator).double()
    multiplied = rounded(rows, HALF[kind]).mT @ patches.unsqueeze(1)
    sent = {
        TABLE: -rate * rows.sum(1),
        PATCH: -rate * rounded(multiplied, HALF[kind]).sum(1),
    }
    facts: dict[str, Any] = {"kind": "weight_difference", "lr": rate, "steps": 4}
    update = ClientUpdate({n: g.float() for n, g in sent.items()}, autocast=kind, **facts)
    assert not shows_its_rows(update)
    made = {
        PATCH: (rounded(multiplied, HALF[kind]) - multiplied).mean(1),
        TABLE: (rounded(rows, HALF[kind]) - rows).mean(1),
    }
    for name, error in made.items():
        measured, declared = deviation(error), error_of(update, name)
        assert (measured < declared * 1.4).all(), name
        assert (declared < measured * 1.4).all(), name


def test_rows_that_were_changed_since_are_not_rounded() -> None:
    update = upload("bf16")
    rows = update.grads[TABLE][:, 0, 1:].double()
    assert not multiplied_rows(update, rows).equal(rows)
    level = torch.full((COUNT,), 0.1)
    changes: list[dict[str, Any]] = [
        {"autocast": "none"},
        {"noise": {TABLE: level}},
        {"rounding": {TABLE: level}},
        {"position_noise": 0.1},
        {"clipped": True},
        {"batch": 2},
        {"steps": 2},
        {"optimizer": "adamw"},
    ]
    for change in changes:
        changed = replace(update, **change)
        assert multiplied_rows(changed, rows).equal(rows), change
        as_declared = autocast_error(changed, TABLE, update.grads[TABLE])
        assert (as_declared > 0).all() == (changed.autocast != "none"), change


@each_kind
def test_the_gradient_of_dal_is_taken_out_as_the_client_rounded_it(kind: Any) -> None:
    """Then the rows are known exactly for a client with MJP's extra loss too."""
    model = tiny(unknown_embedding=True, dal="nonlinear").float()
    inputs = ClientInput(some_images(2).float(), some_labels(2), ("a", "b"))
    client = ClientConfig(autocast=kind, dal=True, dal_lambda=10)
    update = make_upload(model, [inputs], client, names=[TABLE, PATCH])
    card = model.card
    view = AttackerView(model, [update], Pixels(card.img_size, card.mean, card.std))
    system = patch_system(view, update)
    patches = to_patches(model.normalize(inputs.images), model.patch_size)
    left = system.total - system.rows.mT @ rounded(patches, HALF[kind])
    bound = allowance(left[0].numel(), BOUND)
    assert (deviation(left) < error_of(update, PATCH) * bound).all()


def test_tables_and_norms_are_not_rounded() -> None:
    update = upload("bf16")
    values = torch.ones(COUNT, 8)
    for name in ("cls_token", "unk_embed", "blocks.0.norm1.weight", "norm.bias"):
        assert (autocast_error(update, name, values) == 0).all(), name
    for name in ("head.weight", QKV, "patch_embed.proj.bias"):
        assert (autocast_error(update, name, values) > 0).all(), name


# what attacks make of it --------------------------------------------------------------------------


@cache
def recovered(kind: str, uploads: int, **facts: Any) -> Tensor:
    """PSNR (n,) of `multi_round` over so many uploads; `facts` replace those of the uploads."""
    updates = [replace(upload(kind, round), **facts) for round in range(uploads)]
    attack = find_attack("multi_round", {"uploads": uploads})
    images = attack.run(view_of(*updates), generator=torch.Generator()).images
    return psnr(images.float(), photographs())


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["bf16", nightly("fp16")])
def test_more_uploads_are_never_worse_than_fewer(kind: str) -> None:
    scores = [recovered(kind, uploads).median() for uploads in (1, 2, 4, 6)]
    assert scores == sorted(scores)
    assert scores[-1] > 40


def test_two_uploads_that_do_not_say_it_come_back_worse() -> None:
    told, untold = recovered("bf16", 2), recovered("bf16", 2, autocast="none")
    assert told.median() > untold.median() + 1


def test_a_direction_that_noise_alone_closes_stays_open() -> None:
    """Three patches are masked in both uploads. By the errors of the spans the eigenvalue of their
    directions is not zero; with the errors told they are open."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(24, 192, generator=generator).double()
    error, spans, told = 0.05, [], []
    for hidden_ones in ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6)):
        rows = torch.randn(24, 96, generator=generator).double()
        total = rows.mT @ patches + error * torch.randn(96, 192, generator=generator).double()
        hidden = torch.zeros(1, 24, dtype=torch.bool)
        hidden[0, list(hidden_ones)] = True
        system = PatchSystem(torch.where(hidden[0, :, None], 0.0, rows)[None], total[None], hidden)
        spans.append(upload_span(system, 0))
        told.append(upload_span(system, 0, error=error))
    assert len(combine(spans).basis) == 0
    knowledge = combine(told)
    assert len(knowledge.basis) == 3
    across = patches - (patches @ knowledge.basis.mT) @ knowledge.basis
    assert (knowledge.known - across).square().mean().sqrt() < 2 * error
    misled = (combine(spans).known - patches) @ knowledge.basis.mT
    assert misled.square().mean().sqrt() > 10 * error
