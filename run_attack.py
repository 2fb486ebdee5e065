"""Attack a folder of images: python run_attack.py CONFIG --images PATH --out RUN (see --help)."""

from mjp_privacy.cli import run_attack

if __name__ == "__main__":
    raise SystemExit(run_attack())
