"""Processes on this machine: started, forked, ended."""
