"""`shared_picture` on a tiny client: what is found and verified, and why it does not apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from mjp_privacy import attack_gradients
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Attack, AttackerView, Control, Pixels, Reconstruction
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from tests.helpers.models import tiny_model
from tests.helpers.planted import planted_images

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 4}
"""N = 4 patches of p = 192 pixels, width D = 48: batches of up to 11."""


def model_of(**changes: object) -> LoadedModel:
    shape = SHAPE | {"num_classes": 10, "mean": 0.5, "std": 0.25} | changes
    return tiny_model(shape, "conditioned")


def attack_of(uploads: int) -> Attack:
    attack = find_attack("shared_picture", {"uploads": uploads, "prior": "stationary"})
    assert not isinstance(attack, Control)
    return attack


def view_of(
    model: LoadedModel, images: Tensor, rounds: int, client: ClientConfig, setting: str = "a"
) -> AttackerView:
    """What is seen of a client that holds these images."""
    feeding = Feeding(client, setting, 0.3, model.patch_size, 0)
    names = [
        n
        for n in ("pos_embed", "patch_embed.proj.weight", "unk_embed")
        if n in dict(model.named_parameters())
    ]
    updates = []
    for round in range(rounds):
        order = feeding.order([str(n) for n in range(len(images))], round)
        ids = [str(n) for n in order.tolist()]
        inputs = feeding.input(images[order], order % 10, ids, round)
        updates.append(make_upload(model, [inputs], client, names=names, round=round))
    pixels = Pixels(model.card.img_size, model.card.mean, model.card.std)
    return AttackerView(model, updates, pixels, None, "plain" if setting == "c" else "input")


def run(attack: Attack, view: AttackerView) -> Reconstruction:
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator())


def scores(made: Reconstruction, images: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR (m,) of each image's reconstruction, and whether it is certain."""
    assert made.images is not None
    order = assigned(made.images.float(), images)
    return psnr(made.images[order], images), made.diagnostics["certain"][order].bool()


FRESH = ClientConfig(batch=4, partners="fresh")


@pytest.mark.parametrize("moving", [False, True])
def test_a_client_that_shuffles_gives_its_pictures_away(moving: bool) -> None:
    images = planted_images(12, 16)
    view = view_of(model_of(), images, 5, FRESH)
    if moving:  # nothing but row spaces is used, and they do not know the weights
        other = view_of(model_of(embed_dim=48, depth=2), images, 5, FRESH)
        view = replace(view, updates=[*view.updates[:2], *other.updates[2:]])
    made = run(attack_of(5), view)
    quality, certain = scores(made, images)
    assert certain.all()
    assert quality.min() > 100
    assert made.diagnostics["uploads_sharing"].tolist() == [5] * 12
    assert made.diagnostics["pictures_by_rank"].tolist() == [4] * 12
    assert (made.diagnostics["expected_psnr"] - quality.median()).abs().max() < 20
    assert not made.mask.any() if made.mask is not None else False


def test_what_is_not_determined_is_a_guess_and_not_certain() -> None:
    images = planted_images(12, 16)
    quality, certain = scores(run(attack_of(2), view_of(model_of(), images, 2, FRESH)), images)
    assert 0 < certain.sum() < 12
    assert quality[certain].min() > 100
    assert quality[~certain].max() < 60
    assert quality[~certain].isfinite().all()


def test_batches_that_share_nothing_give_nothing_certain() -> None:
    images = planted_images(8, 16)
    view = view_of(model_of(), images, 1, FRESH)
    parts = [replace(view.updates[0].part(slice(step, step + 1)), round=step) for step in (0, 1)]
    made = run(attack_of(2), replace(view, updates=parts))
    assert not made.diagnostics["certain"].any()
    assert not made.diagnostics["pairs_sharing"].any()
    assert made.images is not None
    assert made.images.shape == (4, 3, 16, 16)


@pytest.mark.parametrize("augment", ["flip", "crop"])
def test_augmented_pictures_are_found_where_they_recur_and_no_others(augment: str) -> None:
    images = planted_images(8, 16)
    client = replace(FRESH, augment=augment)  # type: ignore[arg-type]
    made = run(attack_of(4), view_of(model_of(), images, 4, client))
    feeding, ids = Feeding(client, "a", 0.3, 8, 0), [str(n) for n in range(8)]
    fed = torch.cat([feeding.photographs(images, ids, round) for round in range(4)])
    assert made.images is not None
    for picture in made.images[made.diagnostics["certain"].bool()]:
        assert psnr(picture.expand_as(fed), fed).max() > 100


@pytest.mark.nightly
@pytest.mark.parametrize("mask", ["batch", "image"])
def test_masks_do_not_keep_it_from_the_plain_pictures(mask: str) -> None:
    images = planted_images(8, 16)
    client = ClientConfig(batch=2, partners="fresh", mask=mask)  # type: ignore[arg-type]
    view = view_of(model_of(unknown_embedding=True), images, 8, client, "c")
    quality, certain = scores(run(attack_of(8), view), images)
    assert certain.all()
    assert quality.min() > 100


def test_an_upload_of_more_pictures_than_declared_is_read_as_such() -> None:
    images = planted_images(12, 16)
    view = view_of(model_of(), images, 5, FRESH)
    view = replace(view, updates=[replace(update, batch=3) for update in view.updates])
    made = run(attack_of(5), view)
    assert made.diagnostics["pictures_by_rank"].tolist() == [4] * 9
    assert made.diagnostics["certain"].all()


# refusals -----------------------------------------------------------------------------------------


def refusal(model: LoadedModel, client: ClientConfig, rounds: int = 2, count: int = 24) -> str:
    view = view_of(model, planted_images(count, model.card.img_size), rounds, client)
    return str(attack_of(rounds).unsupported(view))


def test_fixed_partners_are_refused() -> None:
    text = refusal(model_of(), ClientConfig(batch=4))
    assert "every upload of a step holds the same batch of 4 pictures" in text
    assert "client.partners: fresh" in text


def test_a_batch_with_more_patches_than_the_width_is_refused() -> None:
    text = refusal(model_of(), replace(FRESH, batch=12))
    assert "N B = 4 * 12 = 48 patches >= D = 48" in text
    assert "up to a batch of 11 they do" in text


def test_the_largest_batch_is_solved() -> None:
    images = planted_images(22, 16)
    client = replace(FRESH, batch=11)
    made = run(attack_of(4), view_of(model_of(), images, 4, client))
    assert made.diagnostics["certain"].sum() > 0


def test_too_few_equations_are_refused_and_more_uploads_help() -> None:
    """N (B - 1) = 100 of p = 192: two uploads leave 184 equations, three 276."""
    model, client = model_of(embed_dim=128), replace(FRESH, batch=26)
    images = planted_images(52, 16)
    text = str(attack_of(2).unsupported(view_of(model, images, 2, client)))
    assert "2 * (p - N (B - 1)) = 2 * (192 - 4 * 25) = 184 equations <= p = 192" in text
    assert "up to a batch of 24 they do, or give more uploads" in text
    assert attack_of(3).unsupported(view_of(model, images, 3, client)) is None


def test_masked_patches_count_among_the_unknowns() -> None:
    model = model_of(embed_dim=128, unknown_embedding=True)
    client = ClientConfig(batch=25, partners="fresh", mask="batch")
    view = view_of(model, planted_images(50, 16), 2, client, "c")
    assert "2 * (p - N (B - 1) - k) = 2 * (192 - 4 * 24 - " in str(attack_of(2).unsupported(view))


def test_one_upload_is_refused() -> None:
    view = view_of(model_of(), planted_images(4, 16), 1, FRESH)
    assert "looks for pictures that uploads share, and one was given" in str(
        attack_of(1).unsupported(view)
    )


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="shared_picture, uploads: expected at least 1, got 0"):
        find_attack("shared_picture", {"uploads": 0})
    with pytest.raises(UserError, match="shared_picture: completion is one of field, patch, none"):
        find_attack("shared_picture", {"completion": "best"})


# from Python --------------------------------------------------------------------------------------


LARGER = {"img_size": 32, "patch_size": 16}  # the smallest pictures that LPIPS takes


def gradients(model: LoadedModel, images: Tensor, numbers: Sequence[int]) -> dict[str, Tensor]:
    model.zero_grad()
    labels = torch.tensor(numbers) % 10
    output = model(model.normalize(images[list(numbers)]))
    torch.nn.functional.cross_entropy(output, labels).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_of_several_batches_give_what_they_share() -> None:
    model, images = model_of(**LARGER), planted_images(12, 32)
    uploads = [gradients(model, images, n) for n in ((0, 1, 2, 3), (4, 1, 5, 6), (7, 8, 5, 9))]
    leak = attack_gradients(model, uploads, batch=4, images=images[[1, 5]])
    made = leak["shared_picture"]
    assert leak.best is made
    assert made.images is not None
    assert made.certain is not None
    assert made.certain.nonzero().flatten().tolist() == [0, 4, 5, 8]
    assert made.exact == 2
    shared = made.images[made.certain].double()
    assert (psnr(shared[[0, 3]], images[[1, 5]]) > 90).all()
    assert "4 of 12 places of shared_picture" in leak.verdict
    assert any("batch 4: shared_picture finds" in note for note in leak.notes)


def test_batches_that_share_nothing_are_said_to() -> None:
    model, images = model_of(), planted_images(8, 16)
    uploads = [gradients(model, images, numbers) for numbers in ((0, 1, 2, 3), (4, 5, 6, 7))]
    leak = attack_gradients(model, uploads, batch=4, attacks="shared_picture")
    assert "shared_picture found no picture" in leak.verdict
    assert not leak.best.certain.any()


def test_weight_differences_of_clients_whose_weights_moved() -> None:
    images, uploads, models = planted_images(8, 32), [], []
    for number, batch in enumerate(((0, 1, 2), (3, 1, 4))):
        model = model_of(depth=1 + number, **LARGER)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        sent = gradients(model, images, batch)
        uploads.append({n: -0.1 * (g + 0.01 * before[n]) for n, g in sent.items()})
        models.append(model)
    with pytest.raises(UserError):
        attack_gradients(models, uploads, batch=3, attacks="shared_picture", lr=0.1)
    leak = attack_gradients(
        models,
        uploads,
        batch=3,
        attacks="shared_picture",
        kind="weight_difference",
        lr=0.1,
        weight_decay=0.01,
        images=images[[1]],
    )
    assert leak["shared_picture"].exact == 1
