"""Attacks on real weights and photographs: what was promised of each, APRIL per image."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from attacks import find_attack
from attacks.controls import mean_image, oracle_inverse
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr, quantise
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.planted import best, planted_view

HALF = (0.5,) * 3


@dataclass(frozen=True)
class Pictures:
    images: Tensor
    labels: Tensor
    ids: Sequence[str]

    def first(self, count: int) -> Pictures:
        return Pictures(self.images[:count], self.labels[:count], self.ids[:count])


@cache
def real_model(
    folder: Path, size: int = 192, masks: bool = True, dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """The trained ViT-Ti/16; masks: whether it has E_unk."""
    weights = folder / "weights" / "vit_tiny_patch16_224_timm.safetensors"
    unknown: dict[str, Any] = {"unknown_embedding": masks}
    unknown |= {"unknown_init": "mean_position"} if masks else {}
    named = {"img_size": size, "mean": 0.5, "std": 0.5}
    return load_model("vit_tiny_patch16_224", checkpoint=weights, **named, **unknown).to(dtype)


@cache
def expected(folder: Path) -> dict[str, dict[str, float]]:
    """What was computed elsewhere, by image."""
    return json.loads((folder / "reference" / "april_images_192.json").read_text())["images"]


@cache
def stored(folder: Path) -> Pictures:
    """The images for which it was."""
    known = expected(folder)
    with zipfile.ZipFile(folder / "reference" / "april_images_192.zip") as file:
        opened = [Image.open(io.BytesIO(file.read(name))) for name in known]
        images = torch.stack([Preprocessing(192)(picture) for picture in opened])
    return Pictures(images, torch.tensor([one["label"] for one in known.values()]), tuple(known))


@cache
def photographs(
    folder: Path, size: int = 192, count: int = 50, *, mixed: bool = False, every: bool = False
) -> Pictures:
    """The first photographs, by name or in a fixed mix, of classes that no prior was fitted on, or
    of every class."""
    source = open_images(folder / "data" / "imagenet-sample-600.zip")
    records = [r for r in source.records if r.label is not None and (every or r.label % 5 == 0)]
    if mixed:
        order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0))
        records = [records[place] for place in order.tolist()]
    images = torch.stack([Preprocessing(size)(source.decode(r)) for r in records[:count]])
    labels = torch.tensor([record.label for record in records[:count]])
    return Pictures(images, labels, [record.image_id for record in records[:count]])


@dataclass(frozen=True)
class Outcome:
    found: Reconstruction
    inputs: ClientInput
    target: Tensor

    @property
    def psnr(self) -> Tensor:
        return psnr(self.found.images.float(), self.target)

    def region(self, images: Tensor, *, hidden: bool) -> Tensor:
        """PSNR (m,) over the masked or the unmasked patches."""
        error = to_patches((images.double() - self.target.double()).square(), 16).mean(-1)
        wanted = self.inputs.mask == hidden
        return -10 * torch.log10((error * wanted).sum(-1) / wanted.sum(-1))


def run(
    folder: Path,
    pictures: Pictures,
    name: str,
    setting: str,
    dtype: torch.dtype = torch.float32,
    client: ClientConfig | None = None,
    **options: object,
) -> Outcome:
    """An attack on the ViT whose client feeds these pictures in a setting."""
    size = pictures.images.shape[-1]
    attack, model = find_attack(name, options), real_model(folder, size, dtype=dtype)
    view, fed = planted_view(model, attack, setting, **vars(pictures), client=client)
    assert attack.unsupported(view) is None
    found = attack.run(view, generator=torch.Generator())
    return Outcome(found, fed, pictures.images if view.against == "plain" else fed.images)


# april, its ceiling, and breaching's own code -----------------------------------------------------


def values(folder: Path, key: str) -> Tensor:
    return torch.tensor([one[key] for one in expected(folder).values()]).double()


def test_ceiling_per_image(shared_data: Path) -> None:
    images = stored(shared_data).images
    found = psnr(oracle_inverse(real_model(shared_data, masks=False), images), images)
    assert (found - values(shared_data, "ceiling")).abs().max() <= 0.05


@pytest.mark.parametrize("engine", ["batched", "breaching"])
def test_april_gives_the_expected_psnr(shared_data: Path, engine: str) -> None:
    """In float64 of each image, in float32 in the mean."""
    exact, rough = (
        run(shared_data, stored(shared_data), "april", "a", dtype, engine=engine)
        for dtype in (torch.float64, torch.float32)
    )
    assert (exact.psnr - values(shared_data, "april_fp64")).abs().max() <= 0.05
    ratio = exact.found.diagnostics["cond_a"] / values(shared_data, "cond_fp64")
    assert (ratio - 1).abs().max() <= 1e-3
    assert exact.found.diagnostics["rank_a"].tolist() == [145.0] * 6
    assert abs(rough.psnr.mean() - values(shared_data, "april_fp32").mean()) <= 2.0
    assert (rough.found.diagnostics["rank_a"] < 145).all()


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "gain"), [(torch.float64, 10), (torch.float32, 9)])
@pytest.mark.parametrize("prior", ["fitted", "stationary"])
def test_a_prior_lifts_april(
    shared_data: Path, dtype: torch.dtype, gain: float, prior: str
) -> None:
    """Over the rank ceiling with exact gradients, over APRIL itself with rounded ones."""
    pictures = stored(shared_data)
    ours = run(shared_data, pictures, "april_prior", "a", dtype, prior=prior).psnr
    if dtype == torch.float64:
        beside = psnr(oracle_inverse(real_model(shared_data), pictures.images), pictures.images)
    else:
        beside = run(shared_data, pictures, "april", "a", dtype).psnr
    assert ours.mean() >= beside.mean() + gain


# single pictures ----------------------------------------------------------------------------------


def test_patch_gradient_is_exact_on_the_unmodified_model(shared_data: Path) -> None:
    assert run(shared_data, stored(shared_data), "patch_gradient", "a").psnr.mean() >= 125


def test_more_patches_than_the_width_are_exact_in_8_bits(shared_data: Path) -> None:
    """At 224 px 196 patches and a width of 192, of pixels of 8 bits; of others nothing is said."""
    pictures, attack = photographs(shared_data, 224, 4), find_attack("patch_integers")
    model = real_model(shared_data, 224, masks=False)
    view, fed = planted_view(model, attack, "a", **vars(pictures))
    assert attack.unsupported(view) is None
    found = attack.run(view, generator=torch.Generator())
    assert torch.equal(quantise(found.images.double()), quantise(fed.images.double()))
    assert found.diagnostics["certain"].tolist() == [1] * 4
    between = replace(pictures, images=0.9 * pictures.images)
    view, _ = planted_view(model, attack, "a", **vars(between))
    found = attack.run(view, generator=torch.Generator())
    assert sorted(found.inapplicable) == [*range(4)]
    assert found.diagnostics["certain"].tolist() == [0] * 4


def test_masks_are_read_off_the_upload(shared_data: Path) -> None:
    found = run(shared_data, stored(shared_data), "mask_locator", "c")
    assert torch.equal(found.found.mask, found.inputs.mask)


@pytest.mark.nightly
def test_one_upload_gives_the_unmasked_region(shared_data: Path) -> None:
    """50 named photographs, float32, gamma .27."""
    found = run(shared_data, photographs(shared_data), "masked_span", "c")
    view = AttackerView(real_model(shared_data), [], Pixels(192, HALF, HALF))
    floor = mean_image(view).expand_as(found.target)
    visible = found.region(found.found.images, hidden=False)
    assert visible.mean() >= 22
    assert visible.mean() >= found.region(floor, hidden=False).mean() + 6


@pytest.mark.nightly
def test_one_upload_as_it_was_fed_two_and_six(shared_data: Path) -> None:
    pictures = photographs(shared_data)
    assert run(shared_data, pictures.first(20), "masked_span", "b").psnr.mean() >= 18
    two = run(shared_data, pictures, "multi_round", "c", uploads=2)
    assert two.psnr.clamp(max=100).mean() >= 20
    six = run(shared_data, pictures.first(20), "multi_round", "c", uploads=6)
    assert six.psnr.median() >= 100


def test_uploads_of_more_patches_than_the_width(shared_data: Path) -> None:
    """At 224 px, where eight show each patch of these often enough."""
    eight = run(shared_data, photographs(shared_data, 224, 3), "multi_round", "c", uploads=8)
    assert eight.psnr.min() > 80


@pytest.mark.nightly
def test_one_upload_of_8_bit_pixels(shared_data: Path) -> None:
    pictures = photographs(shared_data).first(10)
    exact = run(shared_data, pictures, "pixel_lattice", "c").psnr.clamp(max=100)
    span = run(shared_data, pictures, "masked_span", "c").psnr
    assert exact.median() >= span.median() + 10


@pytest.mark.nightly
def test_under_autocast_more_uploads_give_more_and_six_nearly_everything(
    shared_data: Path,
) -> None:
    given, medians = (shared_data, photographs(shared_data).first(5), "multi_round", "c"), {}
    for uploads in (1, 2, 6):
        made = run(*given, client=ClientConfig(autocast="bf16"), uploads=uploads)
        medians[uploads] = made.psnr.median()
    assert medians[1] > 17
    assert medians[2] > medians[1] + 2
    assert medians[6] > 45


# batches at 64 pixels, 16 patches -----------------------------------------------------------------


def of_batches(
    folder: Path, name: str, batch: int, steps: int, /, **options: object
) -> tuple[Reconstruction, Tensor]:
    """What an attack makes of the first steps of so many pictures, and the truth."""
    pictures = photographs(folder, 64, batch * steps, mixed=True)
    model, attack = real_model(folder, 64, masks=False), find_attack(name, options)
    client = ClientConfig(batch=batch)
    view, _ = planted_view(model, attack, "a", **vars(pictures), client=client)
    view = replace(view, labels=None)
    assert attack.unsupported(view) is None
    return attack.run(view, generator=torch.Generator().manual_seed(0)), pictures.images


def best_in_steps(found: Reconstruction, images: Tensor, batch: int) -> Tensor:
    """The PSNR (m,) of every picture's best guess within its step."""
    return torch.cat(list(map(best, found.images.split(batch), images.split(batch))))


def test_the_guesses_of_a_batch_beat_the_mixtures(shared_data: Path) -> None:
    """Twelve steps of two pictures: 18.0 against 15.2 dB on other photographs."""
    guessed, images = of_batches(shared_data, "batch_span", 2, 12)
    mixed, _ = of_batches(shared_data, "patch_gradient", 2, 12)
    gain = best_in_steps(guessed, images, 2).mean() - best_in_steps(mixed, images, 2).mean()
    assert gain > 1.5
    assert guessed.diagnostics["open_directions"].tolist() == [16.0] * 24


@pytest.mark.parametrize(
    ("name", "batch", "steps"),
    [("layer_span", 2, 2), ("layer_span", 4, 1), ("token_peeling", 4, 1)],
)
def test_all_pictures_of_a_batch_come_back_from_one_upload(
    shared_data: Path, name: str, batch: int, steps: int
) -> None:
    found, images = of_batches(shared_data, name, batch, steps)
    assert best_in_steps(found, images, batch).min() > 100
    assert bool(found.diagnostics["certain"].all())


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_every_token_without_the_gradient_of_positions(shared_data: Path, gamma: float) -> None:
    """At 96 pixels, of a plain client and under MJP, whose patches come in some order."""
    pictures = photographs(shared_data, 96, 2)
    model, attack = real_model(shared_data, 96, masks=gamma > 0), find_attack("token_peeling")
    setting = "c" if gamma else "a"
    view, fed = planted_view(model, attack, setting, gamma=gamma, **vars(pictures))
    assert "pos_embed" not in view.updates[0].grads
    view = replace(view, labels=None)
    found = attack.run(view, generator=torch.Generator().manual_seed(0))
    for one, true in zip(found.images, pictures.images, strict=True):
        away = torch.cdist(to_patches(one.double(), 16), to_patches(true.double(), 16))
        assert sorted(away.argmin(1).tolist()) == list(range(36))
        assert (
            float(away.amin(1).max()) < 0.5 / 255 * 28
        )  # each pixel of a patch within half a level
    if gamma:
        assert torch.equal(found.mask, fed.mask)
    else:
        assert psnr(found.images.float(), pictures.images).min() > 100
        assert bool(found.diagnostics["certain"].all())


@pytest.mark.nightly
def test_the_lattice_of_a_batch_of_four_gives_every_8_bit_value(shared_data: Path) -> None:
    """The second four of these photographs: all 48 differences, 64 patches, in about 9 s."""
    found, images = of_batches(shared_data, "batch_lattice", 4, 2)
    exact = (quantise(found.images).unsqueeze(1) == quantise(images)).flatten(2).all(2).any(0)
    certain = found.diagnostics["certain"].tolist()
    assert exact.tolist()[4:] == [True] * 4
    assert int(exact.sum()) >= sum(certain) >= 6
    assert found.diagnostics["lattice_found"].tolist() == [1.0] * 8


def shared_by(folder: Path, *batches: Tensor) -> Reconstruction:
    """What `shared_picture` makes of uploads of these batches of pictures, one a round."""
    pictures, model = photographs(folder, 64, 160, every=True), real_model(folder, 64, masks=False)
    attack, updates = find_attack("shared_picture", {"uploads": len(batches)}), []
    for round, chosen in enumerate(batches):
        ids = [str(number) for number in chosen.tolist()]
        inputs = ClientInput(pictures.images[chosen], pictures.labels[chosen], ids)
        client = ClientConfig(batch=len(chosen), partners="fresh")
        names = ["pos_embed", "patch_embed.proj.weight"]
        updates.append(make_upload(model, [inputs], client, names=names, round=round))
    view = AttackerView(model, updates, Pixels(64, HALF, HALF))
    return attack.run(view, generator=torch.Generator())


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "promised"), [(8, 110), (11, 100)])
def test_two_batches_give_the_picture_that_they_share(
    shared_data: Path, batch: int, promised: float
) -> None:
    images, quality = photographs(shared_data, 64, 160, every=True).images, []
    for trial in range(5):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(trial))
        other = torch.cat((order[:1], order[batch : 2 * batch - 1]))
        made = shared_by(shared_data, order[:batch], other)
        certain = made.diagnostics["certain"].bool()
        assert certain.sum() == 1
        picture = made.images[certain]
        assert torch.equal(quantise(picture), quantise(images[order[:1]].double()))
        quality.append(psnr(picture, images[order[:1]]))
    assert torch.cat(quality).median() >= promised


@pytest.mark.nightly
def test_batches_of_other_pictures_share_nothing(shared_data: Path) -> None:
    for trial in range(5):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(100 + trial))
        made = shared_by(shared_data, order[:8], order[8:16])
        assert not made.diagnostics["pairs_sharing"].any()
        assert not made.diagnostics["certain"].any()
