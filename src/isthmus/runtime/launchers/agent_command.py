"""The command line of an agent. A ticket is no part of it: other users can read command lines."""

from __future__ import annotations

from isthmus.runtime.launchers.launcher import AgentSpec

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=auto")


def join_arguments(agent: AgentSpec, *state: str) -> list[str]:
    """Return the arguments of `isthmus`. `state` are options that say where the agent's key and its ticket are:
    `--state FOLDER`, `--attached` or `--ticket-file FILE`."""
    return ["join", "--name", agent.name, *state, *agent.arguments]


def agent_command(agent: AgentSpec, python: str, *state: str) -> list[str]:
    """`isthmus join` by this interpreter of the node, under torchrun for an island. `state` as of `join_arguments`."""
    start = (*TORCHRUN, "-m", "isthmus") if agent.island else ("-m", "isthmus")
    return [python, *start, *join_arguments(agent, *state)]
