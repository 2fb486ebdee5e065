"""The ladder on real weights and photographs: what was promised of each rung."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from attacks import find_attack
from attacks.controls import mean_image, oracle_inverse
from mjp_privacy.client.feeding import SETTINGS
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.data import Preprocessing, open_images
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.mjp_vit import with_closed_form_block

PIXELS = Pixels(192, (0.5,) * 3, (0.5,) * 3)
WEIGHTS = Path("weights") / "vit_tiny_patch16_224_timm.safetensors"
Pictures = tuple[Tensor, Tensor, list[str]]


@cache
def real_model(folder: Path) -> LoadedModel:
    return load_model(
        "vit_tiny_patch16_224",
        checkpoint=folder / WEIGHTS,
        img_size=192,
        mean=0.5,
        std=0.5,
        unknown_embedding=True,
        unknown_init="mean_position",
    )


@cache
def stored(folder: Path) -> Pictures:
    """The images of april_images_192."""
    known = json.loads((folder / "reference" / "april_images_192.json").read_text())["images"]
    with zipfile.ZipFile(folder / "reference" / "april_images_192.zip") as file:
        opened = [Image.open(io.BytesIO(file.read(name))) for name in known]
        images = torch.stack([Preprocessing(192)(picture) for picture in opened])
    return images, torch.tensor([entry["label"] for entry in known.values()]), list(known)


@cache
def attacked_classes(folder: Path, count: int) -> Pictures:
    """The first photographs, by name, of classes that no prior was fitted on."""
    source = open_images(folder / "data" / "imagenet-sample-600.zip")
    records = [r for r in source.records if r.label is not None and r.label % 5 == 0][:count]
    images = torch.stack([Preprocessing(192)(source.decode(record)) for record in records])
    labels = torch.tensor([record.label for record in records])
    return images, labels, [record.image_id for record in records]


@dataclass(frozen=True)
class Outcome:
    found: Reconstruction
    inputs: ClientInput
    target: Tensor

    @property
    def psnr(self) -> Tensor:
        assert self.found.images is not None
        return psnr(self.found.images.float(), self.target)

    def region(self, images: Tensor, *, hidden: bool) -> Tensor:
        """PSNR (m,) over the masked or the unmasked patches."""
        assert self.inputs.mask is not None
        error = to_patches((images.double() - self.target.double()).square(), 16).mean(-1)
        wanted = self.inputs.mask == hidden
        return -10 * torch.log10((error * wanted).sum(-1) / wanted.sum(-1))


def run(
    folder: Path,
    pictures: Pictures,
    name: str,
    setting: str,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Outcome:
    attack = find_attack(name, options)
    model = real_model(folder)
    if attack.victim == "april_block":
        model = with_closed_form_block(model)  # type: ignore[assignment]
    model = model.to(dtype) if attack.victim == "april_block" else _copy(folder, dtype)
    images, labels, ids = pictures
    rounds = [
        SETTINGS[setting].prepare(
            images, labels, ids, patch_size=16, gamma=0.27, round=round, seed=0
        )
        for round in range(attack.uploads)
    ]
    client = FedSGDClient(model)
    updates = [client.update(inputs, names=list(attack.needs(model))) for inputs in rounds]
    against = SETTINGS[setting].against
    view = AttackerView(model, updates, PIXELS, labels, against)
    assert attack.unsupported(view) is None
    found = attack.run(view, generator=torch.Generator())
    return Outcome(found, rounds[0], images if against == "plain" else rounds[0].images)


@cache
def _copy(folder: Path, dtype: torch.dtype) -> LoadedModel:
    import copy

    return copy.deepcopy(real_model(folder)).to(dtype)


def test_patch_gradient_is_exact_on_the_unmodified_model(shared_data: Path) -> None:
    found = run(shared_data, stored(shared_data), "patch_gradient", "a")
    assert found.psnr.mean() >= 125


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
        beside = psnr(oracle_inverse(real_model(shared_data), pictures[0]), pictures[0])
    else:
        beside = run(shared_data, pictures, "april", "a", dtype).psnr
    assert ours.mean() >= beside.mean() + gain


def test_masks_are_read_off_the_upload(shared_data: Path) -> None:
    found = run(shared_data, stored(shared_data), "mask_locator", "c")
    assert found.found.mask is not None
    assert torch.equal(found.found.mask, found.inputs.mask)


@pytest.mark.nightly
def test_one_upload_gives_the_unmasked_region(shared_data: Path) -> None:
    """50 named photographs, float32, gamma .27."""
    pictures = attacked_classes(shared_data, 50)
    found = run(shared_data, pictures, "masked_span", "c")
    view = AttackerView(real_model(shared_data), [], PIXELS)
    floor = mean_image(view).expand_as(found.target)
    assert found.found.images is not None
    visible = found.region(found.found.images, hidden=False)
    assert visible.mean() >= 22
    assert visible.mean() >= found.region(floor, hidden=False).mean() + 6


@pytest.mark.nightly
def test_one_upload_as_it_was_fed(shared_data: Path) -> None:
    pictures = attacked_classes(shared_data, 20)
    assert run(shared_data, pictures, "masked_span", "b").psnr.mean() >= 18


@pytest.mark.nightly
def test_two_uploads(shared_data: Path) -> None:
    pictures = attacked_classes(shared_data, 50)
    found = run(shared_data, pictures, "multi_round", "c", uploads=2)
    assert found.psnr.clamp(max=100).mean() >= 20


@pytest.mark.nightly
def test_six_uploads_give_the_plain_picture(shared_data: Path) -> None:
    pictures = attacked_classes(shared_data, 20)
    assert run(shared_data, pictures, "multi_round", "c", uploads=6).psnr.median() >= 100


@pytest.mark.nightly
def test_one_upload_of_8_bit_pixels(shared_data: Path) -> None:
    pictures = attacked_classes(shared_data, 10)
    exact = run(shared_data, pictures, "pixel_lattice", "c").psnr.clamp(max=100)
    span = run(shared_data, pictures, "masked_span", "c").psnr
    assert exact.median() >= span.median() + 10
