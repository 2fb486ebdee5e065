"""Who does a run's tasks: other processes of this machine, of a Ray or of a Slurm cluster."""

from __future__ import annotations

import os
import sys
import threading


def process() -> None:
    """Be a worker of this machine: serve until the coordinator says `end` or is gone.

    It looks for that end before it imports anything heavy: imports took 12 s on a busy machine, and
    a worker of a killed command would stay as long.
    """

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)  # whatever is half done is done again

    threading.Thread(target=end_with_parent, daemon=True).start()
    from mjp_privacy.experiment.engines.tasks import serve

    serve(sys.argv[1], int(sys.argv[2]))
