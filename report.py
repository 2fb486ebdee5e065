"""Make the tables and pictures of runs: python report.py RUN [RUN ...] --out DIR (see --help)."""

from mjp_privacy.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main("report"))
