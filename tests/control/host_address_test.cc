// Which of a host's addresses goes into a unique id.
#include "control/host_address.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "tests/control/control_plane_fixture.h"

namespace refit::control {
namespace {

std::vector<InterfaceAddress> Hosts() {
  return {{.interface = "lo", .address = "127.0.0.1", .is_loopback = true},
          {.interface = "docker0", .address = "172.17.0.1"},
          {.interface = "cali12ab", .address = "169.254.1.1"},
          {.interface = "flannel.1", .address = "10.244.0.0"},
          {.interface = "tailscale0", .address = "100.64.0.7"},
          {.interface = "eth0", .address = "fd00::1", .is_ipv4 = false},
          {.interface = "eth0", .address = "10.0.0.5"},
          {.interface = "eth1", .address = "10.1.0.5"},
          {.interface = "eth10", .address = "10.10.0.5"},
          {.interface = "ib0", .address = "192.168.0.5"}};
}

std::string Chosen(std::string_view interfaces) {
  const auto chosen = ReachableAddress(Hosts(), interfaces);
  return chosen.ok() ? *chosen : std::string(chosen.status().message());
}

TEST(HostAddressTest, NetworksComeBeforeContainersAndTunnels) {
  EXPECT_EQ(Chosen(""), "10.0.0.5");
  EXPECT_EQ(*ReachableAddress(
                {{.interface = "veth1", .address = "172.18.0.1"},
                 {.interface = "eth0", .address = "fd00::1", .is_ipv4 = false}},
                ""),
            "fd00::1");
  EXPECT_EQ(
      *ReachableAddress({{.interface = "wg0", .address = "10.9.0.1"}}, ""),
      "10.9.0.1");
}

TEST(HostAddressTest, HostWithoutNetworkReachesItself) {
  EXPECT_EQ(*ReachableAddress({}, ""), "127.0.0.1");
  EXPECT_EQ(*ReachableAddress({Hosts().front()}, ""), "127.0.0.1");
}

TEST(HostAddressTest, NamesOfInterfacesArePrefixes) {
  EXPECT_EQ(Chosen("ib"), "192.168.0.5");
  EXPECT_EQ(Chosen("eth1"), "10.1.0.5");
  EXPECT_EQ(Chosen("mlx,ib"), "192.168.0.5");
  EXPECT_EQ(Chosen("ib0:4000"), "192.168.0.5");
  EXPECT_EQ(Chosen("docker"), "172.17.0.1");
  EXPECT_EQ(Chosen("lo"), "127.0.0.1");
}

TEST(HostAddressTest, EqualsMeansWholeNames) {
  EXPECT_EQ(Chosen("=eth10"), "10.10.0.5");
  EXPECT_EQ(Chosen("=ib0,eth1"), "10.1.0.5");
  EXPECT_EQ(
      Chosen("=eth"),
      "NCCL_SOCKET_IFNAME is \"=eth\", which leaves no network interface "
      "of this host that is up and has an address; there are lo, docker0, "
      "cali12ab, flannel.1, tailscale0, eth0, eth1, eth10, ib0. "
      "REFIT_HOST may name rank 0's host instead");
}

TEST(HostAddressTest, CaretMeansAllOthers) {
  EXPECT_EQ(Chosen("^eth"), "192.168.0.5");
  EXPECT_EQ(Chosen("^=eth0"), "10.1.0.5");
  EXPECT_EQ(Chosen("^eth,ib"), "172.17.0.1");
  // NCCL would take the loopback interface then, where no other host is.
  EXPECT_EQ(Chosen("^docker"), "10.0.0.5");
  EXPECT_EQ(*ReachableAddress({Hosts()[0], Hosts()[1]}, "^eth"), "172.17.0.1");
  ExpectStatus(ReachableAddress({Hosts()[0]}, "^eth").status(),
               absl::StatusCode::kInvalidArgument,
               "NCCL_SOCKET_IFNAME is \"^eth\", which leaves no network "
               "interface of this host that is up and has an address; there "
               "are lo. REFIT_HOST may name rank 0's host instead");
}

}  // namespace
}  // namespace refit::control
