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

import argparse
import csv
import tempfile
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import lpips
import numpy as np
import torch
from PIL import Image
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from attacks.breaching import reconstruct_one_by_one
from benchmarks.alternating import alternate, machine, ratio
from benchmarks.april import one_by_one
from benchmarks.page import write_result
from benchmarks.scores import fft2d, lpips_network
from mjp_privacy.data import Preprocessing, open_images, spread_subset
from mjp_privacy.data.images import EMBEDDED
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import ClientInput, Pixels
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from mjp_privacy.report.lines import STAGE

NAME, SIZE = "vit_small", 224
WEIGHTS: dict[str, Any] = {"checkpoint": "random", "img_size": SIZE, "num_classes": 1000}
COLOURS: dict[str, Any] = {"mean": 0.5, "std": 0.5}

METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips")
LABEL = 7
"""The class of every picture; the time does not depend on it."""

Scores = dict[str, float]
Outcome = tuple[Scores, Mapping[str, float]]
"""PSNR by image, and seconds by stage where they are known."""
NOTHING: Outcome = ({}, {})


def main(arguments: argparse.Namespace) -> None:
    facts, rows = machine(), []
    for dtype in ("float32", "float64"):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compared(dtype, arguments, Path(folder)))
    write_result("pipeline", {"images": arguments.images, "rows": rows}, facts)


def compared(dtype: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both ways in one precision, as a row."""
    pictures, number = folder / "pictures", arguments.images
    save_photographs(pictures, number)
    runs = count()
    ways: dict[str, Callable[[], Outcome]] = {
        "scripts": lambda: usual_way(pictures, folder / f"scripts{next(runs)}", dtype),
        "ours": lambda: our_way(pictures, folder / f"ours{next(runs)}", dtype),
    }
    timings = alternate(ways, arguments.repeats)
    (theirs, _), (ours, stages) = (timings[name].result or NOTHING for name in ways)
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


def usual_way(pictures: Path, out: Path, dtype: str) -> Outcome:
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
    return psnr, {}


def attacked(model: LoadedModel, image: Tensor) -> np.ndarray:
    """One image through breaching's user and attacker: (H, W, 3) float32 in [0, 1]."""
    upload = one_by_one(model, ClientInput(image, torch.tensor([LABEL]), ["0"]))
    pixels = Pixels(SIZE, model.card.mean, model.card.std)
    found = reconstruct_one_by_one(model, upload, pixels, model.cls_token.dtype)
    return model.denormalize(found)[0].clamp(0, 1).permute(1, 2, 0).float().numpy()


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
        "fft2d": fft2d(truth.transpose(2, 0, 1), picture.transpose(2, 0, 1), conjugate=False),
        "lpips": perceptual,
    }


# our way ------------------------------------------------------------------------------------------


def our_way(pictures: Path, out: Path, dtype: str) -> Outcome:
    """A run into a fresh folder. Returns the PSNR by image, as its rows hold it, and its times."""
    experiment = {
        "name": "pipeline",
        "attacks": [{"name": "april"}],
        "dtypes": [dtype],
        "models": {"ViT-S": {"model": NAME, **WEIGHTS, **COLOURS}},
        "grid": [{"models": ["ViT-S"], "settings": ["a"]}],
    }
    labels = pictures.with_suffix(".csv")
    run_experiment(experiment, images=pictures, labels=labels, out=out, device="cpu")
    store = RunStore(out)
    rows = store.read(store.stored_cells()[0])
    assert {f"{metric}.standard" for metric in METRICS} <= set(rows)
    by_image = zip(rows["image_id"], rows["psnr.standard"], strict=True)
    stages = {n.removeprefix(STAGE): float(rows[n].sum()) for n in rows if n.startswith(STAGE)}
    return {Path(i).stem: float(v) for i, v in by_image}, stages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args())
