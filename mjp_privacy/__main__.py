"""`python -m mjp_privacy` is `mjp`, for launchers that take a module: torchrun -m mjp_privacy."""

from mjp_privacy.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
