"""The command `mjp analyse`."""

from __future__ import annotations

from mjp_privacy.core.command import Usage, print_json, report_failed
from mjp_privacy.core.machine import use_threads
from mjp_privacy.data.opening import check_place
from mjp_privacy.paper.arguments import AnalysisArguments
from mjp_privacy.training.evaluation_arguments import EvaluationArguments


def evaluate(argv: list[str], usage: Usage) -> int:
    """`mjp evaluate`: print accuracy and consistency of checkpoints, robustness or segmentation, as
    a table."""
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
    """`mjp analyse`: print what the position embeddings of models hold, and write the pictures."""
    arguments = usage.parse(AnalysisArguments, argv)
    use_threads(arguments.threads)
    from mjp_privacy.paper.positions_report import write_analysis

    outcome = write_analysis(arguments)
    print(outcome.text)
    return report_failed(outcome.failed, "left out")
