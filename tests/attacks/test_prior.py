"""Gaussian priors: against formulas, against NumPy, through files and the command line."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

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


def fields(prior: GaussianPrior, size: int, count: int) -> Tensor:
    """Pictures drawn from a prior, (count, 3, size, size)."""
    pixels = Pixels(size, (0.0,) * 3, (1.0,) * 3)
    factor = torch.linalg.cholesky(prior.field_spectrum(pixels))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, size, size, 3, generator=generator, dtype=torch.float64)
    coefficients = torch.einsum("hwcd,nhwd->nchw", factor, noise)
    basis = cosine_basis(size)
    return basis.mT @ coefficients @ basis + prior.mean.view(3, 1, 1)


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
    std = torch.tensor(moved.std).double().repeat_interleave(4)
    assert torch.allclose(covariance, prior.patch(2, UNIT)[1] / std / std.unsqueeze(1))
    assert torch.allclose(mean[::4], (0.5 - torch.tensor(moved.mean).double()) / std[::4])
    assert torch.allclose(prior.mean_colour(moved), mean[::4])
    ratio = prior.field_spectrum(UNIT) / prior.field_spectrum(moved)
    assert torch.allclose(ratio[3, 5], std[::4].outer(std[::4]))


def test_fitting_recovers_the_field_that_pictures_were_drawn_from() -> None:
    truth = stationary_prior(32)
    found = fit_prior(fields(truth, 32, 400), patch=4, size=32)
    assert torch.allclose(found.mean, truth.mean, atol=0.02)
    ours, theirs = found.field_spectrum(UNIT), truth.field_spectrum(UNIT)
    ring = ours[4:28, 4:28].diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(ring, theirs[4:28, 4:28].diagonal(dim1=-2, dim2=-1), rtol=0.25)


def test_the_fitted_patch_covariance_is_numpys_and_comes_back_from_its_file(tmp_path: Path) -> None:
    """Over tiles and their mirrors."""
    pictures = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    found = fit_prior(pictures, patch=4, size=8)
    both = torch.cat((pictures, pictures.flip(-1)))
    tiles = both.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 48).numpy()
    assert np.allclose(found.patch_mean.numpy(), np.mean(tiles, 0))
    assert np.allclose(found.patch_covariance.numpy(), np.cov(tiles.T, ddof=0))
    save_prior(found, tmp_path / "p.safetensors")
    again = load_prior(tmp_path / "p.safetensors")
    assert (again.description, again.patch_size) == (found.description, 4)
    assert torch.allclose(again.patch_covariance, found.patch_covariance, atol=1e-7)
    assert torch.equal(again.patch_covariance, again.patch_covariance.mT)
    assert torch.allclose(again.spectrum, found.spectrum, rtol=1e-5)


# those that are shipped ---------------------------------------------------------------------------


@pytest.mark.parametrize(("patch", "size"), [(16, 192), (7, 56)])
def test_shipped_priors_are_small_covariances_of_many_pictures(patch: int, size: int) -> None:
    prior = find_prior("fitted", patch=patch, size=size)
    mean, covariance = prior.patch(patch, Pixels(size, (0.5,) * 3, (0.5,) * 3))
    values = torch.linalg.eigvalsh(covariance)
    assert values.min() > -1e-5 * values.max()
    assert mean.abs().max() < 0.3  # near grey
    assert "400 pictures" in prior.description
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 1_500_000


@pytest.mark.parametrize(
    ("patch", "size", "fitted_at"), [(14, 224, 224), (8, 64, 56), (4, 32, 56), (4, 160, 224)]
)
def test_a_derived_prior_is_of_the_nearest_size_and_knows_more_than_the_stationary_one(
    patch: int, size: int, fitted_at: int
) -> None:
    """Half of each patch's directions are seen; the posterior mean fills in the other half."""
    images = torch.stack([image.image for image in load_images("embedded", size=size, limit=10)])
    patches = torch.cat([to_patches(image.double(), patch) for image in images])[::7]
    length = patches.shape[1]
    drawn = torch.randn(length, length, generator=torch.Generator().manual_seed(3)).double()
    seen = torch.linalg.qr(drawn).Q[:, : length // 2]

    def filled_psnr(prior: GaussianPrior) -> float:
        mean, covariance = prior.patch(patch, Pixels(size, (0.0,) * 3, (1.0,) * 3))
        reached = covariance @ seen
        known = ((patches - mean) @ seen).mT
        filled = mean + (reached @ torch.linalg.solve(seen.mT @ reached, known)).mT
        return -10 * math.log10(float((filled - patches).square().mean()))

    derived = find_prior("fitted", patch=patch, size=size)
    assert round(derived.fitted_size) == fitted_at
    assert derived.patch_size is None
    assert filled_psnr(derived) > filled_psnr(find_prior("stationary", patch=patch, size=size))


# the command, and files that are no priors --------------------------------------------------------


def command(folder: Path, **changes: str) -> int:
    """`mjp fit-prior` on the pictures of FOLDER/images."""
    options = {"images": str(folder / "images"), "out": str(folder / "x.safetensors")}
    options |= {"patch": "4", "size": "64"} | changes
    return main(["fit-prior", *(word for name in options for word in (f"--{name}", options[name]))])


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for index, image in enumerate(load_images("embedded", size=64, limit=3)):
        array = (image.image * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(tmp_path / f"images/{index}.png")
    return tmp_path


def test_the_command_fits_what_can_be_read_and_names_the_rest(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "images/1.png").write_bytes(b"no image")
    assert command(pictures) == 3
    printed, said = capsys.readouterr()
    assert "2 pictures at 64×64" in printed
    assert "1.png" in said
    assert "0.png" not in said
    prior = find_prior(str(pictures / "x.safetensors"), patch=4, size=64)
    assert math.isclose(float(prior.mean.mean()), 0.4, abs_tol=0.15)
    for path in pictures.glob("images/*.png"):
        path.write_bytes(b"no image")
    assert command(pictures) == 2
    said = capsys.readouterr().err
    assert "0.png" in said
    assert "error: " in said


def test_wrong_commands_are_told(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, named in (
        ("patch", "1", "1"),
        ("patch", "1000000000", "1000000000"),
        ("size", "30", "30"),
        ("size", "4000000000", "4000000000"),
        ("limit", "0", "--limit"),
        ("limit", "1", "patches"),
        ("out", "x.pt", ".safetensors"),
        ("images", "nowhere", "nowhere"),
    ):
        assert command(pictures, **{"size": "32", option: value}) == 2
        assert named in capsys.readouterr().err


def spoiled(name: str, change: Any) -> Any:
    def spoil(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors[name] = change(tensors[name].clone()).contiguous()

    return spoil


def lopsided(spectrum: Tensor) -> Tensor:
    spectrum[:, 0, 1] *= 1.1
    return spectrum


SPOILED = [
    (lambda t, m: m.pop("patch"), "patch"),
    (lambda t, m: m.update(patch="seven"), "patch"),
    (lambda t, m: m.update(patch="8"), "patch_mean"),
    (lambda t, m: t.pop("spectrum"), "spectrum"),
    (spoiled("mean", lambda x: x / 0), "mean"),
    (spoiled("patch_covariance", lambda x: x[:-1]), "patch_covariance"),
    (spoiled("patch_covariance", torch.neg), "patch_covariance"),
    (spoiled("patch_covariance", torch.zeros_like), "patch_covariance"),
    (spoiled("spectrum", torch.neg), "spectrum"),
    (spoiled("spectrum", lopsided), "spectrum"),
    (spoiled("frequencies", lambda x: x.flip(0)), "frequencies"),
    (spoiled("frequencies", lambda x: x - 1), "frequencies"),
    (spoiled("frequencies", lambda x: x[:1]), "frequencies"),
]


@pytest.mark.parametrize(("spoil", "named"), SPOILED)
def test_a_file_that_only_looks_like_a_prior_is_refused(
    tmp_path: Path, spoil: Any, named: str
) -> None:
    """Cut files, and tensors of other shapes and types, are tried in tests/inputs."""
    tensors, metadata = load_file(SHIPPED / "patch7.safetensors"), {"patch": "7"}
    spoil(tensors, metadata)
    save_tensors(tmp_path / "bad.safetensors", tensors, metadata)
    with pytest.raises(UserError) as caught:
        load_prior(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)
    assert named in str(caught.value)
