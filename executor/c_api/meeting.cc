// Devices, and where ranks meet.
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "executor/c_api/objects.h"
#include "executor/c_api/status.h"
#include "refit/cuda_device.h"
#include "refit/host_device.h"
#include "refit/unique_id.h"

static_assert(REFIT_UNIQUE_ID_BYTES == sizeof(refit::UniqueId));

using refit::Guarded;

refit_status* refit_device_create_host(refit_device** device) {
  return Guarded(device, "device", {}, [&]() -> absl::Status {
    *device = new refit_device{std::make_shared<refit::HostDevice>()};
    return absl::OkStatus();
  });
}

refit_status* refit_device_create_cuda(int32_t ordinal, refit_device** device) {
  return Guarded(device, "device", {}, [&]() -> absl::Status {
    absl::StatusOr<std::unique_ptr<refit::Device>> made =
        refit::CreateCudaDevice(ordinal);
    if (made.ok()) *device = new refit_device{*std::move(made)};
    return made.status();
  });
}

void refit_device_free(refit_device* device) { delete device; }

refit_status* refit_unique_id_create(char id[REFIT_UNIQUE_ID_BYTES]) {
  return Guarded({{"id", id}}, [&] {
    const absl::StatusOr<refit::UniqueId> made = refit::CreateUniqueId();
    if (made.ok()) std::memcpy(id, made->bytes.data(), made->bytes.size());
    return made.status();
  });
}

refit_status* refit_meeting_host(int32_t world_size,
                                 char id[REFIT_UNIQUE_ID_BYTES]) {
  return Guarded({{"id", id}}, [&] {
    const absl::StatusOr<refit::UniqueId> made = refit::HostMeeting(world_size);
    if (made.ok()) std::memcpy(id, made->bytes.data(), made->bytes.size());
    return made.status();
  });
}

refit_status* refit_rendezvous_create_unique_id(
    const char id[REFIT_UNIQUE_ID_BYTES], int32_t rank, int32_t world_size,
    refit_rendezvous** rendezvous) {
  return Guarded(rendezvous, "rendezvous", {{"id", id}}, [&]() -> absl::Status {
    refit::UniqueId given;
    std::memcpy(given.bytes.data(), id, given.bytes.size());
    absl::StatusOr<refit::TcpRendezvous> tcp =
        refit::RendezvousFromUniqueId(given, rank, world_size);
    if (tcp.ok()) *rendezvous = new refit_rendezvous{*std::move(tcp)};
    return tcp.status();
  });
}

refit_status* refit_rendezvous_from_environment(refit_rendezvous** rendezvous) {
  return Guarded(rendezvous, "rendezvous", {}, [&]() -> absl::Status {
    absl::StatusOr<refit::TcpRendezvous> tcp =
        refit::RendezvousFromEnvironment();
    if (tcp.ok()) *rendezvous = new refit_rendezvous{*std::move(tcp)};
    return tcp.status();
  });
}

refit_status* refit_local_rank_from_environment(int32_t* local_rank) {
  return Guarded({{"local_rank", local_rank}}, [&]() -> absl::Status {
    const absl::StatusOr<int32_t> found = refit::LocalRankFromEnvironment();
    if (found.ok()) *local_rank = *found;
    return found.status();
  });
}

int32_t refit_rendezvous_rank(const refit_rendezvous* rendezvous) {
  return rendezvous->tcp.rank;
}

int32_t refit_rendezvous_world_size(const refit_rendezvous* rendezvous) {
  return rendezvous->tcp.world_size;
}

void refit_rendezvous_free(refit_rendezvous* rendezvous) { delete rendezvous; }

refit_status* refit_local_fabric_create(int32_t world_size,
                                        refit_local_fabric** fabric) {
  return Guarded(fabric, "fabric", {}, [&]() -> absl::Status {
    constexpr int32_t kMax = refit::TcpRendezvous::kWorldSizeMax;
    if (world_size < 1 || world_size > kMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "world size ", world_size, " is not between 1 and ", kMax));
    }
    *fabric = new refit_local_fabric{
        std::make_shared<refit::LocalFabric>(world_size)};
    return absl::OkStatus();
  });
}

void refit_local_fabric_free(refit_local_fabric* fabric) { delete fabric; }
