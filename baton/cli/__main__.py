from __future__ import annotations

from baton.cli.commands import app


def main() -> None:
    """Entry point of `baton`."""
    app()


if __name__ == "__main__":
    main()
