"""What system calls answer, for the Python in cases: PYTHONPATH=$SCRATCH_DIR/bin."""


def code(call, *arguments):
    """The number of the call's error, 0 when it succeeds."""
    try:
        call(*arguments)
        return 0
    except OSError as error:
        return error.errno
