"""Gaussian priors: against formulas, against NumPy, through files and the command line."""

from __future__ import annotations

import contextlib
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from attacks.prior import files as prior_files
from attacks.prior.files import SHIPPED, find_prior, load_prior, save_prior
from attacks.prior.gaussian import (
    CHANNELS,
    SPREAD,
    GaussianPrior,
    cosine_basis,
    fit_prior,
    stationary_prior,
)
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.data import load_images
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.tensor_files import save_tensors

UNIT = Pixels(32, (0.0,) * 3, (1.0,) * 3)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def fields(prior: GaussianPrior, size: int, count: int) -> torch.Tensor:
    """Pictures drawn from a prior, (count, 3, size, size)."""
    pixels = Pixels(size, (0.0,) * 3, (1.0,) * 3)
    factor = torch.linalg.cholesky(prior.field_spectrum(size, pixels))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, size, size, 3, generator=generator, dtype=torch.float64)
    coefficients = torch.einsum("hwcd,nhwd->nchw", factor, noise)
    basis = cosine_basis(size)
    return basis.mT @ coefficients @ basis + prior.mean.view(3, 1, 1)


def test_the_cosine_basis_is_scipys_orthonormal_one() -> None:
    from scipy.fft import dctn

    picture = np.random.default_rng(0).normal(size=(12, 12))
    basis = cosine_basis(12).numpy()
    assert np.allclose(basis @ picture @ basis.T, dctn(picture, norm="ortho"))


def test_the_stationary_patch_covariance_is_its_formula() -> None:
    size, patch = 64, 4
    covariance = stationary_prior(size).patch(patch, Pixels(size, (0.0,) * 3, (1.0,) * 3))[1]
    place = np.stack(np.meshgrid(range(patch), range(patch), indexing="ij"), -1).reshape(-1, 2)
    distance = np.linalg.norm(place[:, None] - place[None], axis=-1)
    expected = SPREAD**2 * np.exp(-distance / (size / 8))
    same, other = covariance[:16, :16].numpy(), covariance[:16, 16:32].numpy()
    # The spectrum ends at three quarters of a cycle and the torus is finite: a few percent.
    assert np.allclose(same, expected, rtol=0.06)
    assert np.allclose(other, CHANNELS * same, rtol=1e-6)


def test_a_prior_moves_to_the_models_mean_and_std() -> None:
    prior = stationary_prior(32)
    moved = Pixels(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.5))
    mean, covariance = prior.patch(2, moved)
    plain = prior.patch(2, UNIT)[1]
    std = torch.tensor(moved.std).double().repeat_interleave(4)
    assert torch.allclose(covariance, plain / std / std.unsqueeze(1))
    assert torch.allclose(mean[::4], (0.5 - torch.tensor(moved.mean).double()) / std[::4])
    assert torch.allclose(prior.mean_colour(moved), mean[::4])
    ratio = prior.field_spectrum(32, UNIT) / prior.field_spectrum(32, moved)
    assert torch.allclose(ratio[3, 5], std[::4].outer(std[::4]))


def test_fitting_recovers_the_field_that_pictures_were_drawn_from() -> None:
    truth = stationary_prior(32)
    pictures = fields(truth, 32, 400)
    found = fit_prior(pictures, patch=4, size=32)
    assert torch.allclose(found.mean, truth.mean, atol=0.02)
    ours, theirs = found.field_spectrum(32, UNIT), truth.field_spectrum(32, UNIT)
    ring = ours[4:28, 4:28].diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(ring, theirs[4:28, 4:28].diagonal(dim1=-2, dim2=-1), rtol=0.25)


def test_the_fitted_patch_covariance_is_numpys_over_tiles_and_their_mirrors() -> None:
    pictures = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    found = fit_prior(pictures, patch=4, size=8)
    tiles = []
    for picture in pictures.numpy():
        for image in (picture, picture[:, :, ::-1]):
            for row in (0, 4):
                for column in (0, 4):
                    tiles.append(image[:, row : row + 4, column : column + 4].ravel())
    assert np.allclose(found.patch_mean.numpy(), np.mean(tiles, 0))
    assert np.allclose(found.patch_covariance.numpy(), np.cov(np.array(tiles).T, ddof=0))


def test_a_saved_prior_comes_back(tmp_path: Path) -> None:
    prior = fit_prior(fields(stationary_prior(16), 16, 30), patch=4, size=16)
    save_prior(prior, tmp_path / "p.safetensors")
    again = load_prior(tmp_path / "p.safetensors")
    assert again.description == prior.description
    assert again.patch_size == 4
    assert torch.allclose(again.patch_covariance, prior.patch_covariance, atol=1e-7)
    assert torch.equal(again.patch_covariance, again.patch_covariance.mT)
    assert torch.allclose(again.spectrum, prior.spectrum, rtol=1e-5)


@pytest.mark.parametrize(("patch", "size"), [(16, 192), (7, 56)])
def test_shipped_priors_are_covariances_of_many_pictures(patch: int, size: int) -> None:
    prior = find_prior("fitted", patch=patch, size=size)
    mean, covariance = prior.patch(patch, Pixels(size, (0.5,) * 3, (0.5,) * 3))
    values = torch.linalg.eigvalsh(covariance)
    assert values.min() > -1e-5 * values.max()
    assert mean.abs().max() < 0.3  # near grey
    assert "400 pictures" in prior.description


def test_shipped_priors_are_small() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 1_500_000


def test_the_command_fits_and_the_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for index, image in enumerate(load_images("embedded", size=64, limit=12)):
        array = (image.image * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(images / f"{index}.png")
    out = tmp_path / "fitted.safetensors"
    options = ["--images", str(images), "--patch", "4", "--size", "64", "--out", str(out)]
    assert main(["fit-prior", *options]) == 0
    assert "fitted from 12 pictures at 64×64" in capsys.readouterr().out
    prior = find_prior(str(out), patch=4, size=64)
    assert math.isclose(float(prior.mean.mean()), 0.4, abs_tol=0.15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--patch", "1"], "at least 2 pixels and at most 48, got 1"),
        (["--patch", "1000000000"], "at most 48, got 1000000000"),
        (["--size", "30"], "multiple of the patch's 4 pixels, got 30"),
        (["--size", "4000000000"], "got 4000000000 (at most 2048)"),
        (["--limit", "0"], "--limit: expected 1 picture or more, got 0"),
        (["--out", "x.pt"], "ends in .safetensors"),
        (["--images", "nowhere"], "nowhere"),
        (["--limit", "1"], "needs at least 192 patches, got"),
    ],
)
def test_wrong_commands_are_told(
    change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, image in enumerate(load_images("embedded", size=32, limit=2)):
        array = (image.image * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(tmp_path / f"{index}.png")
    options = {"--images": str(tmp_path), "--patch": "4", "--size": "32", "--out": "x.safetensors"}
    options |= {change[0]: change[1]}
    assert main(["fit-prior", *(word for pair in options.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("patch", "size"), [(14, 224), (8, 64), (4, 32)])
def test_a_derived_prior_knows_more_of_photographs_than_the_stationary_one(
    patch: int, size: int
) -> None:
    """Half of each patch's directions are seen; the posterior mean fills in the other half."""
    images = torch.stack([image.image for image in load_images("embedded", size=size, limit=10)])
    patches = torch.cat([to_patches(image.double(), patch) for image in images])[::7]
    length = patches.shape[1]
    seen = torch.linalg.qr(torch.randn(length, length, generator=seeded()).double()).Q
    seen = seen[:, : length // 2]

    def filled_psnr(prior: GaussianPrior) -> float:
        mean, covariance = prior.patch(patch, Pixels(size, (0.0,) * 3, (1.0,) * 3))
        reached = covariance @ seen
        known = ((patches - mean) @ seen).mT
        filled = mean + (reached @ torch.linalg.solve(seen.mT @ reached, known)).mT
        return -10 * math.log10(float((filled - patches).square().mean()))

    derived = find_prior("fitted", patch=patch, size=size)
    assert "the patch covariance is derived from its spectrum" in derived.description
    assert derived.patch_size is None
    assert filled_psnr(derived) > filled_psnr(find_prior("stationary", patch=patch, size=size))


def test_the_derived_field_is_that_of_pictures_of_the_nearest_size() -> None:
    for size, fitted_at in ((224, 224), (160, 224), (64, 56), (32, 56)):
        derived = find_prior("fitted", patch=4, size=size)
        assert round(derived.fitted_size) == fitted_at
        assert f"{fitted_at}×{fitted_at}" in derived.description


def test_unknown_priors_and_other_files_are_told(tmp_path: Path) -> None:
    shipped = "'fitted' .shipped for patch sizes 16, 7, derived for others.*mjp fit-prior"
    with pytest.raises(UserError, match=shipped):
        find_prior("somewhere.safetensors", patch=16, size=192)
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="expected a prior written by `mjp fit-prior`"):
        load_prior(other)


def _spoiled(name: str, change: Any) -> Any:
    def spoil(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        tensors[name] = change(tensors[name].clone())

    return spoil


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = math.nan
    return tensor


def _lopsided(spectrum: torch.Tensor) -> torch.Tensor:
    spectrum[:, 0, 1] *= 1.1
    return spectrum


PATCH = "Input should be"
SPOILED: list[tuple[Any, str]] = [
    (lambda t, m: m.pop("patch"), "patch: this field is needed"),
    (lambda t, m: m.update(patch="seven"), f"patch: {PATCH} a valid integer"),
    (lambda t, m: m.update(patch="1"), f"patch: {PATCH} greater than or equal to 2"),
    (lambda t, m: m.update(patch="1000000000"), f"patch: {PATCH} less than or equal to 48"),
    (lambda t, m: m.update(patch="8"), "the shape (147,) where patches of 8×8 need (192,)"),
    (lambda t, m: m.update(description="x" * 501), "description: String should have at most 500"),
    (lambda t, m: t.pop("spectrum"), "no tensor spectrum"),
    (lambda t, m: t.clear(), "no tensor mean, frequencies"),
    (_spoiled("patch_covariance", lambda x: x[:-1]), "patch_covariance: expected a prior"),
    (_spoiled("patch_covariance", torch.neg), "an eigenvalue below 0, as no covariance has"),
    (_spoiled("patch_covariance", torch.zeros_like), "an eigenvalue below 0"),
    (_spoiled("patch_covariance", _not_finite), "1 of 10878 numbers that are NaN or infinite"),
    (_spoiled("spectrum", lambda x: x[:, :, :0]), "spectrum: expected a prior"),
    (_spoiled("spectrum", torch.neg), "as no covariance has"),
    (_spoiled("spectrum", _lopsided), "matrices that are not symmetric"),
    (_spoiled("spectrum", lambda x: x.int()), "entries of type I32 where F64, F32, F16, BF16"),
    (_spoiled("frequencies", lambda x: x.flip(0)), "numbers that do not ascend from above 0"),
    (_spoiled("frequencies", lambda x: x - 1), "numbers that do not ascend from above 0"),
    (_spoiled("frequencies", lambda x: x[:1]), "frequencies: expected a prior"),
    (_spoiled("frequencies", lambda x: x[0]), "the shape ()"),
    (_spoiled("mean", lambda x: x[:2]), "the shape (2,)"),
    (_spoiled("mean", _not_finite), "1 of 3 numbers that are NaN or infinite"),
    (_spoiled("patch_mean", lambda x: x[None]), "the shape (1, 147)"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_file_that_only_looks_like_a_prior_is_refused(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    shipped = Path(prior_files.SHIPPED) / "patch7.safetensors"
    tensors, metadata = load_file(shipped), {"patch": "7", "description": "x"}
    spoil(tensors, metadata)
    path = tmp_path / "spoiled.safetensors"
    save_tensors(path, {n: t.contiguous() for n, t in tensors.items()}, metadata)
    with pytest.raises(UserError) as caught:
        load_prior(path)
    assert message in str(caught.value)
    assert "spoiled.safetensors" in str(caught.value)
    assert "Fit it again: mjp fit-prior --images DIR --patch P" in str(caught.value)


def test_a_damaged_prior_is_refused_or_read_whole(tmp_path: Path) -> None:
    """Cut off anywhere, or with a flipped bit anywhere in its header."""
    good = (Path(prior_files.SHIPPED) / "patch7.safetensors").read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    draw = random.Random(0)
    path = tmp_path / "damaged.safetensors"
    for _ in range(60):
        path.write_bytes(good[: draw.randrange(len(good))])
        with pytest.raises(UserError, match=r"damaged\.safetensors"):
            load_prior(path)
        changed = bytearray(good)
        changed[draw.randrange(header)] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(UserError):
            assert load_prior(path).patch_size is not None


def test_a_picture_that_cannot_be_read_is_named_and_the_others_are_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        pixels = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.png")
    (images / "1.png").write_bytes(b"no image")
    words = ["--images", str(images), "--patch", "4", "--size", "64"]
    assert main(["fit-prior", *words, "--out", str(tmp_path / "p.safetensors")]) == 3
    printed, said = capsys.readouterr()
    assert "fitted from 2 pictures" in printed
    assert said == "1 left out:\n  1.png: not an image in a format that Pillow can read\n"
    for path in images.iterdir():
        path.write_bytes(b"no image")
    assert main(["fit-prior", *words, "--out", str(tmp_path / "q.safetensors")]) == 2
    said = capsys.readouterr().err
    assert "0.png: not an image in a format" in said
    assert "error: " in said
