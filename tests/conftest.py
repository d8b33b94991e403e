"""What holds for all tests."""

import signal

# Ctrl-C is ignored where the tests are a shell's background job, and the processes that they start inherit
# that: they would never notice the one that they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
