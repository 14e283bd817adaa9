"""Entry point of `python -m delta_prop`, for when the `delta-prop` command is not on the path."""

from delta_prop.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
