#include "topology/probe.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

namespace fs = std::filesystem;

// A /sys of files that a test writes.
class FakeSys {
 public:
  // `path` is the bridges to the device, and the device.
  void Gpu(const std::string& path, const std::string& kind = "0x030200") {
    Device(path, "0x10de", kind);
  }
  void Nic(const std::string& name, const std::string& path,
           const std::string& rate = "400 Gb/sec (4X NDR)",
           const std::string& state = "4: ACTIVE") {
    Device(path, "0x15b3", "0x020700");
    directory_.Write("sys/class/infiniband/" + name + "/ports/1/rate", rate);
    directory_.Write("sys/class/infiniband/" + name + "/ports/1/state", state);
    fs::create_directory_symlink(root() / "devices" / path,
                                 root() / "class/infiniband" / name / "device");
  }
  fs::path root() const { return directory_.Path("sys"); }

  std::string Json(std::vector<GpuFacts> facts = {},
                   const BridgesByBusId& nccl = {}) const {
    const absl::StatusOr<ProbedHost> host =
        ProbeHost(root(), std::move(facts), nccl);
    EXPECT_TRUE(host.ok()) << host.status();
    return host.ok() ? TopologyJson(*host) : "";
  }

 private:
  void Device(const std::string& path, const std::string& vendor,
              const std::string& kind) {
    directory_.Write("sys/devices/" + path + "/vendor", vendor);
    directory_.Write("sys/devices/" + path + "/class", kind);
    const fs::path name = fs::path(path).filename();
    fs::create_directories(root() / "bus/pci/devices");
    fs::create_directory_symlink(root() / "devices" / path,
                                 root() / "bus/pci/devices" / name);
  }

  TemporaryDirectory directory_;
};

constexpr const char* kRest =
    "  // not known from one host: hosts_per_nvlink_domain, hosts_per_leaf, "
    "rails, spine_oversubscription\n}\n";

TEST(ProbeTest, AHostWithoutGpusSaysSo) {
  FakeSys sys;
  sys.Nic("mlx5_0", "pci0000:00/0000:01:00.0");
  EXPECT_EQ(ProbeHost(sys.root(), {}).status().message(),
            "this host has no NVIDIA GPU: no display controller of vendor "
            "0x10de in " +
                (sys.root() / "bus/pci/devices").string());
}

// Two GPUs and two NICs below each of two bridges; the third NIC is another
// tree's, the audio function of a GPU and a port that is down are none.
TEST(ProbeTest, EachGpuHasTheNicThatIsNearest) {
  FakeSys sys;
  sys.Gpu("pci0000:00/0000:00:01.0/0000:10:00.0");
  sys.Gpu("pci0000:00/0000:00:01.0/0000:11:00.0");
  sys.Gpu("pci0000:80/0000:80:01.0/0000:90:00.0", "0x030000");
  sys.Gpu("pci0000:80/0000:80:01.0/0000:91:00.0");
  sys.Gpu("pci0000:80/0000:80:01.0/0000:91:00.1", "0x040300");
  sys.Nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:12:00.0");
  sys.Nic("mlx5_1", "pci0000:00/0000:00:01.0/0000:13:00.0");
  sys.Nic("mlx5_2", "pci0000:80/0000:80:01.0/0000:92:00.0");
  sys.Nic("mlx5_3", "pci0000:80/0000:80:01.0/0000:93:00.0");
  sys.Nic("mlx5_4", "pci0000:c0/0000:c1:00.0", "200 Gb/sec (4X HDR)");
  sys.Nic("mlx5_5", "pci0000:00/0000:00:01.0/0000:14:00.0",
          "400 Gb/sec (4X NDR)", "1: DOWN");
  EXPECT_EQ(sys.Json(),
            std::string("{\n"
                        "  \"gpus_per_host\": 4,\n"
                        "  \"gpus_per_nic\": 1,  // mlx5_0 mlx5_1 mlx5_2 "
                        "mlx5_3\n"
                        "  \"network_gigabytes_per_second\": 50  // 400 Gb/s, "
                        "nominal\n"
                        "  // not known: NVLink: the driver's library is not "
                        "here\n") +
                kRest);
}

TEST(ProbeTest, GpusShareANicWhereThereAreFewer) {
  FakeSys sys;
  for (const char* gpu : {"0000:10:00.0", "0000:11:00.0", "0000:12:00.0"}) {
    sys.Gpu(std::string("pci0000:00/0000:00:01.0/") + gpu);
  }
  sys.Nic("mlx5_0", "pci0000:00/0000:20:00.0", "100 Gb/sec (4X EDR)");
  sys.Nic("mlx5_1", "pci0000:00/0000:21:00.0", "200 Gb/sec (4X HDR)");
  const absl::StatusOr<ProbedHost> host = ProbeHost(sys.root(), {});
  ASSERT_TRUE(host.ok());
  ASSERT_EQ(host->nics.size(), 2u);
  EXPECT_EQ(host->nics[0].gpus, 2u);
  EXPECT_EQ(host->nics[1].gpus, 1u);
  const std::string json = sys.Json();
  EXPECT_NE(json.find("\"gpus_per_nic\": 2,"), std::string::npos) << json;
  EXPECT_NE(json.find("\"network_gigabytes_per_second\": 12.5"),
            std::string::npos)
      << json;
}

// A virtual machine: /sys has no bridges, so that both GPUs are as near to both
// NICs. By NCCL's file both share the first.
TEST(ProbeTest, NcclsFileShowsTheBridgesOfAVirtualMachine) {
  FakeSys sys;
  sys.Gpu("pci0000:00/0001:00:00.0");
  sys.Gpu("pci0000:00/000A:00:00.0");
  sys.Nic("mlx5_0", "pci0000:00/0101:00:00.0");
  sys.Nic("mlx5_1", "pci0000:00/0102:00:00.0");
  EXPECT_NE(sys.Json().find("\"gpus_per_nic\": 1,  // mlx5_0 mlx5_1"),
            std::string::npos);
  const absl::StatusOr<BridgesByBusId> nccl =
      ParseNcclTopology(R"(<?xml version="1.0"?>
<!-- <pci busid="ffff:ff:ff.0"> -->
<system version="1">
  <cpu numaid="0" affinity="0000ffff" arch="x86_64">
    <pci busid="ffff:ff:01.0" class="0x060400" link_width="16">
      <pci busid="0001:00:00.0" class="0x030200"><gpu dev="0" sm="90"/></pci>
      <pci busid="000a:00:00.0" class="0x030200"/>
      <pci busid="0101:00:00.0" class="0x020700"/>
    </pci>
  </cpu>
  <cpu numaid="1"><pci busid="0102:00:00.0" class="0x020700"/></cpu>
</system>
)");
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_EQ(nccl->size(), 5u);
  EXPECT_EQ(
      nccl->at("0101:00:00.0"),
      (std::vector<std::string>{"cpu  0", "ffff:ff:01.0", "0101:00:00.0"}));
  const std::string json = sys.Json({}, *nccl);
  EXPECT_NE(json.find("\"gpus_per_nic\": 2,  // mlx5_0\n"), std::string::npos)
      << json;
}

TEST(ProbeTest, AFileThatIsNotNcclsSaysWhere) {
  const auto mistake = [](const char* text) {
    return std::string(ParseNcclTopology(text).status().message());
  };
  EXPECT_EQ(mistake("{}"), "line 1: no element \"system\", as NCCL has it");
  EXPECT_EQ(mistake("<system>\n<cpu>\n</system>"),
            "line 3: system ends where it did not begin");
  EXPECT_EQ(mistake("<system>\n<cpu>\n"), "line 3: cpu does not end");
  EXPECT_EQ(mistake("<system>\n<cpu numaid=\"0\""),
            "line 2: this tag does not end");
  std::string deep = "<system>";
  for (int i = 0; i < 100; ++i)
    absl::StrAppend(&deep, "\n<pci busid=\"", i, "\">");
  EXPECT_EQ(mistake(deep.c_str()), "line 101: this tag is in 100 others");
}

TEST(ProbeTest, NamesAMachineWithItsGpusAndNvlinks) {
  FakeSys sys;
  std::vector<GpuFacts> facts;
  for (int i = 0; i < 8; ++i) {
    sys.Gpu("pci0000:00/0000:1" + std::to_string(i) + ":00.0");
    facts.push_back(
        {.name = "NVIDIA H200", .nvlinks = 18, .nvlink_version = "4.0"});
  }
  EXPECT_EQ(sys.Json(facts),
            std::string("{\n"
                        "  \"machine\": \"hgx-h200\",  // by 8 x NVIDIA H200\n"
                        "  \"gpus_per_host\": 8\n"
                        "  // not known: NICs: no port of "
                        "/sys/class/infiniband is active "
                        "(network_gigabytes_per_second)\n") +
                kRest);
  for (GpuFacts& gpu : facts) gpu.nvlinks = 6;
  const std::string json = sys.Json(facts);
  EXPECT_EQ(json.find("machine"), std::string::npos) << json;
  EXPECT_NE(json.find("NVIDIA H200, 6 NVLinks of version 4.0"),
            std::string::npos)
      << json;
}

// What it prints is a job's topology as it stands.
TEST(ProbeTest, AJobReadsWhatIsPrinted) {
  FakeSys sys;
  sys.Gpu("pci0000:00/0000:10:00.0");
  sys.Nic("mlx5_0", "pci0000:00/0000:11:00.0");
  Diagnostics diagnostics;
  const std::optional<Job> job = ReadJobText(
      std::make_shared<const SourceFile>(SourceFile{
          .path = "job.json",
          .text = "{\"model\": \"c\", \"source\": {\"layout\": \"vllm\"}, "
                  "\"destination\": {\"layout\": \"vllm\"}, \"topology\": " +
                  sys.Json() + "}"}),
      "", diagnostics, "refitc");
  ASSERT_TRUE(job.has_value()) << diagnostics.Render();
  EXPECT_EQ(job->topology.gpus_per_host.value, 1);
  EXPECT_EQ(job->topology.gpus_per_nic.value, 1);
  EXPECT_EQ(job->topology.network_gigabytes_per_second.value, 50);
}

}  // namespace
}  // namespace refit
