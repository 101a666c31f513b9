from __future__ import annotations

import errno
import sys

from baton.cli.ending import EXIT_BROKEN_PIPE, EXIT_FAILURE, EXIT_INTERRUPTED, discard_output

# What a file, a device or a terminal can have against being written to.
_WRITE_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def main() -> None:
    """Entry point of `baton`. Ctrl-C, and an output that takes no more, end it without a traceback."""
    if sys.stdout is None:  # whatever is opened next would become the standard output
        _fail("standard output is closed")
    try:
        from baton.cli.commands import app

        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a failure can still be told
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read the output is gone
        discard_output()
        sys.exit(EXIT_BROKEN_PIPE)
    except OSError as error:
        if error.errno not in _WRITE_FAILURES:
            raise
        discard_output()
        _fail(f"cannot write to standard output: {error.strerror}")


def _fail(reason: str) -> None:
    if sys.stderr is not None:
        print(f"baton: {reason}", file=sys.stderr)
    sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
