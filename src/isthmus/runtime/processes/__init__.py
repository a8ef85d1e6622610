"""Processes on this machine.

`device_processes` starts and ends device processes; `fork_server` is its protocol with the process that they are
forked from, which is a copy of the command where it can be; `forked` copies the current process; `children` ends the
processes of both. `signals` are requests to stop, and threads that end before the interpreter; `memory` bounds a
process and keeps freed memory. `data_description` opens data in a process of its own.
"""
