"""The way in of all commands: `mjp`, `python -m mjp_privacy` (torchrun -m mjp_privacy), scripts.

Ctrl-C, SIGTERM and SIGHUP are answered from the first line on, so nothing large is imported here.
"""

from __future__ import annotations

from mjp_privacy.core import stops, streams


def main(entry: str = "main") -> int:
    """Run a command of `cli` and return its exit code: main(), or main("run_attack")."""
    streams.fill()
    stops.listen()
    try:
        from mjp_privacy import cli

        code: int = getattr(cli, entry)()
        stops.over()
        return code
    except BaseException:
        if stops.stopped():
            return stops.told()
        stops.over()
        raise


if __name__ == "__main__":
    raise SystemExit(main())
