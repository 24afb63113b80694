#include "topology/probe.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace refit {
namespace {

namespace fs = std::filesystem;

// A whole file of one line; "" if it cannot be read.
std::string LineOf(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<fs::path> EntriesOf(const fs::path& directory) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(directory, error)) {
    entries.push_back(entry.path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

// The bridges from a root of PCI down to the device, and the device.
std::vector<std::string> BridgesOf(const fs::path& device,
                                   const BridgesByBusId& nccl) {
  std::error_code error;
  const fs::path path = fs::canonical(device, error);
  const auto known = nccl.find(absl::AsciiStrToLower(path.filename().string()));
  if (known != nccl.end()) return known->second;
  std::vector<std::string> bridges;
  for (const fs::path& part : path) {
    bridges.push_back(part.string());
  }
  return bridges;
}

size_t SharedBridges(const std::vector<std::string>& a,
                     const std::vector<std::string>& b) {
  return static_cast<size_t>(
      std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// "400 Gb/sec (4X NDR)"
double RateOf(const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  double rate = 0;
  if (words.size() < 2 || words[1] != "Gb/sec" ||
      !absl::SimpleAtod(words[0], &rate)) {
    return 0;
  }
  return rate;
}

struct FoundNic {
  ProbedNic nic;
  std::vector<std::string> bridges;
};

// With all ports that are up together. Virtual functions are none.
std::vector<FoundNic> NicsOf(const fs::path& sys, const BridgesByBusId& nccl) {
  std::vector<FoundNic> nics;
  for (const fs::path& entry : EntriesOf(sys / "class" / "infiniband")) {
    std::error_code error;
    if (fs::exists(entry / "device" / "physfn", error)) continue;
    double rate = 0;
    for (const fs::path& port : EntriesOf(entry / "ports")) {
      if (!absl::StrContains(LineOf(port / "state"), "ACTIVE")) continue;
      rate += RateOf(LineOf(port / "rate"));
    }
    if (!(rate > 0)) continue;
    nics.push_back({.nic = {.name = entry.filename().string(),
                            .gigabits_per_second = rate},
                    .bridges = BridgesOf(entry / "device", nccl)});
  }
  return nics;
}

// Display controllers of NVIDIA.
std::vector<fs::path> GpusOf(const fs::path& sys) {
  std::vector<fs::path> gpus;
  for (const fs::path& device : EntriesOf(sys / "bus" / "pci" / "devices")) {
    const std::string kind = LineOf(device / "class");
    if (LineOf(device / "vendor") == "0x10de" &&
        (absl::StartsWith(kind, "0x0300") ||
         absl::StartsWith(kind, "0x0302"))) {
      gpus.push_back(device);
    }
  }
  return gpus;
}

// A machine of topology/machines with as many GPUs of this name.
std::string MachineOf(const ProbedHost& host) {
  if (host.facts.empty()) return "";
  struct Known {
    const char* gpu;
    uint32_t gpus;
    const char* machine;
  };
  // "GB200" before "B200", which is in it.
  constexpr Known kKnown[] = {{"GB200", 4, "gb200-nvl72"},
                              {"B200", 8, "hgx-b200"},
                              {"H200", 8, "hgx-h200"},
                              {"H100", 8, "hgx-h100"}};
  for (const Known& known : kKnown) {
    if (!absl::StrContains(host.facts.front().name, known.gpu)) continue;
    // A PCIe or NVL card has no NVSwitch.
    const bool switched = host.facts.front().nvlinks == 18;
    return host.gpus == known.gpus && switched ? known.machine : "";
  }
  return "";
}

}  // namespace

absl::StatusOr<ProbedHost> ProbeHost(const std::string& sys,
                                     std::vector<GpuFacts> facts,
                                     const BridgesByBusId& nccl) {
  const std::vector<fs::path> gpus = GpusOf(sys);
  if (gpus.empty()) {
    return absl::NotFoundError(absl::StrCat(
        "this host has no NVIDIA GPU: no display controller of vendor 0x10de "
        "in ",
        (fs::path(sys) / "bus" / "pci" / "devices").string()));
  }
  ProbedHost host;
  host.gpus = static_cast<uint32_t>(gpus.size());
  host.facts = std::move(facts);
  std::vector<FoundNic> nics = NicsOf(sys, nccl);
  for (const fs::path& gpu : gpus) {
    const std::vector<std::string> bridges = BridgesOf(gpu, nccl);
    FoundNic* nearest = nullptr;
    const auto distance = [&](const FoundNic& nic) {
      return std::pair(
          -static_cast<int64_t>(SharedBridges(bridges, nic.bridges)),
          nic.nic.gpus);
    };
    for (FoundNic& nic : nics) {
      if (nearest == nullptr || distance(nic) < distance(*nearest)) {
        nearest = &nic;
      }
    }
    if (nearest != nullptr) ++nearest->nic.gpus;
  }
  for (const FoundNic& nic : nics) {
    if (nic.nic.gpus > 0) host.nics.push_back(nic.nic);
  }
  return host;
}

std::string TopologyJson(const ProbedHost& host) {
  std::string text = "{\n";
  std::vector<std::pair<std::string, std::string>> members;  // with comments
  std::vector<std::string> unknown;
  if (host.facts.empty()) {
    unknown.push_back("NVLink: the driver's library is not here");
  } else {
    const GpuFacts& gpu = host.facts.front();
    if (const std::string machine = MachineOf(host); !machine.empty()) {
      members.emplace_back(absl::StrFormat("\"machine\": \"%s\"", machine),
                           absl::StrCat("by ", host.gpus, " x ", gpu.name));
    } else {
      unknown.push_back(absl::StrFormat(
          "the speed inside the host (peer_gigabytes_per_second): %s, %d "
          "NVLinks of version %s",
          gpu.name, gpu.nvlinks,
          gpu.nvlink_version.empty() ? "?" : gpu.nvlink_version.c_str()));
    }
  }
  members.emplace_back(absl::StrCat("\"gpus_per_host\": ", host.gpus), "");
  if (host.nics.empty()) {
    unknown.push_back(
        "NICs: no port of /sys/class/infiniband is active "
        "(network_gigabytes_per_second)");
  } else {
    uint32_t most = 0;
    double slowest = host.nics.front().gigabits_per_second;
    std::vector<std::string> names;
    for (const ProbedNic& nic : host.nics) {
      most = std::max(most, nic.gpus);
      slowest = std::min(slowest, nic.gigabits_per_second);
      names.push_back(nic.name);
    }
    std::string comment = names.front();
    for (size_t i = 1; i < names.size(); ++i) {
      absl::StrAppend(&comment, " ", names[i]);
    }
    members.emplace_back(absl::StrCat("\"gpus_per_nic\": ", most), comment);
    members.emplace_back(
        absl::StrFormat("\"network_gigabytes_per_second\": %g", slowest / 8),
        absl::StrFormat("%g Gb/s, nominal", slowest));
  }
  for (size_t i = 0; i < members.size(); ++i) {
    const auto& [member, comment] = members[i];
    absl::StrAppend(&text, "  ", member, i + 1 < members.size() ? "," : "",
                    comment.empty() ? "" : "  // ", comment, "\n");
  }
  for (const std::string& what : unknown) {
    absl::StrAppend(&text, "  // not known: ", what, "\n");
  }
  absl::StrAppend(&text,
                  "  // not known from one host: hosts_per_nvlink_domain, "
                  "hosts_per_leaf, rails, spine_oversubscription\n}\n");
  return text;
}

}  // namespace refit
