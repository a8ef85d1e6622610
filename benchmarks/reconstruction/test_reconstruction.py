"""Noise hides images from a device that receives feature maps; without it they are as good as seen."""

from __future__ import annotations

from pathlib import Path

import torch
from inversion import Attacker, Seen
from split_digits import Messages, parted, planned, public_clip

from isthmus.disclosure import ActivationNoise


def test_what_is_seen_with_and_without_noise(tmp_path: Path) -> None:
    """By linear inversion, of a first stage that learnt nothing yet."""
    data, digits = parted(tmp_path)
    clip = public_clip(digits, "1st layer")
    count = len(digits.attackers) // 10 * 10
    attacker = Attacker(digits.attackers[:count].flatten(1), digits.attackers_labels[:count])

    def seen(noise: ActivationNoise | None) -> Seen:
        prepared, plan = planned(data, "1st layer", noise, epochs=1)
        torch.manual_seed(0)
        messages = Messages(prepared, plan, dict(prepared.build().state_dict()))
        own, victims = (messages.of(images)[0].flatten(1) for images in (digits.attackers, digits.victims))
        found = attacker.linear(own, victims)
        return attacker.judged(found, digits.victims.flatten(1), digits.victims_labels)

    bare, noisy = seen(None), seen(ActivationNoise(clip=clip, noise_multiplier=1.0, labels="public"))
    assert bare.error < 0.1
    assert bare.accuracy > 0.8
    assert noisy.error > 0.9
    assert noisy.accuracy < 0.4
