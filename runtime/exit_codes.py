"""Exit codes of all commands. They are stable, because supervisors depend on them.

``docs/troubleshooting.md`` says what to do after each.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE_HUNG = 3
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141  # as a shell shows a process that SIGPIPE has ended
EXIT_TERMINATED = 143
