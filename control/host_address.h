// Under which address the other ranks reach this host.
#ifndef REFIT_CONTROL_HOST_ADDRESS_H_
#define REFIT_CONTROL_HOST_ADDRESS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace refit::control {

// An address of a network interface that is up and running.
struct InterfaceAddress {
  std::string interface;  // its name, such as "eth0"
  std::string address;    // IPv4 or IPv6
  bool is_ipv4 = true;
  bool is_loopback = false;
};

// In the order in which the kernel lists them, without IPv6's link-local ones,
// which need an interface beside the address.
std::vector<InterfaceAddress> AddressesOfThisHost();

// The one of `addresses` that others reach best: a network's before those that
// serve containers, virtual machines or tunnels, IPv4 before IPv6, then the
// first. 127.0.0.1 if there is none.
//
// `interfaces` is NCCL_SOCKET_IFNAME, "" if it is not set, with NCCL's grammar:
// prefixes of names between commas; after "=" whole names; "^" in front of
// either means all others. The loopback interface counts where it is named.
// Error: kInvalidArgument, it leaves no address.
absl::StatusOr<std::string> ReachableAddress(
    const std::vector<InterfaceAddress>& addresses,
    std::string_view interfaces);

}  // namespace refit::control

#endif  // REFIT_CONTROL_HOST_ADDRESS_H_
