"""What a command's exit status says."""

EXIT_FAILURE, EXIT_USAGE, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 78, 130
EXIT_HELP = (
    "Exit status: 0 when all went well; 2 when what was asked has to change: the command, an option, an environment variable or the "
    "prompt; 1 when it failed otherwise, such as a model that cannot be found or read; 130 after Ctrl-C."
)
SERVE_EXIT_HELP = (
    "Exit status: 0 after a shutdown that was asked for; 2 when the command line cannot be understood; 78 when the server cannot start "
    "with this configuration, so that starting it again is of no use; 1 when it failed otherwise."
)
