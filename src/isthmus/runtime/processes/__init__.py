"""Processes on this machine.

`launcher` starts and ends device processes; `fork_server` is its protocol with the process that they are forked
from, which `early_fork` makes a copy of the command where it can; `forked` copies the current process; `children` ends
the processes of both. `signals` are requests to stop, `memory_limit` bounds a process, `malloc_tuning` keeps freed
memory, `compute_threads` end before the interpreter.
`data_description` opens data in a process of its own.
"""
