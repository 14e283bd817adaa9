"""`python -m delta_prop`: the command, where it is not on the path."""

from delta_prop.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
