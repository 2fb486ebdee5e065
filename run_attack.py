"""Attack a folder of images: python run_attack.py CONFIG --images PATH --out RUN (see --help)."""

from mjp_privacy.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main("attack"))
