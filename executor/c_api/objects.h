// What the opaque types of refit.h are.
#ifndef REFIT_EXECUTOR_C_API_OBJECTS_H_
#define REFIT_EXECUTOR_C_API_OBJECTS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"
#include "refit/device.h"
#include "refit/local_transport.h"
#include "refit/refit.h"
#include "refit/worker.h"

struct refit_plan {
  std::shared_ptr<const refit::PlanFile> file;
  std::string digest;
};

struct refit_device {
  std::shared_ptr<refit::Device> device;
};

struct refit_rendezvous {
  refit::TcpRendezvous tcp;
};

struct refit_local_fabric {
  std::shared_ptr<refit::LocalFabric> fabric;
};

struct refit_executor {
  std::unique_ptr<refit::Worker> worker;
};

namespace refit {

absl::Status CheckRank(const refit_plan& plan, int32_t rank);

}  // namespace refit

#endif  // REFIT_EXECUTOR_C_API_OBJECTS_H_
