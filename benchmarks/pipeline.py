"""From images on disk to stored rows with five metrics: `mjp attack` beside the usual scripts.

    python -m benchmarks.pipeline [--images 20] [--repeats 5]          (or: make bench)

The usual way, image by image: open the PNG, differentiate every parameter as breaching's user does,
breaching's own AprilAttacker, then the scores that the paper's scripts take (MSE, PSNR and SSIM of
scikit-image, FFT2D of NumPy's spectra with SciPy 1.9's cosine, LPIPS of the lpips package), a PNG
and a line of CSV. Our way is `run_experiment` into a fresh folder, which also stores the picture,
cond(A), the accuracy and both variants of every metric. Both load the same model in each repeat.
PSNR of both is compared per image.

Machines warm up, throttle and have other users, so the two ways alternate within each repeat, and a
ratio is the median of the repeats' ratios, with the least and the most. The figures go to
benchmarks/results/pipeline.json, and every result's table to README.md.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import lpips
import numpy as np
import pandas as pd
import torch
import tyro
from PIL import Image
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from attacks.april import April
from attacks.breaching import april_one_by_one
from mjp_privacy.data import Preprocessing, open_images, spread_subset
from mjp_privacy.data.images import EMBEDDED
from mjp_privacy.experiment.run import run_experiment
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import Pixels
from mjp_privacy.metrics.pictures import CONVOLUTIONS, backbone
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.mjp_vit import with_closed_form_block
from mjp_privacy.report.lines import STAGE
from mjp_privacy.training.evaluation import markdown_table

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
Row = Sequence[str]

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
    write_result({"images": images, "rows": rows}, facts, table)


def line(row: Mapping[str, Any]) -> Row:
    seconds, stages = row["seconds_per_image"], row["ours_last_by_stage"]
    both = (f"{1e3 * seconds[way]['wall']['median']:.1f}" for way in ("scripts", "ours"))
    middle, low, high = row["scripts / ours"]["wall"].values()
    of_it = (f"{1e3 * stages[stage]:.1f}" for stage in STAGES)
    return row["dtype"], *both, f"{middle:.2f} ({low:.2f} to {high:.2f})", *of_it


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
    labels = pictures.with_suffix(".csv")
    summary = run_experiment(experiment, images=pictures, labels=labels, out=out, device="cpu")
    assert summary.exit_code == 0, summary
    assert not summary.inapplicable, summary
    store = RunStore(out)
    rows = pd.concat([store.read(run_id) for run_id in store.stored_cells()])
    assert {f"{metric}.standard" for metric in ("mse", "psnr", "ssim", "fft2d", "lpips")} <= {*rows}
    by_image = zip(rows["image_id"], rows["psnr.standard"], strict=True)
    stages = {n.removeprefix(STAGE): float(rows[n].sum()) for n in rows if n.startswith(STAGE)}
    return {Path(i).stem: float(v) for i, v in by_image}, stages


# in turn ----------------------------------------------------------------------------------------


@dataclass
class Timing:
    """What one way took in each repeat, and what it returned last."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    result: Any = None

    def facts(self, number: int) -> dict[str, dict[str, float]]:
        """Seconds for each of `number` images, by clock."""
        clocks = {"wall": self.wall, "cpu": self.cpu}
        return {
            clock: spread([one / number for one in seconds]) for clock, seconds in clocks.items()
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def alternate(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """Runs every way once in each repeat, in the order given, all on the CPU."""
    timings = {name: Timing() for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            timings[name].result = work()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(time.process_time() - cpu)
    return timings


def ratio(slow: Timing, fast: Timing, clock: str = "wall") -> dict[str, float]:
    """How many times longer `slow` took, repeat by repeat."""
    pairs = zip(getattr(slow, clock), getattr(fast, clock), strict=True)
    return spread([one / other for one, other in pairs])


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures, without the machine's name; asked before the
    runs."""
    processor, listing = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if listing.exists() and (found := re.search(r"model name\s*:\s*(.*)", listing.read_text())):
        processor = found[1]
    return {
        "processor": f"{processor}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# the page -----------------------------------------------------------------------------------------


def write_result(
    content: Mapping[str, Any], facts: Mapping[str, Any], table: Sequence[Row]
) -> None:
    """Write the result and its table, and print the table; facts: of the machine."""
    path = RESULTS / "pipeline.json"
    whole = {"machine": facts, **content, "table": table}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(*markdown_table(table[0], table[1:]), path, sep="\n")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """The page's text with the tables of all results."""
    for file in RESULTS.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        facts = content["machine"]
        where = f"{facts['processor']}, {facts['cores']} cores"
        told = f"{where}; {facts['threads']} thread(s), torch {facts['torch']}."
        begin, end = (f"<!-- table: {file.stem} {place} -->" for place in ("begin", "end"))
        head, *rows = content["table"]
        table = "\n".join([begin, *markdown_table(head, rows), "", told, end])
        text = re.sub(f"{begin}.*?{end}", lambda _, table=table: table, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
