// What the opaque types of refit.h are.
#ifndef REFIT_EXECUTOR_C_API_OBJECTS_H_
#define REFIT_EXECUTOR_C_API_OBJECTS_H_

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"
#include "refit/device.h"
#include "refit/executor.h"
#include "refit/local_transport.h"
#include "refit/refit.h"
#include "refit/transport.h"

struct refit_plan {
  std::shared_ptr<const refit::PlanFile> file;
  std::string digest;
};

struct refit_device {
  std::shared_ptr<refit::Device> device;
  bool is_host;
};

struct refit_rendezvous {
  refit::TcpRendezvous place;
};

struct refit_local_fabric {
  std::shared_ptr<refit::LocalFabric> fabric;
};

// What it was made of outlives what uses it, in this order.
struct refit_executor {
  std::shared_ptr<const refit::PlanFile> plan;
  std::shared_ptr<refit::Device> device;
  std::shared_ptr<refit::LocalFabric> fabric;
  std::unique_ptr<refit::Transport> transport;
  std::unique_ptr<refit::Executor> executor;
  std::atomic<bool> interrupted = false;
};

namespace refit {

absl::Status CheckRank(const refit_plan& plan, int32_t rank);

}  // namespace refit

#endif  // REFIT_EXECUTOR_C_API_OBJECTS_H_
