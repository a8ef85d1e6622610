"""What is compared, with the rates that are tried for each."""

from __future__ import annotations

from replica import Method

METHODS: list[list[Method]] = []
