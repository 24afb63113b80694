// refit.h over the C++ API: each function checks and converts, and does nothing
// else.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "executor/binding.h"
#include "executor/meeting_transport.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "refit/executor.h"
#include "refit/host_device.h"
#include "refit/local_transport.h"
#include "refit/refit.h"
#include "refit/unique_id.h"

struct refit_status {
  refit_code code;
  std::string message;
};

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
};

namespace refit {
namespace {

static_assert(REFIT_UNKNOWN == static_cast<int>(absl::StatusCode::kUnknown));
static_assert(REFIT_DEADLINE_EXCEEDED ==
              static_cast<int>(absl::StatusCode::kDeadlineExceeded));
static_assert(REFIT_UNAVAILABLE ==
              static_cast<int>(absl::StatusCode::kUnavailable));
static_assert(REFIT_DTYPE_BF16 == static_cast<int>(DType::kBf16));
static_assert(REFIT_DTYPE_FP8_E5M2 == static_cast<int>(DType::MAX));
static_assert(REFIT_ROUTE_LOCAL == static_cast<int>(fb::Route::kLocal));
static_assert(REFIT_ROUTE_NETWORK == static_cast<int>(fb::Route::kNetwork));
static_assert(REFIT_MECHANISM_DIRECT ==
              static_cast<int>(fb::Mechanism::kDirect));
static_assert(REFIT_UNIQUE_ID_BYTES == sizeof(UniqueId));
static_assert(REFIT_STATE_LOADED == static_cast<int>(ExecutorState::kLoaded));
static_assert(REFIT_STATE_CLOSED == static_cast<int>(ExecutorState::kClosed));

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kDefaultTimeout = std::chrono::minutes(10);
// Longer ones are no timeout to the executor either.
constexpr auto kTimeoutMax =
    std::chrono::floor<milliseconds>(nanoseconds::max());

// Of version 0.1, from which a caller may be. A struct that grows keeps here
// what it is now.
template <typename Struct>
constexpr size_t kFirstSizeBytes = sizeof(Struct);
template <>
constexpr size_t kFirstSizeBytes<refit_executor_options> =
    offsetof(refit_executor_options, without_graph);
// No caller's struct is larger: it is no size then, but memory that nobody set.
constexpr size_t kStructSizeBytesMax = 4096;

// For when there is none for another status.
refit_status& NoMemory() {
  static refit_status status = {REFIT_RESOURCE_EXHAUSTED, "out of memory"};
  return status;
}

refit_status* NewStatus(refit_code code, std::string_view message) noexcept {
  try {
    return new refit_status{code, std::string(message)};
  } catch (const std::bad_alloc&) {
    return &NoMemory();
  }
}

// Runs the body of a C function: its status, or its exception, for the caller.
template <typename Body>
refit_status* Guarded(const Body& body) noexcept {
  try {
    const absl::Status status = body();
    if (status.ok()) return nullptr;
    const auto message = status.message();
    return NewStatus(static_cast<refit_code>(status.code()),
                     {message.data(), message.size()});
  } catch (const std::bad_alloc&) {
    return &NoMemory();
  } catch (const std::exception& error) {
    return NewStatus(REFIT_INTERNAL, error.what());
  }
}

// The first of `arguments` that is null, as an error.
struct Argument {
  const char* name;
  const void* value;
};
absl::Status CheckNotNull(std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.value != nullptr) continue;
    return absl::InvalidArgumentError(absl::StrCat(argument.name, " is NULL"));
  }
  return absl::OkStatus();
}

template <typename Struct>
absl::Status CheckSize(size_t size_bytes, const char* name) {
  if (size_bytes >= kFirstSizeBytes<Struct> &&
      size_bytes <= kStructSizeBytesMax && size_bytes % alignof(Struct) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "struct_size of ", name, " is ", size_bytes, ", it should be sizeof(",
      name, "), which is ", sizeof(Struct), " in Refit ", REFIT_VERSION));
}

// A caller's struct in the form that this library knows.
template <typename Struct>
absl::StatusOr<Struct> Read(const Struct& given, const char* name) {
  const size_t size_bytes = given.struct_size;
  if (absl::Status s = CheckSize<Struct>(size_bytes, name); !s.ok()) return s;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  Struct known = {};
  std::memcpy(&known, bytes, std::min(size_bytes, sizeof(known)));
  if (size_bytes > sizeof(known) &&
      std::any_of(bytes + sizeof(known), bytes + size_bytes,
                  [](unsigned char byte) { return byte != 0; })) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " sets a field that Refit ", REFIT_VERSION, " does not have"));
  }
  return known;
}

absl::StatusOr<nanoseconds> Timeout(int64_t timeout_ms) {
  if (timeout_ms < 0) {
    return absl::InvalidArgumentError(absl::StrCat("timeout_ms is ", timeout_ms,
                                                   ", it should not be below "
                                                   "0"));
  }
  if (timeout_ms == 0) return kDefaultTimeout;
  if (timeout_ms > kTimeoutMax.count()) return nanoseconds::max();
  return milliseconds(timeout_ms);
}

absl::Status CheckRank(const refit_plan& plan, int32_t rank) {
  if (rank >= 0 && rank < plan.file->world_size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " is not one of the plan's ",
                   plan.file->world_size(), " ranks"));
}

absl::Status OpenPlan(const char* path, refit_plan*& plan) {
  absl::StatusOr<PlanFile> file = PlanFile::Open(path);
  if (!file.ok()) return file.status();
  auto made = std::make_unique<refit_plan>();
  made->file = std::make_shared<const PlanFile>(*std::move(file));
  if (const fb::Digest* digest = made->file->plan().body_digest()) {
    made->digest = DigestText(*digest);
  }
  plan = made.release();
  return absl::OkStatus();
}

void VisitTensors(const PlanFile& plan, int32_t rank,
                  refit_tensor_visitor visit, void* context) {
  const TensorTable table(plan, rank);
  for (size_t slot = 0; slot < table.stacks(); ++slot) {
    const fb::Buffer& buffer = table.buffer(slot);
    std::vector<uint64_t> shape;
    if (buffer.shape() != nullptr) {
      shape.assign(buffer.shape()->begin(), buffer.shape()->end());
    }
    refit_tensor tensor = {};
    tensor.struct_size = sizeof(tensor);
    tensor.size_bytes = TensorElements(buffer) * DTypeBytes(buffer.dtype());
    tensor.shape = shape.data();
    tensor.dimensions = shape.size();
    tensor.dtype = static_cast<refit_dtype>(buffer.dtype());
    const uint64_t tensors = table.begin(slot + 1) - table.begin(slot);
    for (uint64_t ordinal = 0; ordinal < tensors; ++ordinal) {
      const std::string name = table.Name(slot, ordinal);
      tensor.name = name.c_str();
      visit(&tensor, context);
    }
  }
}

absl::StatusOr<std::unique_ptr<Transport>> CreateTransport(
    const refit_executor_options& options) {
  if ((options.rendezvous == nullptr) == (options.fabric == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks meet at a rendezvous or in a fabric, ",
        options.fabric == nullptr ? "none is given" : "both are given"));
  }
  if (options.fabric != nullptr) {
    if (!options.device->is_host) {
      return absl::InvalidArgumentError(
          "a local fabric carries host memory only, the device is a GPU");
    }
    return options.fabric->fabric->CreateTransport(options.rank);
  }
  if (options.rendezvous->place.rank != options.rank) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the rendezvous is of rank ", options.rendezvous->place.rank,
        ", the executor of rank ", options.rank));
  }
  std::vector<uint32_t> hosts;
  for (const fb::RankProgram* program :
       *options.plan->file->body().programs()) {
    hosts.push_back(program->host());
  }
  return CreateMeetingTransport(options.rendezvous->place,
                                options.device->device.get(), std::move(hosts));
}

absl::Status CreateExecutor(const refit_executor_options& options,
                            refit_executor*& executor) {
  absl::Status status =
      CheckNotNull({{"plan", options.plan}, {"device", options.device}});
  if (!status.ok()) return status;
  if (options.reserved != 0 || options.reserved2 != 0) {
    return absl::InvalidArgumentError("reserved is not 0");
  }
  for (const auto& [name, value] :
       {std::pair("without_graph", options.without_graph),
        std::pair("time_rounds", options.time_rounds),
        std::pair("without_memory_watch", options.without_memory_watch)}) {
    if (value == 0 || value == 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", value, ", it should be 0 or 1"));
  }
  status = CheckRank(*options.plan, options.rank);
  if (!status.ok()) return status;
  auto made = std::make_unique<refit_executor>();
  made->plan = options.plan->file;
  made->device = options.device->device;
  if (options.fabric != nullptr) made->fabric = options.fabric->fabric;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      CreateTransport(options);
  if (!transport.ok()) return transport.status();
  made->transport = *std::move(transport);
  absl::StatusOr<std::unique_ptr<Executor>> loaded = Executor::Load(
      *made->plan, {.rank = options.rank,
                    .device = made->device.get(),
                    .transport = made->transport.get(),
                    .graph = options.without_graph == 0,
                    .time_rounds = options.time_rounds != 0,
                    .watch_memory = options.without_memory_watch == 0});
  if (!loaded.ok()) return loaded.status();
  made->executor = *std::move(loaded);
  executor = made.release();
  return absl::OkStatus();
}

absl::StatusOr<BoundTensor> ToBound(const refit_tensor& given) {
  const absl::StatusOr<refit_tensor> tensor = Read(given, "refit_tensor");
  if (!tensor.ok()) return tensor.status();
  absl::Status status = CheckNotNull({{"name", tensor->name}});
  if (tensor->dimensions > 0) {
    status.Update(CheckNotNull({{"shape", tensor->shape}}));
  }
  if (tensor->reserved != 0) {
    status.Update(absl::InvalidArgumentError("reserved is not 0"));
  }
  if (!status.ok()) return status;
  BoundTensor bound = {.name = tensor->name,
                       .data = tensor->data,
                       .size_bytes = tensor->size_bytes,
                       .dtype = DType::kUnspecified,
                       .shape = {}};
  // One that this library does not know is one that the plan does not want.
  if (tensor->dtype > 0 && tensor->dtype <= static_cast<int>(DType::MAX)) {
    bound.dtype = static_cast<DType>(tensor->dtype);
  }
  bound.shape.assign(tensor->shape, tensor->shape + tensor->dimensions);
  return bound;
}

absl::StatusOr<std::vector<BoundTensor>> ToBound(const refit_tensor* tensors,
                                                 size_t count) {
  std::vector<BoundTensor> bound;
  for (size_t i = 0; i < count; ++i) {
    // The caller's elements may be larger or smaller than ours.
    const auto* bytes = reinterpret_cast<const unsigned char*>(tensors) +
                        i * tensors->struct_size;
    const auto& element = *reinterpret_cast<const refit_tensor*>(bytes);
    absl::StatusOr<BoundTensor> one =
        element.struct_size == tensors->struct_size
            ? ToBound(element)
            : absl::InvalidArgumentError(absl::StrCat("struct_size is ",
                                                      element.struct_size,
                                                      ", that of tensors[0] "
                                                      "is ",
                                                      tensors->struct_size));
    if (!one.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors[", i, "]: ", one.status().message()));
    }
    bound.push_back(*std::move(one));
  }
  return bound;
}

absl::StatusOr<RunOptions> ToRunOptions(const refit_run_options* given) {
  RunOptions options;
  if (given == nullptr) return options;
  const absl::StatusOr<refit_run_options> known =
      Read(*given, "refit_run_options");
  if (!known.ok()) return known.status();
  const absl::StatusOr<nanoseconds> timeout = Timeout(known->timeout_ms);
  if (!timeout.ok()) return timeout.status();
  options.timeout = *timeout;
  if (known->addresses != nullptr) {
    options.addresses = {known->addresses, known->address_count};
  }
  return options;
}

refit_traffic ToC(const Traffic& traffic) {
  return {traffic.bytes_sent, traffic.bytes_received};
}

refit_counters ToC(const RunCounters& counters) {
  const auto by = [&](fb::Route route, fb::Mechanism mechanism) {
    return ToC(counters.by(route, mechanism));
  };
  using fb::Mechanism;
  using fb::Route;
  return {
      .struct_size = sizeof(refit_counters),
      .rounds = counters.rounds,
      .messages_sent = counters.messages_sent,
      .messages_received = counters.messages_received,
      .bytes_sent = counters.bytes_sent,
      .bytes_received = counters.bytes_received,
      .pack_seconds = counters.pack_seconds,
      .wire_seconds = counters.wire_seconds,
      .unpack_seconds = counters.unpack_seconds,
      .local_staged = by(Route::kLocal, Mechanism::kStaged),
      .local_direct = by(Route::kLocal, Mechanism::kDirect),
      .peer_staged = by(Route::kPeer, Mechanism::kStaged),
      .peer_direct = by(Route::kPeer, Mechanism::kDirect),
      .network_staged = by(Route::kNetwork, Mechanism::kStaged),
      .network_direct = by(Route::kNetwork, Mechanism::kDirect),
  };
}

}  // namespace
}  // namespace refit

using refit::CheckNotNull;
using refit::Guarded;

const char* refit_version(void) { return REFIT_VERSION; }

refit_code refit_status_code(const refit_status* status) {
  return status == nullptr ? REFIT_OK : status->code;
}

const char* refit_status_message(const refit_status* status) {
  return status == nullptr ? "" : status->message.c_str();
}

void refit_status_free(refit_status* status) {
  if (status != &refit::NoMemory()) delete status;
}

refit_status* refit_plan_open(const char* path, refit_plan** plan) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"plan", plan}});
    if (!status.ok()) return status;
    *plan = nullptr;
    status = CheckNotNull({{"path", path}});
    return status.ok() ? refit::OpenPlan(path, *plan) : status;
  });
}

void refit_plan_free(refit_plan* plan) { delete plan; }

int32_t refit_plan_world_size(const refit_plan* plan) {
  return plan->file->world_size();
}

int32_t refit_plan_source_ranks(const refit_plan* plan) {
  return plan->file->source_ranks();
}

const char* refit_plan_digest(const refit_plan* plan) {
  return plan->digest.c_str();
}

refit_status* refit_plan_staging_bytes(const refit_plan* plan, int32_t rank,
                                       uint64_t* staging_bytes) {
  return Guarded([&] {
    absl::Status status =
        CheckNotNull({{"plan", plan}, {"staging_bytes", staging_bytes}});
    if (status.ok()) status = refit::CheckRank(*plan, rank);
    if (status.ok()) {
      *staging_bytes =
          plan->file->body().programs()->Get(rank)->staging_bytes();
    }
    return status;
  });
}

refit_status* refit_plan_visit_tensors(const refit_plan* plan, int32_t rank,
                                       refit_tensor_visitor visit,
                                       void* context) {
  return Guarded([&] {
    absl::Status status = CheckNotNull(
        {{"plan", plan}, {"visit", reinterpret_cast<const void*>(visit)}});
    if (status.ok()) status = refit::CheckRank(*plan, rank);
    if (status.ok()) refit::VisitTensors(*plan->file, rank, visit, context);
    return status;
  });
}

refit_status* refit_device_create_host(refit_device** device) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"device", device}});
    if (!status.ok()) return status;
    *device = nullptr;
    *device = new refit_device{std::make_shared<refit::HostDevice>(), true};
    return status;
  });
}

refit_status* refit_device_create_cuda(int32_t ordinal, refit_device** device) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"device", device}});
    if (!status.ok()) return status;
    *device = nullptr;
    absl::StatusOr<std::unique_ptr<refit::Device>> made =
        refit::CreateCudaDevice(ordinal);
    if (made.ok()) *device = new refit_device{*std::move(made), false};
    return made.status();
  });
}

int32_t refit_cuda_device_count(void) { return refit::CudaDeviceCount(); }

void refit_device_free(refit_device* device) { delete device; }

refit_status* refit_rendezvous_create_tcp(const char* host, uint16_t port,
                                          int32_t rank, int32_t world_size,
                                          refit_rendezvous** rendezvous) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"rendezvous", rendezvous}});
    if (!status.ok()) return status;
    *rendezvous = nullptr;
    status = CheckNotNull({{"host", host}});
    if (!status.ok()) return status;
    *rendezvous = new refit_rendezvous{
        {.host = host, .port = port, .rank = rank, .world_size = world_size}};
    return status;
  });
}

refit_status* refit_unique_id_create(char id[REFIT_UNIQUE_ID_BYTES]) {
  return Guarded([&] {
    const absl::Status status = CheckNotNull({{"id", id}});
    if (!status.ok()) return status;
    const absl::StatusOr<refit::UniqueId> made = refit::CreateUniqueId();
    if (made.ok()) std::memcpy(id, made->bytes.data(), made->bytes.size());
    return made.status();
  });
}

refit_status* refit_rendezvous_create_unique_id(
    const char id[REFIT_UNIQUE_ID_BYTES], int32_t rank, int32_t world_size,
    refit_rendezvous** rendezvous) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"rendezvous", rendezvous}});
    if (!status.ok()) return status;
    *rendezvous = nullptr;
    status = CheckNotNull({{"id", id}});
    if (!status.ok()) return status;
    refit::UniqueId given;
    std::memcpy(given.bytes.data(), id, given.bytes.size());
    absl::StatusOr<refit::TcpRendezvous> place =
        refit::RendezvousFromUniqueId(given, rank, world_size);
    if (place.ok()) *rendezvous = new refit_rendezvous{*std::move(place)};
    return place.status();
  });
}

refit_status* refit_rendezvous_from_environment(refit_rendezvous** rendezvous) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"rendezvous", rendezvous}});
    if (!status.ok()) return status;
    *rendezvous = nullptr;
    absl::StatusOr<refit::TcpRendezvous> place =
        refit::RendezvousFromEnvironment();
    if (place.ok()) *rendezvous = new refit_rendezvous{*std::move(place)};
    return place.status();
  });
}

refit_status* refit_local_rank_from_environment(int32_t* local_rank) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"local_rank", local_rank}});
    if (!status.ok()) return status;
    const absl::StatusOr<int32_t> found = refit::LocalRankFromEnvironment();
    if (found.ok()) *local_rank = *found;
    return found.status();
  });
}

int32_t refit_rendezvous_rank(const refit_rendezvous* rendezvous) {
  return rendezvous->place.rank;
}

int32_t refit_rendezvous_world_size(const refit_rendezvous* rendezvous) {
  return rendezvous->place.world_size;
}

void refit_rendezvous_free(refit_rendezvous* rendezvous) { delete rendezvous; }

refit_status* refit_local_fabric_create(int32_t world_size,
                                        refit_local_fabric** fabric) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"fabric", fabric}});
    if (!status.ok()) return status;
    *fabric = nullptr;
    constexpr int32_t kMax = refit::TcpRendezvous::kWorldSizeMax;
    if (world_size < 1 || world_size > kMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "world size ", world_size, " is not between 1 and ", kMax));
    }
    *fabric = new refit_local_fabric{
        std::make_shared<refit::LocalFabric>(world_size)};
    return status;
  });
}

void refit_local_fabric_free(refit_local_fabric* fabric) { delete fabric; }

refit_status* refit_executor_create(const refit_executor_options* options,
                                    refit_executor** executor) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"executor", executor}});
    if (!status.ok()) return status;
    *executor = nullptr;
    status = CheckNotNull({{"options", options}});
    if (!status.ok()) return status;
    const absl::StatusOr<refit_executor_options> known =
        refit::Read(*options, "refit_executor_options");
    return known.ok() ? refit::CreateExecutor(*known, *executor)
                      : known.status();
  });
}

void refit_executor_free(refit_executor* executor) { delete executor; }

refit_status* refit_executor_connect(refit_executor* executor,
                                     int64_t timeout_ms) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"executor", executor}});
    if (!status.ok()) return status;
    const auto timeout = refit::Timeout(timeout_ms);
    return timeout.ok() ? executor->executor->Connect(*timeout)
                        : timeout.status();
  });
}

refit_status* refit_executor_bind(refit_executor* executor,
                                  const refit_tensor* tensors, size_t count,
                                  int64_t timeout_ms) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"executor", executor}});
    if (count > 0) status.Update(CheckNotNull({{"tensors", tensors}}));
    if (!status.ok()) return status;
    const auto timeout = refit::Timeout(timeout_ms);
    if (!timeout.ok()) return timeout.status();
    const auto bound = refit::ToBound(tensors, count);
    return bound.ok() ? executor->executor->Bind(*bound, *timeout)
                      : bound.status();
  });
}

refit_status* refit_executor_visit_post_hooks(const refit_executor* executor,
                                              refit_post_hook_visitor visit,
                                              void* context) {
  return Guarded([&] {
    const absl::Status status =
        CheckNotNull({{"executor", executor},
                      {"visit", reinterpret_cast<const void*>(visit)}});
    if (!status.ok()) return status;
    for (const refit::TensorPostHook& hook : executor->executor->post_hooks()) {
      const refit_post_hook shown = {.struct_size = sizeof(shown),
                                     .tensor = hook.tensor.c_str(),
                                     .name = hook.name.c_str(),
                                     .detail = hook.detail.c_str()};
      visit(&shown, context);
    }
    return status;
  });
}

refit_status* refit_executor_run(refit_executor* executor, void* stream,
                                 const refit_run_options* options) {
  return Guarded([&] {
    absl::Status status = CheckNotNull({{"executor", executor}});
    if (!status.ok()) return status;
    const auto known = refit::ToRunOptions(options);
    return known.ok() ? executor->executor->Run(stream, *known)
                      : known.status();
  });
}

refit_status* refit_executor_wait(refit_executor* executor) {
  return Guarded([&] {
    const absl::Status status = CheckNotNull({{"executor", executor}});
    return status.ok() ? executor->executor->Wait() : status;
  });
}

refit_state refit_executor_state(const refit_executor* executor) {
  return static_cast<refit_state>(executor->executor->state());
}

const char* refit_state_name(refit_state state) {
  // They are literals, which end with a null.
  return refit::ExecutorStateName(static_cast<refit::ExecutorState>(state))
      .data();
}

refit_status* refit_executor_counters(const refit_executor* executor,
                                      refit_counters* counters) {
  return Guarded([&] {
    absl::Status status =
        CheckNotNull({{"executor", executor}, {"counters", counters}});
    if (!status.ok()) return status;
    const size_t size_bytes = counters->struct_size;
    status = refit::CheckSize<refit_counters>(size_bytes, "refit_counters");
    if (!status.ok()) return status;
    refit_counters now = refit::ToC(executor->executor->counters());
    now.struct_size = size_bytes;
    // What this library does not count stays 0.
    std::memset(counters, 0, size_bytes);
    std::memcpy(counters, &now, std::min(size_bytes, sizeof(now)));
    return status;
  });
}

refit_status* refit_executor_visit_rounds(const refit_executor* executor,
                                          refit_round_visitor visit,
                                          void* context) {
  return Guarded([&] {
    const absl::Status status =
        CheckNotNull({{"executor", executor},
                      {"visit", reinterpret_cast<const void*>(visit)}});
    if (!status.ok()) return status;
    for (const refit::RoundMeasurement& round : executor->executor->rounds()) {
      const refit_round given = {
          .struct_size = sizeof(given),
          .round = round.round,
          .route = static_cast<refit_route>(round.route),
          .mechanism = static_cast<refit_mechanism>(round.mechanism),
          .reserved = 0,
          .bytes_sent = round.bytes_sent,
          .bytes_received = round.bytes_received,
          .seconds = round.seconds};
      visit(&given, context);
    }
    return status;
  });
}

void refit_executor_close(refit_executor* executor) {
  if (executor == nullptr) return;
  executor->executor->Close();
  // Nothing gets past the state of a closed executor to its transport.
  executor->transport.reset();
}
