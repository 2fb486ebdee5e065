"""A worker as a process of its own, which ends with the process that started it.

    python -m mjp_privacy.experiment.engines.process RUN/work/job.json 3

It looks for that end before it imports anything heavy: imports took 12 s on a busy machine, and a
worker of a killed command would stay as long.
"""

from __future__ import annotations

import os
import sys
import threading


def main() -> None:
    """Serve until the coordinator says `end` or is gone."""

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)  # whatever is half done is done again

    threading.Thread(target=end_with_parent, daemon=True).start()
    from mjp_privacy.experiment.engines.worker import serve

    serve(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
