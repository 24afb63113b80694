// The messages of a plan's staged rounds, without packing and unpacking, by
// several of NCCL's ways.
#ifndef REFIT_BENCH_MESSAGE_METHODS_H_
#define REFIT_BENCH_MESSAGE_METHODS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "bench/transfer_methods.h"
#include "bench/window_api.h"
#include "executor/transport/nccl_api.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

enum class MessageWay : uint8_t {
  kSendRecv,    // as the transport does, in memory that NCCL does not know
  kRegistered,  // the same in memory of NCCL's that all ranks registered
  kPutSignal,   // one-sided, in such memory
};

struct MessageOptions {
  MessageWay way = MessageWay::kSendRecv;
  bool graph = false;  // as one CUDA graph, as the executor does
};

// Each rank has two arenas: it sends from one at the plan's offsets, and
// receives into the other. With kPutSignal a receiver signals that a round may
// come, as many rounds ahead as the plan has slots, or one where a pair sends
// both ways: NCCL has one counter for all signals of a pair and direction.
//
// WrongElements counts bytes, of messages that no later one overwrote.
//
// Collective over all ranks. All arguments must outlive the result.
absl::StatusOr<std::unique_ptr<TransferMethod>> MakeMessageMethod(
    const PlanFile& plan, Transport& transport, Device& device,
    const nccl::Api& api, const nccl::WindowApi& windows,
    const MessageOptions& options);

}  // namespace refit

#endif  // REFIT_BENCH_MESSAGE_METHODS_H_
