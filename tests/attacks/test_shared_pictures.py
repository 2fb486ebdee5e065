"""What batches share: planted systems, the test of two uploads, and the search among many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.agreement import Search
from attacks.equations.batches import BatchSpan, batch_span, pictures_by_rank
from attacks.equations.patch_system import PatchSystem
from attacks.shared_picture import BatchUploads
from mjp_privacy import attack_gradients
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Attack, AttackerView, Pixels, Reconstruction
from mjp_privacy.metrics.matching import assigned
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from tests.helpers.models import tiny_model
from tests.helpers.planted import planted_images

N, D, P = 5, 40, 60
EPS = torch.finfo(torch.float64).eps
Batch = tuple[int, ...]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


PICTURES = draw(40, N, P, seed=0)


def system(batch: Batch, seed: int, masks: Tensor | None = None, noise: float = 0) -> PatchSystem:
    """What an upload of these pictures holds, with rows of its own; masks (B, N)."""
    pictures = PICTURES[list(batch)]
    hidden = torch.zeros(pictures.shape[:2], dtype=torch.bool) if masks is None else masks
    rows = draw(len(batch), N, D, seed=1000 + seed)
    total = torch.einsum("bid,bip->dp", rows, pictures)
    total = total + noise * draw(D, P, seed=2000 + seed)
    shown = torch.where(hidden.unsqueeze(-1), 0.0, rows).sum(0)
    sums = None if masks is None else torch.where(hidden.unsqueeze(-1), rows, 0.0).sum((0, 1))[None]
    return PatchSystem(shown[None], total[None], hidden.all(0)[None], sums)


def span(batch: Batch, seed: int, masks: Tensor | None = None, noise: float = 0) -> BatchSpan:
    made = system(batch, seed, masks, noise)
    return batch_span(made, 0, len(batch), EPS, can_mask=masks is not None)


def found(spans: list[BatchSpan]) -> dict[int, tuple[int, ...]]:
    """{the number of a picture that was found exactly: its uploads}; others are -1, -2, ..."""
    named: dict[int, tuple[int, ...]] = {}
    for picture in Search(spans).pictures():
        apart = (PICTURES - picture.patches).flatten(1).norm(dim=1)
        nearest = int(apart.argmin()) if float(apart.min()) < 1e-6 else -1 - len(named)
        named[nearest] = tuple(sorted(picture.uploads))
    return named


# one upload ---------------------------------------------------------------------------------------


def test_every_picture_obeys_the_equations_of_its_batch() -> None:
    batch = (3, 7, 11)
    one = span(batch, 0)
    assert one.basis.shape == (N * 2, P)
    for picture in PICTURES[list(batch)]:
        assert torch.allclose(one.off(picture), one.complement, atol=1e-9)
    assert (one.off(PICTURES[4]) - one.complement).norm(dim=1).min() > 1


def test_masked_patches_have_one_thing_in_common_where_their_sum_is_sent() -> None:
    masks = torch.zeros(3, N, dtype=torch.bool)
    masks[:, 1] = True  # in all pictures
    masks[0, 3] = True  # in one
    one = span((3, 7, 11), 0, masks)
    assert len(one.basis) == N * 2 + 1 - 1
    for picture, hidden in zip(PICTURES[[3, 7, 11]], masks, strict=True):
        assert torch.allclose(one.off(picture), one.known(~hidden), atol=1e-9)


def test_without_that_sum_they_lie_in_the_span() -> None:
    masks = torch.zeros(2, N, dtype=torch.bool)
    masks[:, 1] = True
    made = system((3, 7), 0, masks)
    one = batch_span(PatchSystem(made.rows, made.total, made.hidden), 0, 2, EPS, can_mask=True)
    assert len(one.basis) == N + 1
    assert one.off(PICTURES[[3, 7], 1]).norm(dim=1).max() < 1e-9
    assert not one.complement[1].any()


@pytest.mark.parametrize("noise", [1e-7, 1e-5])
def test_errors_are_what_the_upload_says_of_itself(noise: float) -> None:
    """The bound holds, and is not a hundred times too large."""
    one = span((3, 7, 11, 15), 0, noise=noise)
    everywhere = torch.ones(N, dtype=torch.bool)
    for picture in PICTURES[[3, 7, 11, 15]]:
        missed = (one.off(picture) - one.complement).norm(dim=1)
        expected = one.expected(picture, everywhere)
        assert (missed < 2 * expected).all()
        assert (missed > expected / 20).all()


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_the_rank_shows_how_many_pictures_a_batch_holds(count: int) -> None:
    made = system(tuple(range(count)), 0, noise=1e-9)
    assert pictures_by_rank(made.total[0], N, 1e-9) == count


def test_equal_patches_leave_the_number_of_pictures() -> None:
    pictures = PICTURES[:3].clone()
    pictures[:, 0] = 0.25  # a border in all pictures
    rows = draw(3, N, D, seed=5)
    total = torch.einsum("bid,bip->dp", rows, pictures) + 1e-9 * draw(D, P, seed=6)
    assert pictures_by_rank(total, N, 1e-9) == 3


# several uploads ----------------------------------------------------------------------------------


def test_two_uploads_that_share_a_picture_give_it() -> None:
    assert found([span((0, 1, 2), 0), span((0, 3, 4), 1)]) == {0: (0, 1)}


def test_several_shared_pictures_are_told_apart_by_a_third_upload() -> None:
    both = [span((0, 1, 2), 0), span((0, 1, 3), 1)]
    assert not found(both)
    assert found([*both, span((1, 4, 5), 2)]) == {1: (0, 1, 2)}


def test_a_group_counts_once() -> None:
    """Of three uploads that share two pictures no pair adds to the group of all."""
    uploads = [span((0, 1, 2), 0), span((0, 1, 3), 1), span((0, 1, 4), 2)]
    search = Search(uploads)
    assert not search.pictures()
    assert [sorted(group.uploads) for group in search.groups] == [[0, 1, 2]] * 2


def test_a_client_that_shuffles_by_epochs_gives_all() -> None:
    spans: list[BatchSpan] = []
    held: list[Batch] = []
    for epoch in range(4):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(0, 9, 3):
            held.append(tuple(order[first : first + 3]))
            spans.append(span(held[-1], len(spans)))
    expected = {
        picture: tuple(number for number, batch in enumerate(held) if picture in batch)
        for picture in range(9)
    }
    assert found(spans) == expected


def test_every_further_upload_makes_it_more_exact() -> None:
    uploads = [span((0, 2 * k + 1, 2 * k + 2), k, noise=1e-6) for k in range(6)]
    errors = []
    for count in (2, 6):
        (picture,) = Search(uploads[:count]).pictures()
        errors.append(float((picture.patches - PICTURES[0]).norm()))
        assert errors[-1] < float(picture.error.norm()) < 30 * errors[-1]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("sent", [True, False])
def test_a_shared_mask_takes_one_more_upload(sent: bool) -> None:
    """A patch that was masked in both uploads stays open until it is seen."""

    def upload(batch: Batch, seed: int, places: list[int]) -> BatchSpan:
        masks = torch.zeros(2, N, dtype=torch.bool)
        masks[:, places] = True
        made = system(batch, seed, masks)
        sums = made.hidden_sum if sent else None
        made = PatchSystem(made.rows, made.total, made.hidden, sums)
        return batch_span(made, 0, 2, EPS, can_mask=True)

    two = [upload((0, 1), 0, [0, 1, 2]), upload((0, 2), 1, [1, 2, 3])]
    (partly,) = Search(two).pictures()
    assert len(partly.basis) == (1 if sent else 2)
    assert not partly.determined
    assert found([*two, upload((0, 3), 2, [0, 4])]) == {0: (0, 1, 2)}


def test_a_mask_for_every_picture_is_found_with_it() -> None:
    masks = [torch.zeros(2, N, dtype=torch.bool) for _ in range(3)]
    masks[0][0, 1] = masks[0][1, 3] = True
    masks[1][0, 2] = masks[1][1, 2] = True
    masks[2][0, 4] = masks[2][1, 0] = True
    uploads = [span((0, number + 1), number, mask) for number, mask in enumerate(masks)]
    (picture,) = Search(uploads).pictures()
    assert picture.determined
    assert torch.allclose(picture.patches, PICTURES[0], atol=1e-7)
    shown = {upload: ~picture.visible[at] for at, upload in enumerate(picture.uploads)}
    for upload, mask in enumerate(masks):
        assert torch.equal(shown[upload], mask[0])


def test_pairs_with_too_few_equations_wait_for_a_third_upload() -> None:
    """2 (p - N (B - 1)) <= p: any two batches agree, so three are asked."""
    short = PICTURES[:, :, :18]

    def upload(batch: Batch, seed: int) -> BatchSpan:
        rows = draw(len(batch), N, D, seed=seed)
        total = torch.einsum("bid,bip->dp", rows, short[list(batch)])
        made = PatchSystem(rows.sum(0)[None], total[None], torch.zeros(1, N, dtype=torch.bool))
        return batch_span(made, 0, len(batch), EPS)

    spans = [upload((0, 1, 2), 0), upload((3, 4, 5), 1), upload((0, 6, 7), 2), upload((0, 8, 9), 3)]
    (picture,) = Search(spans).pictures()
    assert sorted(picture.uploads) == [0, 2, 3]
    assert torch.allclose(picture.patches, short[0], atol=1e-7)


def test_errors_that_hide_a_contradiction_are_no_agreement() -> None:
    noise = 1.0  # of the size of what is known
    pair = [span((0, 1, 2), 0, noise=noise), span((0, 3, 4), 1, noise=noise)]
    assert not Search(pair).pictures()


def test_a_direction_that_is_noise_is_not_taken_for_a_difference() -> None:
    """Equal patches at a position of the whole batch: the span has one direction less."""
    pictures = PICTURES.clone()
    pictures[:, 2] = 0.5

    def upload(batch: Batch, seed: int) -> BatchSpan:
        rows = draw(len(batch), N, D, seed=seed)
        total = torch.einsum("bid,bip->dp", rows, pictures[list(batch)])
        total = total + 1e-8 * draw(D, P, seed=50 + seed)
        made = PatchSystem(rows.sum(0)[None], total[None], torch.zeros(1, N, dtype=torch.bool))
        return batch_span(made, 0, len(batch), EPS)

    first, second = upload((0, 1, 2), 0), upload((0, 3, 4), 1)
    assert int(first.strength.isinf().sum()) == 2
    (picture,) = Search([first, second]).pictures()
    assert (picture.patches - pictures[0]).abs().max() < 1e-5
    assert not Search([first, upload((5, 6, 7), 2)]).pictures()


# `shared_picture` on a tiny client: what is found and verified, and why it does not apply ---------

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 4}
"""N = 4 patches of p = 192 pixels, width D = 48: batches of up to 11."""


def model_of(**changes: object) -> LoadedModel:
    shape = SHAPE | {"num_classes": 10, "mean": 0.5, "std": 0.25} | changes
    return tiny_model(shape, "conditioned")


def attack_of(uploads: int) -> Attack:
    return find_attack("shared_picture", {"uploads": uploads, "prior": "stationary"})


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
    assert made.images.shape == (4, 3, 16, 16)


@pytest.mark.parametrize("augment", ["flip", "crop"])
def test_augmented_pictures_are_found_where_they_recur_and_no_others(augment: str) -> None:
    images = planted_images(8, 16)
    client = replace(FRESH, augment=augment)
    made = run(attack_of(4), view_of(model_of(), images, 4, client))
    feeding, ids = Feeding(client, "a", 0.3, 8, 0), [str(n) for n in range(8)]
    fed = torch.cat([feeding.photographs(images, ids, round) for round in range(4)])
    for picture in made.images[made.diagnostics["certain"].bool()]:
        assert psnr(picture.expand_as(fed), fed).max() > 100


@pytest.mark.nightly
@pytest.mark.parametrize("mask", ["batch", "image"])
def test_masks_do_not_keep_it_from_the_plain_pictures(mask: str) -> None:
    images = planted_images(8, 16)
    client = ClientConfig(batch=2, partners="fresh", mask=mask)
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


def test_the_largest_batch_is_solved() -> None:
    images = planted_images(22, 16)
    client = replace(FRESH, batch=11)
    made = run(attack_of(4), view_of(model_of(), images, 4, client))
    assert made.diagnostics["certain"].sum() > 0


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
    assert made.certain.nonzero().flatten().tolist() == [0, 4, 5, 8]
    assert made.exact == 2
    shared = made.images[made.certain].double()
    assert (psnr(shared[[0, 3]], images[[1, 5]]) > 90).all()
    assert "4 of 12 places" in leak.verdict
    assert any("batch 4: shared_picture" in note for note in leak.notes)


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


# uploads that mask patches of one border: it is no picture that they share ------------------------

FRAMED = SHAPE | {"img_size": 32, "embed_dim": 96}
"""N = 16 patches of p = 192 pixels in four rows, the first and the last of which are border."""
CLIENTS = [("white", "image", 2), ("black", "image", 4), ("textured", "batch", 4)]
each_client = pytest.mark.parametrize(("border", "mask", "batch"), CLIENTS)


def framed(count: int, border: str) -> Tensor:
    """Pictures that differ in their two middle rows of patches alone."""
    images = planted_images(count + 1, 32)
    frame = {"white": torch.ones_like(images[0]), "black": 0 * images[0]}
    frame["textured"] = images[-1]
    rows = [*range(8), *range(24, 32)]
    images[:, :, rows] = frame[border][:, rows]
    return images[:count]


def view_with(border: str, mask: str, batch: int, rounds: int = 3) -> tuple[AttackerView, Tensor]:
    """What is seen of a client that masks framed pictures, and these pictures."""
    images = framed(16, border)
    client = ClientConfig(batch=batch, partners="fresh", mask=mask)
    return seen(images, client, "c", rounds), images


def seen(images: Tensor, client: ClientConfig, setting: str, rounds: int = 3) -> AttackerView:
    """What is seen of a client that sends float32."""
    model = model_of(**FRAMED, unknown_embedding=True)
    view = view_of(model, images, rounds, client, setting)
    updates = [
        replace(u, grads={n: g.float() for n, g in u.grads.items()}, dtype=torch.float32)
        for u in view.updates
    ]
    return replace(view, updates=updates)


def nearest(made: Tensor, images: Tensor) -> Tensor:
    """PSNR of each reconstruction to that one of the images that is nearest."""
    return torch.stack([psnr(image.expand_as(images), images).max() for image in made])


@pytest.mark.nightly
@each_client
def test_no_picture_is_certain_that_is_none(border: str, mask: str, batch: int) -> None:
    view, images = view_with(border, mask, batch)
    made = run(attack_of(3), view)
    certain = made.images[made.diagnostics["certain"].bool()]
    assert len(certain) >= 4
    quality = nearest(certain, images)
    assert quality.min() > 60
    assert len(certain) == len({int(psnr(c.expand_as(images), images).argmax()) for c in certain})


@pytest.mark.nightly
@each_client
def test_uploads_of_one_round_share_nothing(border: str, mask: str, batch: int) -> None:
    """The search is not told the rounds: the equations alone say so."""
    view, _ = view_with(border, mask, batch)
    for update in view.updates:
        search = Search(BatchUploads.of(replace(view, updates=[update])).spans)
        assert not search.pictures()
        assert not search.groups


@pytest.mark.parametrize("border", ["white", "black", "textured"])
def test_uploads_of_one_round_are_not_asked(border: str) -> None:
    """Nor are they taken to share a picture where they are equal."""
    uploads = BatchUploads.of(view_with(border, "image", 4)[0])
    assert all(uploads.rounds[a] != uploads.rounds[b] for a, b in _pairs(uploads))
    first, second = uploads.spans[0], uploads.spans[4]
    assert Search([first, second]).agreeing
    assert not Search([first, second], [0, 0]).agreeing


def _pairs(uploads: BatchUploads) -> Sequence[tuple[int, int]]:
    return sorted(Search(uploads.spans, uploads.rounds).agreeing)


def test_a_picture_of_equal_patches_alone_is_still_found() -> None:
    """All 16 patches of it are the border's."""
    images = framed(16, "white")
    images[3] = 1
    client = ClientConfig(batch=2, partners="fresh")
    view = seen(images, client, "a")
    made = run(attack_of(3), view)
    certain = made.images[made.diagnostics["certain"].bool()]
    assert nearest(images[3:4], certain.float()).max() > 60
    assert nearest(certain, images).min() > 60
