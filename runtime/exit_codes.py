"""Exit codes of all commands. They are stable, because supervisors depend on them."""

from collections.abc import Mapping

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE_HUNG = 3
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141  # as a shell shows a process that SIGPIPE has ended
EXIT_TERMINATED = 143

# Cause, and what a supervisor should do.
EXIT_CODES: Mapping[int, tuple[str, str]] = {
    EXIT_DONE: (
        "success; a server has ended after SIGTERM or SIGINT; `corun check`: the adapter fits",
        "nothing",
    ),
    EXIT_FAILED: (
        "failure: the engine has died, a start failed, or the command's own error; the last line "
        "of the log says which; `corun check`: the adapter cannot be served",
        "restart a server",
    ),
    EXIT_USAGE: (
        "an option or a configuration file is wrong; one line names it",
        "do not restart: it would fail in the same way",
    ),
    EXIT_ENGINE_HUNG: (
        "`corun serve`: the engine made no progress for four times `--engine-hang-s` and was "
        "killed; the log has the stacks of its threads",
        "restart the server; look at the device and its driver if it occurs again",
    ),
    EXIT_INTERRUPTED: ("SIGINT has ended a command that is no server", "nothing"),
    EXIT_UNREAD: ("nothing reads the command's output any more", "nothing"),
    EXIT_TERMINATED: ("SIGTERM has ended a command that is no server", "nothing"),
}
