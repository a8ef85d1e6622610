"""The command line of an agent. A ticket is no part of it: other users can read command lines."""

from __future__ import annotations

from isthmus.runtime.launchers.launcher import AgentSpec

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=auto")


def agent_command(agent: AgentSpec, python: str, *state: str) -> list[str]:
    """`isthmus join` by this interpreter of the node, under torchrun for an island. `state` are options that say where
    its key and its ticket are: `--state FOLDER`, `--attached` or `--ticket-file FILE`."""
    start = (*TORCHRUN, "-m", "isthmus") if agent.island else ("-m", "isthmus")
    return [python, *start, "join", "--name", agent.name, *state, *agent.arguments]
