// Makes what NcclTransport sends with: communicators, their edges, the fence.
#ifndef REFIT_EXECUTOR_TRANSPORT_NCCL_CONNECTOR_H_
#define REFIT_EXECUTOR_TRANSPORT_NCCL_CONNECTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/transport/memory_use.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"
#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

// Null where no rank, or none of this rank's domain, needs it.
struct NcclLinks {
  // Shared with a thread that aborts them, which may not return.
  std::shared_ptr<NcclCommunicator> domain;
  std::shared_ptr<NcclCommunicator> world;
  // By root, of the broadcasts in which this rank takes part.
  std::map<int32_t, std::shared_ptr<NcclCommunicator>> broadcasts;
  std::unique_ptr<DeviceFence> fence;
  std::unique_ptr<MemoryUse> use;    // where there is a fence
  std::vector<std::string> notices;  // Transport::notices
  // What work that touched edges without an end may use until its communicator
  // is aborted.
  struct Touch {
    std::unique_ptr<DeviceMemory> scratch;
    std::unique_ptr<DeviceStream> stream;
    std::unique_ptr<DeviceEvent> event;
  };
  std::vector<Touch> unended;

  template <typename Visit>
  void ForEachCommunicator(const Visit& visit) const {
    if (domain != nullptr) visit(domain);
    if (world != nullptr) visit(world);
    for (const auto& [root, communicator] : broadcasts) visit(communicator);
  }
};

// For one Connect, in one step of the control plane.
class NcclConnector {
 public:
  // `hosts` are the plan's, `host` is what this rank really runs on. `api` is
  // loaded if this rank needs it; it must outlive the links.
  NcclConnector(ControlPlane& control, Device& device,
                absl::Span<const uint32_t> hosts, std::string host,
                std::optional<nccl::Api>& api, Deadline deadline,
                Interruption interruption)
      : control_(control),
        device_(device),
        hosts_(hosts),
        host_(std::move(host)),
        api_(api),
        deadline_(deadline),
        interruption_(std::move(interruption)) {}

  // Collective over all ranks: it succeeds if it does on all of them. If not,
  // `links` holds what is to be aborted, and the other ranks know.
  absl::Status Connect(absl::Span<const Edge> edges, NcclLinks& links);

 private:
  // What a rank uses, of its own edges.
  struct Uses {
    bool domain = false;  // stages inside its host
    bool world = false;   // stages across hosts
    bool broadcasts = false;
    bool fence = false;

    // Compare tells every combination of these.
    static constexpr size_t kFlags = 4;
    static_assert(size_t{1} << kFlags <= ControlPlane::kValuesMax);

    static auto FieldsOf(auto& self) {
      return std::tie(self.domain, self.world, self.broadcasts, self.fence);
    }
  };

  absl::Status OrAbort(const absl::Status& mine);
  template <typename Struct>
  absl::StatusOr<std::vector<OfRank<Struct>>> Compare(const absl::Status& mine,
                                                      const Struct& value,
                                                      const char* what);
  absl::Status Agree(const absl::Status& mine, const char* what);
  absl::StatusOr<std::string> FromFirst(absl::Span<const int32_t> ranks,
                                        std::string_view mine,
                                        const char* what);
  absl::Status CheckEdges(absl::Span<const Edge> edges) const;
  absl::StatusOr<std::vector<std::string>> CheckHosts(
      absl::Span<const Edge> edges, const std::vector<int32_t>& neighbours,
      bool stages_inside, bool& has_domain);
  absl::Status AgreeOnVersion(bool takes_part);
  absl::Status Encrypt();
  absl::Status MakeId(bool makes, nccl::UniqueId& id);
  absl::Status CreateCommunicator(const std::vector<int32_t>& ranks,
                                  bool takes_part,
                                  std::shared_ptr<NcclCommunicator>& target);
  absl::Status CreateBroadcasts(absl::Span<const Edge> edges, NcclLinks& links);
  // `enqueue` puts what connects edges on a stream, given some bytes of the
  // device. Returns when that has ended.
  absl::Status Touch(const std::function<absl::Status(std::byte* scratch,
                                                      Stream stream)>& enqueue,
                     std::vector<NcclLinks::Touch>& unended);
  absl::Status Await(DeviceEvent& event);
  absl::StatusOr<std::unique_ptr<DeviceFence>> CreateFence(
      const std::vector<int32_t>& peers, const std::vector<int32_t>& sharing,
      std::string& exported);
  absl::Status ConnectFence(absl::Span<const Edge> edges, NcclLinks& links);
  int32_t rank() const { return control_.rank(); }
  std::vector<int32_t> Everyone() const;
  std::vector<int32_t> RanksOfThisHost() const;

  ControlPlane& control_;
  Device& device_;
  const absl::Span<const uint32_t> hosts_;  // by rank
  const std::string host_;                  // this rank's
  std::optional<nccl::Api>& api_;
  const Deadline deadline_;
  const Interruption interruption_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_NCCL_CONNECTOR_H_
