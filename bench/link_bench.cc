#include "bench/link_bench.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "bench/rank_processes.h"
#include "bench/run_bench.h"
#include "executor/device/host_identity.h"
#include "refit/cuda_device.h"
#include "refit/host_device.h"
#include "refit/local_transport.h"
#include "refit/nccl_transport.h"
#include "refit/ucx_transport.h"
#include "runner/rank_threads.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// Of each step; a pair is one.
constexpr std::chrono::minutes kLinkTimeout(10);

Deadline InTime() { return Clock::now() + kLinkTimeout; }

// One rank's end of all its pairs.
class LinkBench {
 public:
  LinkBench(Transport& transport, Device& device, const LinkTable& table,
            const LinkOptions& options)
      : transport_(transport),
        device_(device),
        table_(table),
        options_(options),
        pattern_(options.message_bytes,
                 std::byte(static_cast<uint8_t>(transport.rank() + 1))) {
    for (int32_t r = 0; r < transport.world_size(); ++r) everyone_.push_back(r);
  }

  absl::Status Connect() {
    std::vector<Edge> edges;
    for (const int32_t peer : everyone_) {
      if (peer == transport_.rank()) continue;
      for (const auto kind : {fb::MessageKind::kSend, fb::MessageKind::kRecv}) {
        edges.push_back({.peer = peer,
                         .kind = kind,
                         .route = RouteOf(transport_.rank(), peer),
                         .mechanism = fb::Mechanism::kStaged});
      }
    }
    // A rank without memory tells the others by the handshake.
    absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
        device_.Allocate(options_.message_bytes);
    absl::StatusOr<std::unique_ptr<DeviceStream>> stream =
        device_.CreateStream();
    absl::Status status = memory.status();
    status.Update(stream.status());
    HandshakeRecord record;
    record.ready = status.ok();
    record.world_size = static_cast<uint32_t>(everyone_.size());
    status.Update(transport_.Connect(record, edges, InTime()));
    if (!status.ok()) return status;
    memory_ = *std::move(memory);
    stream_ = *std::move(stream);
    return Fill();
  }

  // This rank's part of the pair; the seconds of each message on `to`.
  absl::StatusOr<std::vector<double>> Time(int32_t from, int32_t to) {
    absl::Status status = transport_.BeginRefit(InTime(), false);
    std::vector<double> seconds;
    const int32_t mine = transport_.rank();
    if (mine == from || mine == to) {
      const Operation operation = {.kind = mine == from
                                               ? fb::MessageKind::kSend
                                               : fb::MessageKind::kRecv,
                                   .peer = mine == from ? to : from,
                                   .data = memory_->data(),
                                   .size_bytes = options_.message_bytes};
      for (int64_t i = 0; i <= options_.iterations && status.ok(); ++i) {
        const Clock::time_point start = Clock::now();
        status = transport_.Exchange({.index = static_cast<uint32_t>(i),
                                      .route = RouteOf(from, to),
                                      .operations = {&operation, 1}},
                                     stream_->get());
        if (status.ok()) status = device_.Synchronize(stream_->get());
        seconds.push_back(
            std::chrono::duration<double>(Clock::now() - start).count());
      }
      if (status.ok()) seconds.erase(seconds.begin());
    }
    if (status.ok()) status = transport_.EndRefit(stream_->get());
    if (status.ok()) status = transport_.Wait();
    if (status.ok() && mine == to) status = Check(from, to);
    if (!status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrCat("rank ", from, " to rank ", to, ": ", status.message()));
    }
    return seconds;
  }

  const std::string& wrong() const { return wrong_; }

  // Every rank's `mine`, by rank.
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& mine) {
    return transport_.ExchangeBytes(mine, everyone_, everyone_, InTime());
  }

 private:
  fb::Route RouteOf(int32_t from, int32_t to) const {
    return table_.hosts[static_cast<size_t>(from)] ==
                   table_.hosts[static_cast<size_t>(to)]
               ? fb::Route::kPeer
               : fb::Route::kNetwork;
  }

  absl::Status Fill() {
    absl::Status status = device_.Copy(memory_->data(), pattern_.data(),
                                       pattern_.size(), stream_->get());
    return status.ok() ? device_.Synchronize(stream_->get()) : status;
  }

  // Notes what is wrong with the bytes that `from` sent. The other ranks go on
  // meanwhile, and learn of it at the end.
  absl::Status Check(int32_t from, int32_t to) {
    std::vector<std::byte> arrived(pattern_.size());
    absl::Status status = device_.Copy(arrived.data(), memory_->data(),
                                       arrived.size(), stream_->get());
    if (status.ok()) status = device_.Synchronize(stream_->get());
    if (!status.ok()) return status;
    const auto right = std::count(arrived.begin(), arrived.end(),
                                  std::byte(static_cast<uint8_t>(from + 1)));
    if (right != std::ssize(arrived) && wrong_.empty()) {
      wrong_ =
          absl::StrCat("rank ", from, " to rank ", to, ": ",
                       std::ssize(arrived) - right, " bytes arrived wrong");
    }
    return Fill();
  }

  Transport& transport_;
  Device& device_;
  const LinkTable& table_;
  const LinkOptions& options_;
  std::vector<std::byte> pattern_;
  std::vector<int32_t> everyone_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<DeviceStream> stream_;
  std::string wrong_;  // of the first message that arrived wrong
};

// Which host each rank is on; all ranks must measure the same.
absl::StatusOr<LinkTable> MeetHosts(const std::string& wire,
                                    ControlPlane& control,
                                    const LinkOptions& options) {
  control.BeginStep();
  const std::string what = absl::StrCat(options.message_bytes, " bytes, ",
                                        options.iterations, " times");
  std::vector<int32_t> everyone(static_cast<size_t>(control.world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  const absl::StatusOr<std::vector<std::string>> all = control.Exchange(
      absl::StrJoin(std::vector<std::string>{what, ThisHost(), ThisHostName()},
                    "\n"),
      everyone, everyone, "hosts", InTime());
  if (!all.ok()) return all.status();
  LinkTable table = {.wire = wire, .hosts = {}, .names = {}};
  for (size_t rank = 0; rank < all->size(); ++rank) {
    const std::vector<std::string> parts = absl::StrSplit((*all)[rank], '\n');
    if (parts.size() != 3 || parts[0] != what) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ranks measure different messages: rank ", control.rank(), " has ",
          what, ", rank ", rank, " has ", parts[0]));
    }
    table.hosts.push_back(parts[1]);
    table.names.push_back(parts[2]);
  }
  return table;
}

absl::StatusOr<LinkTable> MeasureThreads(const std::string& wire, int32_t ranks,
                                         const LinkOptions& options) {
  const bool local = wire == "local";
  if (!local && CudaDeviceCount() < ranks) {
    return absl::NotFoundError(absl::StrCat("--ranks is ", ranks,
                                            ", a GPU for each; this host has ",
                                            CudaDeviceCount()));
  }
  const absl::StatusOr<TcpRendezvous> meeting = LoopbackRendezvous(ranks);
  if (!meeting.ok()) return meeting.status();
  LocalFabric fabric(ranks);
  const std::vector<std::string> here(static_cast<size_t>(ranks),
                                      ThisHostName());
  std::vector<absl::StatusOr<LinkTable>> results(static_cast<size_t>(ranks),
                                                 absl::UnknownError(""));
  absl::Status threads = RunRankThreads(ranks, [&](int32_t rank) {
    absl::StatusOr<LinkTable>& result = results[static_cast<size_t>(rank)];
    if (!local) {
      TcpRendezvous mine = *meeting;
      mine.rank = rank;
      result = MeasureLinksOfRank(wire, mine, rank, options);
      return;
    }
    HostDevice device;
    absl::StatusOr<std::unique_ptr<Transport>> transport =
        fabric.CreateTransport(rank);
    result = transport.ok()
                 ? MeasureLinks(**transport, device,
                                {.wire = wire, .hosts = here, .names = here},
                                options)
                 : transport.status();
  });
  if (!threads.ok()) return threads;
  std::vector<absl::Status> statuses;
  for (const auto& result : results) statuses.push_back(result.status());
  if (absl::Status s = MainError(statuses); !s.ok()) return s;
  return results.front();
}

}  // namespace

absl::StatusOr<LinkTable> MeasureLinks(Transport& transport, Device& device,
                                       LinkTable table,
                                       const LinkOptions& options) {
  if (absl::Status s = device.MakeCurrent(); !s.ok()) return s;
  LinkBench bench(transport, device, table, options);
  if (absl::Status s = bench.Connect(); !s.ok()) return s;
  const int32_t ranks = transport.world_size();
  std::vector<double> received(static_cast<size_t>(ranks));  // by sender
  for (int32_t from = 0; from < ranks; ++from) {
    for (int32_t to = 0; to < ranks; ++to) {
      if (from == to) continue;
      absl::StatusOr<std::vector<double>> seconds = bench.Time(from, to);
      if (!seconds.ok()) return seconds.status();
      if (to != transport.rank()) continue;
      received[static_cast<size_t>(from)] =
          static_cast<double>(options.message_bytes) /
          Median(*std::move(seconds));
    }
  }
  const size_t speeds_bytes = received.size() * sizeof(double);
  const absl::StatusOr<std::vector<std::string>> all =
      bench.Gather(absl::StrCat(
          absl::string_view(reinterpret_cast<const char*>(received.data()),
                            speeds_bytes),
          bench.wrong()));
  if (!all.ok()) return all.status();
  table.bytes_per_second.assign(received.size(),
                                std::vector<double>(received.size()));
  for (size_t to = 0; to < received.size(); ++to) {
    const std::string& given = (*all)[to];
    if (given.size() < speeds_bytes) {
      return absl::InternalError("a rank sent speeds that cannot be read");
    }
    if (given.size() > speeds_bytes) {
      return absl::DataLossError(given.substr(speeds_bytes));
    }
    std::memcpy(received.data(), given.data(), speeds_bytes);
    for (size_t from = 0; from < received.size(); ++from) {
      table.bytes_per_second[from][to] = received[from];
    }
  }
  return table;
}

absl::StatusOr<LinkTable> MeasureLinksOfRank(const std::string& wire,
                                             const TcpRendezvous& meeting,
                                             int ordinal,
                                             const LinkOptions& options) {
  std::unique_ptr<Device> device = std::make_unique<HostDevice>();
  if (wire == "nccl") {
    absl::StatusOr<std::unique_ptr<Device>> gpu = CreateCudaDevice(ordinal);
    if (!gpu.ok()) return gpu.status();
    device = *std::move(gpu);
  }
  absl::StatusOr<std::unique_ptr<ControlPlane>> control =
      ConnectTcp(meeting, InTime());
  if (!control.ok()) return control.status();
  absl::StatusOr<LinkTable> table = MeetHosts(wire, **control, options);
  if (!table.ok()) return table.status();
  std::vector<uint32_t> hosts;
  for (const std::string& host : table->hosts) {
    hosts.push_back(static_cast<uint32_t>(
        std::find(table->hosts.begin(), table->hosts.end(), host) -
        table->hosts.begin()));
  }
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      wire == "nccl" ? CreateNcclTransport({.device = device.get(),
                                            .meeting = *std::move(control),
                                            .hosts = hosts})
                     : CreateUcxTransport(*std::move(control));
  if (!transport.ok()) return transport.status();
  return MeasureLinks(**transport, *device, *std::move(table), options);
}

absl::StatusOr<LinkTable> MeasureLinksHere(const std::string& wire,
                                           int32_t ranks,
                                           const LinkOptions& options) {
  if (wire != "ucx") return MeasureThreads(wire, ranks, options);
  absl::StatusOr<LinkTable> table;
  const absl::Status status =
      RunRankProcesses(ranks, [&](const TcpRendezvous& meeting) {
        table = MeasureLinksOfRank(wire, meeting, 0, options);
        return table.status();
      });
  if (!status.ok()) return status;
  return table;
}

}  // namespace refit
