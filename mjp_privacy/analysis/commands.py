"""The command `mjp analyse`."""

from __future__ import annotations

from mjp_privacy.analysis.arguments import AnalysisArguments
from mjp_privacy.core.command import Usage, report_failed
from mjp_privacy.core.machine import use_threads


def analyse(argv: list[str], usage: Usage) -> int:
    """`mjp analyse`: print what the position embeddings of models hold, and write the pictures."""
    arguments = usage.parse(AnalysisArguments, argv)
    use_threads(arguments.threads)
    from mjp_privacy.analysis.run import write_analysis

    outcome = write_analysis(arguments)
    print(outcome.text)
    return report_failed(outcome.failed, "left out")
