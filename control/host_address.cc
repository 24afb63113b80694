#include "control/host_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace refit::control {
namespace {

// How the names of interfaces begin whose addresses serve containers and
// virtual machines of the host itself, or a tunnel.
constexpr std::string_view kInnerInterfaces[] = {
    "docker", "podman",    "veth",   "virbr",   "vnet",  "vmnet", "br-",
    "cni",    "cali",      "cilium", "flannel", "weave", "kube-", "lxc",
    "lxd",    "nodelocal", "dummy",  "vxlan",   "ovs",   "tun",   "tap",
    "wg",     "tailscale", "zt",     "azv",     "gke",   "eni"};

bool StartsWithAnyOf(std::string_view name, const auto& prefixes) {
  return std::any_of(
      std::begin(prefixes), std::end(prefixes),
      [&](std::string_view prefix) { return name.starts_with(prefix); });
}

std::string TextOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  getnameinfo(address,
              address->sa_family == AF_INET ? sizeof(sockaddr_in)
                                            : sizeof(sockaddr_in6),
              text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return text;
}

// NCCL's list of interfaces.
class InterfaceList {
 public:
  explicit InterfaceList(std::string_view list) {
    excludes_ = list.starts_with('^');
    if (excludes_) list.remove_prefix(1);
    whole_names_ = list.starts_with('=');
    if (whole_names_) list.remove_prefix(1);
    const std::vector<std::string> entries =
        absl::StrSplit(std::string(list), ',');
    for (const std::string& entry : entries) {
      // NCCL's lists may have ports behind names.
      const std::string name = entry.substr(0, entry.find(':'));
      if (!name.empty()) names_.push_back(name);
    }
  }

  bool Has(std::string_view name) const {
    if (names_.empty()) return true;
    const bool listed = whole_names_
                            ? std::count(names_.begin(), names_.end(), name) > 0
                            : StartsWithAnyOf(name, names_);
    return listed != excludes_;
  }

  bool names_them() const { return !names_.empty() && !excludes_; }

 private:
  bool excludes_ = false;
  bool whole_names_ = false;
  std::vector<std::string> names_;
};

// How well others reach the host there; 0: not at all.
int Reach(const InterfaceAddress& address, const InterfaceList& interfaces) {
  if (!interfaces.Has(address.interface)) return 0;
  if (address.is_loopback && !interfaces.names_them()) return 0;
  const int place = address.is_loopback                                    ? 1
                    : StartsWithAnyOf(address.interface, kInnerInterfaces) ? 3
                                                                           : 5;
  return place + (address.is_ipv4 ? 1 : 0);
}

}  // namespace

std::vector<InterfaceAddress> AddressesOfThisHost() {
  std::vector<InterfaceAddress> found;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return found;
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0 ||
        (i->ifa_flags & IFF_RUNNING) == 0) {
      continue;
    }
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(
            &reinterpret_cast<const sockaddr_in6*>(i->ifa_addr)->sin6_addr)) {
      continue;
    }
    found.push_back({.interface = i->ifa_name,
                     .address = TextOf(i->ifa_addr),
                     .is_ipv4 = family == AF_INET,
                     .is_loopback = (i->ifa_flags & IFF_LOOPBACK) != 0});
  }
  freeifaddrs(first);
  return found;
}

absl::StatusOr<std::string> ReachableAddress(
    const std::vector<InterfaceAddress>& addresses,
    std::string_view interfaces) {
  const InterfaceList wanted(interfaces);
  std::string best;
  int reach = 0;
  for (const InterfaceAddress& address : addresses) {
    if (Reach(address, wanted) <= reach) continue;
    reach = Reach(address, wanted);
    best = address.address;
  }
  if (reach > 0) return best;
  if (interfaces.empty()) return "127.0.0.1";
  std::vector<std::string> names;
  for (const InterfaceAddress& address : addresses) {
    if (std::count(names.begin(), names.end(), address.interface) == 0) {
      names.push_back(address.interface);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "NCCL_SOCKET_IFNAME is \"", std::string(interfaces),
      "\", which leaves no network interface of this host that is up and has "
      "an address; there are ",
      names.empty() ? "none" : absl::StrJoin(names, ", "),
      ". REFIT_HOST may name rank 0's host instead"));
}

}  // namespace refit::control
