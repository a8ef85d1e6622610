"""Devices behind NATs, in a lab: a place of the lab is the router of a home, whose NAT is the kernel's own (nftables).

    with Lab(fleet) as lab, Home(lab, "oslo", "symmetric") as home:
        inside(home.network(), dial)            # on a device that only the router sees

Every home has the same private addresses, as homes do. A packet from elsewhere that the NAT does not map is dropped, as
is what is sent to a private address of another home. Kinds of NAT (RFC 4787 calls the first four endpoint-independent
mapping, with filtering that is endpoint-independent, address-dependent, address and port-dependent):

| kind | public port of a connection | what the router lets in |
|---|---|---|
| open | no NAT: the device itself has the place's address | everything |
| full-cone | the device's own | everything, to the device |
| restricted | the device's own | from addresses that the device has sent to |
| port-restricted | the device's own | answers only: nftables' `masquerade` |
| refusing | the device's own | answers only; the router refuses the rest, which ends attempts that come early |
| symmetric | another one for each connection | answers only: `masquerade fully-random` |
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Literal, TypeVar, get_args

from isthmus.errors import UserError
from isthmus_testing.lab.hub import CLONE_NEWNET, mac_address, system_call
from isthmus_testing.lab.lab import COORDINATOR, Lab

Kind = Literal["open", "full-cone", "restricted", "port-restricted", "refusing", "symmetric"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Result = TypeVar("Result")
_INSIDE = "192.168"
_PRIVATE = "192.168.0.0/16"
_SIX = "fd99"  # the prefix of the IPv6 addresses: the wide-area network is `fd99::/64`, home N `fd99:N::/64`


class Home:
    """A router at a place of a lab, and the devices behind it. Each is in a network of its own, from which it reaches
    the others by the router's public address only, if the router has a `hairpin`."""

    def __init__(
        self, lab: Lab, place: str, kind: Kind, *, devices: int = 1, hairpin: bool = False, ipv6: bool = False
    ) -> None:
        """With `ipv6` the devices also have IPv6 addresses, without NAT; the router lets in answers only."""
        if devices > 1 and kind in ("full-cone", "restricted"):
            raise UserError(f"home at {place}: got {devices} devices behind a {kind} NAT, expected one")
        self._lab, self._place, self._kind = lab, place, kind
        self._devices, self._hairpin, self._ipv6 = devices, hairpin, ipv6
        self._public = lab.addresses[place]
        self._number = list(lab.addresses).index(place) + 1
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Home:
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def network(self, device: int = 0) -> str:
        """The file of the namespace of a device of this home."""
        if self._kind == "open":
            return self._lab.network(self._place)
        return f"/proc/{self._holders[device].pid}/ns/net"

    def command(self, device: int = 0) -> list[str]:
        return [*self._lab.command(self._place), "nsenter", f"--net={self.network(device)}", "--"]

    def move(self, address: str) -> None:
        """Give the router another public address: what it has mapped ends without a word, as when a provider reconnects
        a line."""
        home = self._lab.addresses[self._place]
        self._run(
            self._place,
            "sysctl -qw net.ipv4.conf.eth0.promote_secondaries=1",  # without an address neighbours are forgotten too
            f"ip address add {address}/24 dev eth0",
            f"ip address del {self._public}/24 dev eth0",
        )
        self._public = address
        # Of the whole network: neighbours are static in a lab.
        mac = mac_address(home).hex(":")
        for place in self._lab.addresses:
            if place != self._place:
                self._run(place, f"ip neighbour replace {address} lladdr {mac} dev eth0 nud permanent")

    def _build(self) -> None:
        if self._kind == "open":
            return
        self._run(self._place, "sysctl -qw net.ipv4.ip_forward=1", f"ip route replace blackhole {_PRIVATE}")
        for number in range(self._devices):
            self._wire(number)
        self._nft()
        if self._ipv6:
            self._six()

    def _wire(self, number: int) -> None:
        words = [*self._lab.command(self._place), "unshare", "--net", "cat"]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._holders.append(holder)
        inside = f"{_INSIDE}.{number + 1}"
        while self._output(self._place, f"readlink /proc/{holder.pid}/ns/net") == self._output(
            self._place, "readlink /proc/self/ns/net"
        ):
            pass  # `unshare` has not come to it yet
        self._run(
            self._place,
            f"ip link add lan{number} type veth peer name eth0 netns {holder.pid}",
            f"ip address add {inside}.1/24 dev lan{number}",
            f"ip link set lan{number} up",
        )
        _shell(
            self.command(number),
            "ip link set lo up",
            f"ip address add {inside}.2/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {inside}.1",
        )

    def _nft(self) -> None:
        masquerade = "masquerade fully-random" if self._kind == "symmetric" else "masquerade"
        admitted = {
            "full-cone": f'iifname "eth0" tcp dport 1024-65535 dnat to {_INSIDE}.1.2',
            "restricted": f'iifname "eth0" ip saddr @asked tcp dport 1024-65535 dnat to {_INSIDE}.1.2',
        }.get(self._kind, "")
        refused = "reject with tcp reset" if self._kind == "refusing" else "drop"
        public = self._lab.addresses[self._place]
        # Within the home, the public address leads to whichever device has the port; both see each other by it.
        hairpin = f'iifname "lan*" oifname "lan*" ct status dnat snat to {public}' if self._hairpin else ""
        turned = f'iifname "lan*" ip daddr {public} dnat to tcp dport map @ports' if self._hairpin else ""
        rules = f"""
        table ip home {{
            set asked {{ type ipv4_addr; flags dynamic,timeout; timeout 2m; }}
            map ports {{ type inet_service : ipv4_addr; flags dynamic,timeout; timeout 2m; }}
            chain arriving {{
                type nat hook prerouting priority dstnat;
                {admitted}
                {turned}
            }}
            chain leaving {{
                type nat hook postrouting priority srcnat;
                {hairpin}
                oifname "eth0" meta l4proto tcp {masquerade}
            }}
            chain here {{
                type filter hook input priority filter;
                iifname != "lo" meta l4proto tcp ct state new {refused}
            }}
            chain through {{
                type filter hook forward priority filter; policy drop;
                oifname "eth0" update @asked {{ ip daddr }}
                oifname "eth0" meta l4proto tcp update @ports {{ tcp sport : ip saddr }}
                ct state established,related accept
                ct status dnat accept
                oifname "eth0" accept
            }}
        }}"""
        _piped([*self._lab.command(self._place), "nft", "-f", "-"], rules)

    def _six(self) -> None:
        inside = f"{_SIX}:{self._number}:"
        self._run(
            self._place,
            "sysctl -qw net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.all.forwarding=1",
            f"ip address add {_SIX}::{self._number}/64 dev eth0 nodad",
            f"ip address add {inside}:1/64 dev lan0 nodad",
        )
        for other, (place, address) in enumerate(self._lab.addresses.items(), 1):
            if place not in (self._place, COORDINATOR):
                mac = mac_address(address).hex(":")
                self._run(
                    self._place,
                    f"ip neighbour add {_SIX}::{other} lladdr {mac} dev eth0 nud permanent",
                    f"ip route add {_SIX}:{other}::/64 via {_SIX}::{other} dev eth0",
                )
        rules = """
        table ip6 home {
            chain through { type filter hook forward priority filter; policy drop;
                ct state established,related accept
                oifname "eth0" accept
            }
        }"""
        _piped([*self._lab.command(self._place), "nft", "-f", "-"], rules)
        _shell(
            self.command(),
            "sysctl -qw net.ipv6.conf.all.disable_ipv6=0",
            f"ip address add {inside}:2/64 dev eth0 nodad",
            f"ip route add default via {inside}:1",
        )

    def _run(self, place: str, *lines: str) -> None:
        _shell(self._lab.command(place), *lines)

    def _output(self, place: str, line: str) -> str:
        return subprocess.run(
            [*self._lab.command(place), "sh", "-c", line], check=True, capture_output=True, text=True
        ).stdout.strip()

    def _end(self) -> None:
        if self._public != self._lab.addresses[self._place]:
            self.move(self._lab.addresses[self._place])
        if self._holders:
            links = range(len(self._holders))
            self._run(self._place, "nft flush ruleset", *(f"ip link del lan{n} 2>&- || true" for n in links))
        for holder in self._holders:
            holder.kill()
            holder.communicate()


def inside(network: str, act: Callable[[], Result]) -> Result:
    """Return the result of `act`, called in a thread that has this network, as have all threads that it starts. Needs
    the machine's root."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_entered, network, act).result()


def _entered(network: str, act: Callable[[], Result]) -> Result:
    with open(network) as file:
        system_call("setns", file.fileno(), CLONE_NEWNET)
    return act()


def _shell(command: list[str], *lines: str) -> None:
    _piped([*command, "sh", "-e", "-s"], "\n".join(lines))


def _piped(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"this machine cannot have a NAT in a lab: {' '.join(done.stderr.split())}")


def nat_unavailable(lab: Lab) -> str | None:
    """Return why a place of this running lab cannot be a router with a NAT, or None if it can."""
    if os.geteuid() or shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "it needs root and the program 'nft' (nftables)"
    try:
        with Home(lab, next(iter(lab.addresses)), "symmetric"):
            return None
    except UserError as e:
        return str(e)
