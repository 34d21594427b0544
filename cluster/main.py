"""The console script: what must come first, then the commands, whose import takes a while."""

from __future__ import annotations

from .early import prepare


def main() -> None:
    """Run the command line of this process."""
    prepare()
    from .cli import main as command

    command()


if __name__ == "__main__":
    main()
