"""The command line. Nothing heavy is imported before a command runs: ``--help`` answers at once."""
