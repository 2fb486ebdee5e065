"""The commands of this room: `mjp sample`, `mjp evaluate` and `mjp analyse`.

Their work is imported when it begins, so that `--help` needs no torch.
"""

from __future__ import annotations

from typing import Any

from mjp_privacy.core.command import DONE, Usage, print_json, report_failed
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import use_threads
from mjp_privacy.core.text import shown
from mjp_privacy.data.images import check_place, open_images
from mjp_privacy.paper.arguments import AnalysisArguments, SampleArguments
from mjp_privacy.training.commands import EvaluationArguments


def sample(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(SampleArguments, argv)
    out, source, seed = arguments.out, arguments.source, arguments.seed
    if [source, arguments.shapes, arguments.cifar10].count(None) != 2:
        raise UserError("Expected one of --from DIR_OR_ZIP, --shapes NUMBER and --cifar10 TAR_GZ.")
    if arguments.corrupt and source is None:
        raise UserError("--corrupt takes the pictures of --from: expected no --shapes, --cifar10.")
    if arguments.cifar10 is not None:
        from mjp_privacy.paper.image_sets import make_cifar10

        print(make_cifar10(arguments.cifar10, out))
        return DONE
    if arguments.shapes is not None:
        from mjp_privacy.paper.image_sets import make_shapes

        print(make_shapes(out, arguments.shapes, seed))
        return DONE
    assert source is not None
    images = open_images(source, arguments.labels)
    count = len(images.records)
    print(f"{count} images in {shown(source)}. {images.labels_described}", flush=True)
    options: dict[str, Any] = {"per_class": arguments.per_class, "limit": arguments.limit}
    options |= {"seed": seed}
    if arguments.corrupt:
        from mjp_privacy.paper.image_sets import make_corrupted

        done = make_corrupted(images, out, size=arguments.size, **options)
    else:
        from mjp_privacy.data.sample import make_sample

        done = make_sample(images, out, **options)
    print(done.text)
    return report_failed(done.failed, "not read; skipped.csv lists all")


def evaluate(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(EvaluationArguments, argv)
    check_place(arguments.data)
    if arguments.ade20k:
        from mjp_privacy.paper.segmentation import write_segmentation as write
    elif arguments.imagenet_c or arguments.imagenet_a or arguments.imagenet_o:
        from mjp_privacy.paper.robustness import write_robustness as write
    else:
        from mjp_privacy.training.evaluation import write_evaluation as write
    outcome = write(arguments)
    if arguments.json:
        print_json(
            "evaluate", {"lines": outcome.lines, "folder": arguments.out, "failed": outcome.failed}
        )
    else:
        print(outcome.text)
        if arguments.out:
            print(arguments.out)
    return report_failed(outcome.failed, "not read, and in no figure")


def analyse(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(AnalysisArguments, argv)
    use_threads(arguments.threads)
    from mjp_privacy.paper.positions_report import write_analysis

    outcome = write_analysis(arguments)
    print(outcome.text)
    return report_failed(outcome.failed, "left out")
