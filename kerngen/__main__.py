"""`kerngen` and `python -m kerngen`: Ctrl-C while the command line is loaded ends it without a word."""

import signal

_raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _raises:  # a traceback of whichever module is being loaded
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from kerngen.cli import main  # noqa: E402

if _raises:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
