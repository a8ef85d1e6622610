"""Whether a site takes part in a run: by its owner's rules, or by its owner's word."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from isthmus.federated.local import LocalConfig
from isthmus.federated.local_steps import RATE
from isthmus.federated.task_spec import Approval, TaskSpec
from isthmus.training.learning_rate import LearningRate


def digest_of(task_spec: TaskSpec) -> str:
    """Digest all that an answer holds for. The epsilon spent before the request is not part of it."""
    fixed = msgspec.structs.replace(task_spec, epsilon_so_far=None)
    return hashlib.sha256(msgspec.json.encode(fixed, order="sorted")).hexdigest()[:16]


def refusal(rules: Approval, task_spec: TaskSpec) -> str | None:
    """The rule that a request breaks, in words; None where it breaks none."""
    if rules.secure and not task_spec.aggregation.secure:
        return "approval.secure: this site sends masked updates only, the coordinator asks for plain ones"
    if rules.max_epsilon is not None:
        got = "none is promised" if task_spec.epsilon is None else f"{task_spec.epsilon:.3g}"
        if task_spec.epsilon is None or task_spec.epsilon > rules.max_epsilon:
            return f"approval.max_epsilon: this site allows {rules.max_epsilon:g}, the coordinator asks for: {got}"
    if rules.max_rounds is not None and task_spec.rounds > rules.max_rounds:
        return f"approval.max_rounds: this site allows {rules.max_rounds}, the coordinator asks for {task_spec.rounds}"
    if len(task_spec.sites) < rules.min_sites:
        return f"approval.min_sites: this site wants {rules.min_sites}, the run has {len(task_spec.sites)}"
    allowed = {entry.partition(":")[0] for entry in rules.sites}
    if rules.sites and (others := sorted(set(task_spec.sites) - allowed)):
        return f"approval.sites: {', '.join(others)} takes part, this site allows {', '.join(rules.sites)}"
    return None


def allowed_devices(rules: Approval) -> dict[str, str]:
    """Return the ids of the devices of those sites that `approval.sites` names with one."""
    pairs = (entry.partition(":") for entry in rules.sites)
    return {name: device for name, _, device in pairs if device}


def described(task_spec: TaskSpec, figures: Sequence[str] = ()) -> str:
    """Describe the coordinator's request on a few lines. `figures` are those that the site sends of its data."""
    local, aggregation, privacy = task_spec.local, task_spec.aggregation, task_spec.privacy
    most = aggregation.most_samples
    samples = "how many there are" if most is None else f"a bound of {most}"
    lines = [
        f"job: {task_spec.job}, {task_spec.rounds} rounds",
        f"algorithm: {task_spec.algorithm.name} {_options(task_spec.algorithm.options)}".rstrip(),
        f"model: {task_spec.model.name} {_options(task_spec.model.options)}".rstrip(),
        f"steps: {local.epochs} epochs of batches of {local.batch_size}, {_steps(local)}",
        f"sites: {', '.join(task_spec.sites)}",
        "the coordinator sees: "
        + ("the sum of all updates" if aggregation.secure else "this site's update")
        + ", ".join([f", and of its samples {samples}", *figures]),
    ]
    if privacy is None:
        lines.append("privacy: no noise, no promise")
    else:
        who = "each site" if privacy.noise == "sites" else "the server"
        lines.append(f"privacy: clip {privacy.clip:g}, noise {privacy.noise_multiplier:g} x clip by {who}")
        if task_spec.epsilon is not None:
            spent = f", so far {task_spec.epsilon_so_far or 0.0:.3g}"
            lines.append(f"epsilon: {task_spec.epsilon:.3g} at delta {privacy.delta:g} after the run{spent}")
    return "\n".join(lines)


def _steps(local: LocalConfig) -> str:
    rate = local.learning_rate
    if local.optimizer:
        text = ", ".join(f"{one.called} with learning rate {one.lr:g}" for one in local.optimizer)
    else:
        text = f"learning rate {RATE if rate is None or isinstance(rate, LearningRate) else rate:g}"
    by_round = " times a factor by round" if isinstance(rate, LearningRate) else ""
    clipped = f", gradients clipped to a norm of {local.clip_norm:g}" if local.clip_norm else ""
    return text + by_round + clipped


def _options(options: object) -> str:
    text = msgspec.json.encode(options, order="sorted").decode()
    return "" if text == "{}" else text
