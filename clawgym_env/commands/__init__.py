"""The subcommands of ``clawgym``, one file each; they print and exit, and hold no logic of theirs.

Heavy modules are imported inside the commands, so that ``clawgym --help`` is quick.
"""
