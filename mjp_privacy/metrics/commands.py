"""`mjp score`: compares a folder of reconstructions with a folder of references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mjp_privacy.core.command import Usage, print_json, report_failed
from mjp_privacy.core.files import output_file, write_atomically
from mjp_privacy.core.text import formula_free, shown
from mjp_privacy.data.images import keep_apart


@dataclass(frozen=True)
class ScoreArguments:
    """Score a folder of reconstructions against a folder of references."""

    reference: Path
    """Folder of the private images."""
    reconstruction: Path
    """Folder of the reconstructions, with the same file names."""
    out: Path
    """The CSV to write: image, metric, variant, value; of a pair that cannot be scored, why."""
    metrics: tuple[str, ...] = ()
    """What to compute, such as psnr or ssim/paper; everything if left out."""
    allow_missing: bool = False
    """Score the images that are in both folders, and only count the others."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the GPU if there is one."""
    json: bool = False
    """Print the means as JSON for programs (docs/json.md)."""


def score(argv: list[str], usage: Usage) -> int:
    """Score the pairs of two folders, write the CSV and print the means."""
    arguments = usage.parse(ScoreArguments, argv)
    from mjp_privacy.core.machine import pick_device
    from mjp_privacy.metrics import scores
    from mjp_privacy.metrics.pictures import lpips_backbone

    out, reference, reconstruction = arguments.out, arguments.reference, arguments.reconstruction
    keep_apart(out, {"--reference": reference, "--reconstruction": reconstruction})
    device = pick_device(arguments.device)
    pairs, missing = scores.pair_folders(
        reconstruction, reference, allow_missing=arguments.allow_missing
    )
    output_file(out)
    rows = scores.score_pairs(pairs, arguments.metrics or list(scores.METRICS), device)
    told = rows.apply(lambda column: column.map(formula_free))
    write_atomically(out, lambda file: told.to_csv(file, index=False, lineterminator="\n"))
    unscored = rows[rows["status"] == scores.FAILED].drop_duplicates("image")
    failed = dict(zip(unscored["image"], unscored["reason"], strict=True))
    found = scores.means(rows)
    if arguments.json:
        content = {"means": found, "rows": len(rows), "file": out, "without_partner": missing}
        content |= {"lpips_backbone": lpips_backbone(), "failed": failed}
        print_json("score", content)
    else:
        print(scores.table(found))
        if (rows["metric"] == "lpips").any():
            print(f"LPIPS backbone: {lpips_backbone()}.")
        if arguments.allow_missing:
            print(f"Images without a partner, not scored: {missing}.")
        print(f"{len(rows)} rows in {shown(out)}")
    return report_failed(failed, "images not scored; rows say why")
