"""From images on disk to stored rows with five metrics: `mjp attack` beside the usual scripts.

    python -m benchmarks.pipeline [--images 20] [--repeats 5]          (or: make bench)

The usual way, image by image: open the PNG, differentiate every parameter as breaching's user does,
breaching's own AprilAttacker, then the scores that the paper's scripts take (MSE, PSNR and SSIM of
scikit-image, FFT2D of NumPy's spectra with SciPy 1.9's cosine, LPIPS of the lpips package), a PNG
and a line of CSV. Our way is `run_experiment` into a fresh folder, which also stores the picture,
cond(A), the accuracy and both variants of every metric. Both load the same model in each repeat.
PSNR of both is compared per image; the figures go to benchmarks/results/pipeline.json.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import lpips
import numpy as np
import torch
import tyro
from PIL import Image
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from attacks.april import April
from attacks.breaching import april_one_by_one
from benchmarks.page import (
    Row,
    alternate,
    bracketed,
    machine,
    milliseconds,
    ratio,
    rows_of,
    write_result,
)
from mjp_privacy.data import Preprocessing, open_images, spread_subset
from mjp_privacy.data.images import EMBEDDED
from mjp_privacy.interfaces import Pixels
from mjp_privacy.metrics.pictures import CONVOLUTIONS, backbone
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from mjp_privacy.report.lines import STAGE

NAME, SIZE = "vit_small", 224
WEIGHTS: dict[str, Any] = {"checkpoint": "random", "img_size": SIZE, "num_classes": 1000}
COLOURS: dict[str, Any] = {"mean": 0.5, "std": 0.5}

LABEL = 7
"""The class of every picture; the time does not depend on it."""

STAGES = ("gradient", "attack", "score")
Scores = dict[str, float]


def main(images: int = 20, repeats: int = 5) -> None:
    facts, rows = machine(), []
    for dtype in ("float32", "float64"):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compared(dtype, images, repeats, Path(folder)))
    ours = (f"of it {stage}" for stage in STAGES)
    table = [("ms an image", "loop and scripts", "ours", "ratio", *ours), line(rows[0])]
    write_result("pipeline", {"images": images, "rows": rows}, facts, table)


def line(row: Mapping[str, Any]) -> Row:
    seconds, stages = row["seconds_per_image"], row["ours_last_by_stage"]
    both = (milliseconds(seconds[way]) for way in ("scripts", "ours"))
    of_it = (f"{1e3 * stages[stage]:.1f}" for stage in STAGES)
    return row["dtype"], *both, bracketed(row["scripts / ours"]["wall"]), *of_it


def compared(dtype: str, number: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Both ways in one precision, as a row."""
    pictures, runs = folder / "pictures", count()
    save_photographs(pictures, number)
    ways = {
        "scripts": lambda: usual_way(pictures, folder / f"scripts{next(runs)}", dtype),
        "ours": lambda: our_way(pictures, folder / f"ours{next(runs)}", dtype),
    }
    timings = alternate(ways, repeats)
    theirs, (ours, stages) = (timings[name].result for name in ways)
    assert theirs.keys() == ours.keys()
    apart = max(abs(theirs[image] - ours[image]) for image in ours)
    assert dtype == "float32" or apart <= 0.01, f"PSNR differs by {apart:.3f} dB"
    ratios = {clock: ratio(timings["scripts"], timings["ours"], clock) for clock in ("wall", "cpu")}
    seconds = {name: timing.facts(number) for name, timing in timings.items()}
    return {
        "dtype": dtype,
        "seconds_per_image": seconds,
        "scripts / ours": ratios,
        "ours_last_by_stage": {stage: spent / number for stage, spent in stages.items()},
        "largest_psnr_difference": apart,
    }


def save_photographs(folder: Path, number: int) -> None:
    """Crops of scikit-image's photographs, as PNG files of 224 x 224 pixels in any class."""
    folder.mkdir()
    photographs = open_images(EMBEDDED)
    for place, record in enumerate(spread_subset(photographs.records, number, seed=0)):
        picture = Preprocessing(SIZE)(photographs.decode(record)).permute(1, 2, 0).numpy()
        Image.fromarray((picture * 255).round().astype(np.uint8)).save(folder / f"{place:03d}.png")
    lines = [f"{path.name},{LABEL}" for path in folder.iterdir()]
    folder.with_suffix(".csv").write_text("\n".join(["file,label", *lines]))


# the usual way ------------------------------------------------------------------------------------


def usual_way(pictures: Path, out: Path, dtype: str) -> Scores:
    """Everything image by image. Returns the PSNR by image."""
    out.mkdir()
    intact = load_model(NAME, **WEIGHTS, **COLOURS)
    model = with_closed_form_block(intact).to(getattr(torch, dtype)).eval()
    assert isinstance(model, LoadedModel)
    network = lpips_network()
    psnr: Scores = {}
    with (out / "scores.csv").open("w", newline="") as file:
        table = csv.writer(file)
        for path in sorted(pictures.iterdir()):
            truth = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
            picture = attacked(model, torch.from_numpy(truth.transpose(2, 0, 1)).unsqueeze(0))
            Image.fromarray((picture * 255).round().astype(np.uint8)).save(out / path.name)
            scores = paper_scores(truth, picture, network)
            table.writerow([path.name, *scores.values()])
            psnr[path.stem] = scores["psnr"]
    return psnr


def attacked(model: LoadedModel, image: Tensor) -> np.ndarray:
    """One image through breaching's user and attacker: (H, W, 3) float32 in [0, 1]."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    x = model.normalize(image.to(model.cls_token))
    loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([LABEL], device=x.device))
    grads = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    upload = {name: grads[name].unsqueeze(0) for name in April().needs(model)}
    pixels = Pixels(SIZE, model.card.mean, model.card.std)
    found = april_one_by_one(model, upload, pixels, model.cls_token.dtype)
    return model.denormalize(found)[0].clamp(0, 1).permute(1, 2, 0).float().numpy()


def lpips_network() -> lpips.LPIPS:
    """The lpips package's network with the convolutions that come with this package, for its own
    are fetched from the network."""
    network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False).eval()
    network.requires_grad_(False)
    layers = [m for m in network.net.modules() if isinstance(m, torch.nn.Conv2d)]
    weights = backbone()
    for (index, _, _), layer in zip(CONVOLUTIONS, layers, strict=True):
        layer.weight.copy_(weights[f"features.{index}.weight"])
        layer.bias.copy_(weights[f"features.{index}.bias"])
    return network


def fft2d(truth: np.ndarray, picture: np.ndarray) -> float:
    """The cosine distance of two spectra as SciPy 1.9 had it, without conjugation."""
    u, v = (np.fft.fft2(x).ravel() for x in (truth, picture))
    return float(min(abs(1 - np.mean(u * v) / np.sqrt(np.mean(u * u) * np.mean(v * v))), 2.0))


def paper_scores(truth: np.ndarray, picture: np.ndarray, network: lpips.LPIPS) -> Scores:
    """The five metrics of the paper, each by the library that its scripts take."""
    u, v = (
        torch.from_numpy(image.transpose(2, 0, 1)).unsqueeze(0) * 2 - 1
        for image in (picture, truth)
    )
    with torch.no_grad():
        perceptual = float(network(u, v))
    return {
        "mse": float(mean_squared_error(truth, picture)),
        "psnr": float(peak_signal_noise_ratio(truth, picture, data_range=1)),
        "ssim": float(structural_similarity(truth, picture, channel_axis=2, data_range=1)),
        "fft2d": fft2d(truth.transpose(2, 0, 1), picture.transpose(2, 0, 1)),
        "lpips": perceptual,
    }


# our way ------------------------------------------------------------------------------------------


def our_way(pictures: Path, out: Path, dtype: str) -> tuple[Scores, Mapping[str, float]]:
    """A run into a fresh folder. Returns the PSNR by image, as its rows hold it, and its times."""
    experiment = {
        "name": "pipeline",
        "attacks": [{"name": "april"}],
        "dtypes": [dtype],
        "models": {"ViT-S": {"model": NAME, **WEIGHTS, **COLOURS}},
        "grid": [{"models": ["ViT-S"], "settings": ["a"]}],
    }
    rows = rows_of(experiment, out, images=pictures, labels=pictures.with_suffix(".csv"))
    assert {f"{metric}.standard" for metric in ("mse", "psnr", "ssim", "fft2d", "lpips")} <= {*rows}
    by_image = zip(rows["image_id"], rows["psnr.standard"], strict=True)
    stages = {n.removeprefix(STAGE): float(rows[n].sum()) for n in rows if n.startswith(STAGE)}
    return {Path(i).stem: float(v) for i, v in by_image}, stages


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
