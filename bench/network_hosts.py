"""Hosts made of Linux namespaces, for tests and benchmarks of real processes over a network."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

SKIPPED = 77
TOOLS = ("unshare", "nsenter", "ip", "tc")


def run(*command, text=None):
    return subprocess.run([str(word) for word in command], input=text, check=True, capture_output=True, text=True).stdout


class NetworkHosts:
    """COUNT hosts, each with a network, process numbers and shared memory of its own, on one switch.

    The cable of each host is its device "wire0"; its end at the switch is "portN" in the namespace `switch`. Ends the program
    with SKIPPED, and says why, where namespaces cannot be made.
    """

    def __init__(self, count):
        missing = [tool for tool in TOOLS if not shutil.which(tool)]
        if os.geteuid() != 0 or missing:
            print(f"skipped: hosts are made of namespaces, which takes {', '.join(missing) or 'root'}")
            sys.exit(SKIPPED)
        self.count, self.switch = count, count

    def __enter__(self):
        self.holders, self.pids = [], []
        # UCX looks for network interfaces in /sys.
        hold = "mount -t sysfs sysfs /sys && mount -t proc proc /proc && echo && exec sleep infinity"
        try:
            for _ in range(self.count + 1):
                holder = subprocess.Popen(["unshare", "--net", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "sh",
                                           "-c", hold], stdout=subprocess.PIPE)
                self.holders.append(holder)
                if not holder.stdout.readline():
                    raise OSError("unshare fails")
                children = pathlib.Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
                self.pids.append(children[0])
            self.at(self.switch, "ip", "link", "add", "switch", "type", "bridge")
            self.at(self.switch, "ip", "link", "set", "switch", "up")
            for host in range(self.count):
                run("ip", "link", "add", "wire0", "netns", self.pids[host], "type", "veth", "peer", "name", f"port{host}",
                    "netns", self.pids[self.switch])
                self.at(self.switch, "ip", "link", "set", f"port{host}", "master", "switch", "up")
                self.at(host, "ip", "link", "set", "lo", "up")
                # It finds its rate in milliseconds; BBR, the default of some systems, takes seconds.
                self.at(host, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
                self.at(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "wire0")
                self.at(host, "ip", "link", "set", "wire0", "up")
            for host in range(self.count):
                while self.link(host)["operstate"] != "UP":
                    time.sleep(0.01)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            print(f"skipped: hosts cannot be made of namespaces here: {error}")
            sys.exit(SKIPPED)
        return self

    def __exit__(self, *_):
        for holder in self.holders:
            holder.kill()
            holder.communicate()

    @staticmethod
    def address(host):
        return f"10.97.32.{host + 1}"

    def prefix(self, host):
        """Starts a command on that host."""
        return ["nsenter", "--target", self.pids[host], "--net", "--ipc", "--pid", "--mount"]

    def at(self, host, *command, text=None):
        return run(*self.prefix(host), *command, text=text)

    def link(self, host):
        return json.loads(self.at(host, "ip", "-s", "-j", "link", "show", "dev", "wire0"))[0]

    def sent_bytes(self, host):
        return self.link(host)["stats64"]["tx"]["bytes"]
