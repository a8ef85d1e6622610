"""Callbacks: the user's own code in a run, and the events that it gets."""

from isthmus.callbacks.callback import Callback
from isthmus.callbacks.early_stopping import EarlyStopping
from isthmus.callbacks.events import Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.callbacks.loading import CallbackConfig, Callbacks, build_callback, check_callback, find_callback

__all__ = [
    "Callback",
    "CallbackConfig",
    "Callbacks",
    "EarlyStopping",
    "Evaluated",
    "RunEnded",
    "RunFault",
    "RunStarted",
    "StepDone",
    "build_callback",
    "check_callback",
    "find_callback",
]
