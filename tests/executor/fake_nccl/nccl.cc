// The functions of libnccl: what a call may not do is refused here, what it
// starts is done in the engine.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/transport/nccl_api.h"
#include "tests/executor/fake_nccl/engine.h"

namespace refit::nccl::fake {
namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr char kIdPrefix[8] = "fakeid:";

// A killed rank's calls do not return while the test runs.
Result BlockIfKilled(Lock& lock, int worker) {
  Engine& engine = Engine::Get();
  if (!engine.workers[worker].is_killed) return kSuccess;
  engine.AwaitRelease(lock);
  return kSystemError;
}

// Says no. The group that is open, if any, fails with its first refusal.
Result Refuse(Result result, const std::string& text, Communicator* comm) {
  thread.last_error = text;
  if (comm != nullptr) comm->last_error = text;
  if (thread.depth > 0 && thread.error == kSuccess) thread.error = result;
  return result;
}

Result Enter(Lock& lock, Comm handle, const char* call, Communicator*& comm) {
  comm = Engine::Get().Find(handle);
  if (comm == nullptr) {
    return Refuse(kInvalidArgument,
                  absl::StrCat(call, ": unknown communicator"), nullptr);
  }
  if (comm->state == State::kAborted) {
    return Refuse(kInvalidArgument,
                  absl::StrCat(call, ": the communicator was aborted"), comm);
  }
  return BlockIfKilled(lock, comm->worker);
}

// Whether the communicator takes new work.
Result CheckReady(const char* call, Communicator& comm) {
  if (comm.state == State::kFailed) {
    return Refuse(comm.error, comm.last_error, &comm);
  }
  if (!comm.is_observed) {
    return Refuse(kInvalidArgument,
                  absl::StrCat(call,
                               ": attempt to use communicator before the "
                               "previous operation returned ncclSuccess"),
                  &comm);
  }
  return kSuccess;
}

Result CheckInit(const Comm* handle, int ranks, int rank, const Clique* clique,
                 const Config& config) {
  std::string wrong;
  if (handle == nullptr) wrong = "null pointer";
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    wrong = absl::StrCat("rank ", rank, " of ", ranks);
  }
  if (clique == nullptr) wrong = "unknown unique id";
  if (config.magic != Config{}.magic || config.size < sizeof(Config) ||
      config.version < 21800) {
    wrong = "ncclConfig_t is not initialized";
  }
  if (!wrong.empty()) {
    return Refuse(kInvalidArgument,
                  absl::StrCat("ncclCommInitRankConfig: ", wrong), nullptr);
  }
  if (clique->came == 0 || clique->came < clique->members.size()) {
    return kSuccess;
  }
  return Refuse(kInvalidUsage,
                "ncclCommInitRankConfig: all ranks of this unique id came",
                nullptr);
}

Clique* CliqueOf(const UniqueId& id) {
  if (std::memcmp(id.internal, kIdPrefix, sizeof(kIdPrefix)) != 0) {
    return nullptr;
  }
  uint64_t number;
  std::memcpy(&number, id.internal + sizeof(kIdPrefix), sizeof(number));
  return Engine::Get().FindClique(number);
}

Result Enqueue(bool is_send, void* data, size_t count, DataType type, int peer,
               Comm handle) {
  const char* call = is_send ? "ncclSend" : "ncclRecv";
  Lock lock(Engine::Get().mutex);
  Communicator* comm;
  if (Result r = Enter(lock, handle, call, comm); r != kSuccess) return r;
  if (Result r = CheckReady(call, *comm); r != kSuccess) return r;
  const int ranks = static_cast<int>(comm->clique->members.size());
  std::string wrong;
  if (data == nullptr) wrong = ": null pointer";
  if (peer < 0 || peer >= ranks) {
    wrong = absl::StrCat(": peer ", peer, " of ", ranks, " ranks");
  }
  if (type != kUint8) {
    wrong = absl::StrCat(": the fake knows no type ", static_cast<int>(type));
  }
  if (thread.depth == 0) wrong = " outside a group";
  if (!wrong.empty()) {
    return Refuse(thread.depth == 0 ? kInvalidUsage : kInvalidArgument,
                  absl::StrCat(call, wrong), comm);
  }
  Operation operation;
  operation.is_send = is_send;
  operation.data = static_cast<std::byte*>(data);
  operation.count = count;
  operation.peer = peer;
  operation.comm = comm;
  operation.fault = Engine::Get().TakeFault(*comm);
  auto group = std::find_if(thread.groups.begin(), thread.groups.end(),
                            [&](const auto& g) { return g.comm == comm; });
  if (group == thread.groups.end()) {
    group = thread.groups.insert(group, IssuedGroup{comm, {}});
  }
  group->operations.push_back(std::make_unique<Operation>(operation));
  return kSuccess;
}

Result CheckGroup(Lock& lock, const IssuedGroup& group) {
  constexpr char kCall[] = "ncclGroupEnd";
  Communicator* comm;
  const Comm handle = reinterpret_cast<Comm>(group.comm);
  if (Result r = Enter(lock, handle, kCall, comm); r != kSuccess) return r;
  if (Result r = CheckReady(kCall, *comm); r != kSuccess) return r;
  int self_sends = 0;
  for (const auto& operation : group.operations) {
    if (operation->peer != comm->rank) continue;
    self_sends += operation->is_send ? 1 : -1;
  }
  if (self_sends == 0) return kSuccess;
  return Refuse(kInvalidUsage,
                absl::StrCat("rank ", comm->rank, " has a ",
                             self_sends > 0 ? "send to" : "receive from",
                             " itself without its match in the group"),
                comm);
}

// None of them runs.
Result Capture(const std::vector<IssuedGroup>& groups) {
  Result result = kSuccess;
  for (const IssuedGroup& group : groups) {
    for (const auto& operation : group.operations) {
      if (operation->fault.kind != Fault::kFail) continue;
      Engine::Get().Fail(*group.comm, operation->fault.result,
                         "an operation failed while it was captured");
      return operation->fault.result;
    }
  }
  const auto delay = Engine::Get().settings.capture_delay;
  if (delay == delay.zero()) return kSuccess;
  for (const IssuedGroup& group : groups) {
    group.comm->captured_at = Clock::now() + delay;
    group.comm->is_observed = false;
    result = kInProgress;
  }
  return result;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

Result ncclGetVersion(int* version) {
  Lock lock(Engine::Get().mutex);
  if (version == nullptr) {
    return Refuse(kInvalidArgument, "ncclGetVersion: null pointer", nullptr);
  }
  Engine& engine = Engine::Get();
  const auto worker = engine.workers.find(thread.rank);
  const bool has_own =
      worker != engine.workers.end() && worker->second.version != 0;
  *version = has_own ? worker->second.version : engine.settings.version;
  return kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  Lock lock(Engine::Get().mutex);
  if (id == nullptr) {
    return Refuse(kInvalidArgument, "ncclGetUniqueId: null pointer", nullptr);
  }
  const uint64_t number = Engine::Get().AddClique();
  ++Engine::Get().counts.ids;
  *id = {};
  std::memcpy(id->internal, kIdPrefix, sizeof(kIdPrefix));
  std::memcpy(id->internal + sizeof(kIdPrefix), &number, sizeof(number));
  return kSuccess;
}

Result ncclSetEncryption(const EncryptionConfig* config) {
  constexpr size_t kKeyBytesMin = 32;
  Lock lock(Engine::Get().mutex);
  Counts& counts = Engine::Get().counts;
  std::string wrong;
  if (config == nullptr || config->magic != EncryptionConfig{}.magic ||
      config->size != sizeof(EncryptionConfig)) {
    wrong = "ncclEncryptionConfig_t is not initialized";
  } else if (config->mode != EncryptionConfig::kPreSharedKey) {
    wrong = absl::StrCat("mode is ", config->mode);
  } else if (config->key == nullptr || strlen(config->key) < kKeyBytesMin) {
    wrong = "the key is too short";
  } else if (counts.ids > 0 && counts.key != config->key) {
    wrong = "another key, or the first, after ncclGetUniqueId";
  }
  if (!wrong.empty()) {
    return Refuse(kInvalidArgument, absl::StrCat("ncclSetEncryption: ", wrong),
                  nullptr);
  }
  counts.key = config->key;
  return kSuccess;
}

Result ncclCommInitRankConfig(Comm* handle, int ranks, UniqueId id, int rank,
                              Config* config) {
  Engine& engine = Engine::Get();
  Lock lock(engine.mutex);
  const int worker = thread.rank >= 0 ? thread.rank : rank;
  if (Result r = BlockIfKilled(lock, worker); r != kSuccess) return r;
  Clique* clique = CliqueOf(id);
  const Config used = config != nullptr ? *config : Config{};
  if (Result r = CheckInit(handle, ranks, rank, clique, used); r != kSuccess) {
    return r;
  }
  Communicator& comm = engine.AddCommunicator();
  comm.clique = clique;
  comm.rank = rank;
  comm.worker = worker;
  comm.owner = thread.Owner();
  engine.Join(comm, ranks);
  *handle = reinterpret_cast<Comm>(&comm);
  if (used.blocking == 0) return kInProgress;
  comm.is_observed = true;
  return kSuccess;
}

Result ncclCommGetAsyncError(Comm handle, Result* error) {
  constexpr char kCall[] = "ncclCommGetAsyncError";
  Lock lock(Engine::Get().mutex);
  Communicator* comm;
  if (Result r = Enter(lock, handle, kCall, comm); r != kSuccess) return r;
  if (error == nullptr) {
    return Refuse(kInvalidArgument, absl::StrCat(kCall, ": null pointer"),
                  comm);
  }
  *error = Engine::Get().AsyncState(*comm);
  if (*error != kInProgress) comm->is_observed = true;
  return kSuccess;
}

Result ncclCommAbort(Comm handle) {
  Lock lock(Engine::Get().mutex);
  Communicator* comm;
  if (Result r = Enter(lock, handle, "ncclCommAbort", comm); r != kSuccess) {
    return r;
  }
  if (Engine::Get().workers[comm->worker].abort_hangs) {
    Engine::Get().AwaitRelease(lock);
    return kSystemError;
  }
  if (Clock::now() < comm->captured_at) {
    Engine::Get().RecordViolation(
        "a communicator is aborted while its group is put into a graph");
  }
  Engine::Get().Leave(*comm, State::kAborted);
  return kSuccess;
}

Result ncclGroupStart() {
  ++thread.depth;
  return kSuccess;
}

Result ncclGroupEnd() {
  Engine& engine = Engine::Get();
  Lock lock(engine.mutex);
  if (thread.depth == 0) {
    return Refuse(kInvalidUsage, "ncclGroupEnd without ncclGroupStart",
                  nullptr);
  }
  if (--thread.depth > 0) return kSuccess;
  auto groups = std::exchange(thread.groups, {});
  Result result = std::exchange(thread.error, kSuccess);
  for (const IssuedGroup& group : groups) {
    if (result == kSuccess) result = CheckGroup(lock, group);
  }
  if (result != kSuccess) return result;
  if (thread.captures) return Capture(groups);
  for (IssuedGroup& group : groups) {
    engine.RecordOverlaps(*group.comm);
    engine.Issue(*group.comm, std::move(group.operations));
  }
  return groups.empty() ? kSuccess : kInProgress;
}

Result ncclSend(const void* data, size_t count, DataType type, int peer,
                Comm comm, CudaStream) {
  return Enqueue(true, const_cast<void*>(data), count, type, peer, comm);
}

Result ncclRecv(void* data, size_t count, DataType type, int peer, Comm comm,
                CudaStream) {
  return Enqueue(false, data, count, type, peer, comm);
}

// The root's bytes, in place on all ranks: from it to each of the others.
Result ncclBroadcast(const void* from, void* to, size_t count, DataType type,
                     int root, Comm handle, CudaStream stream) {
  int rank = 0;
  int ranks = 0;
  {
    Lock lock(Engine::Get().mutex);
    Communicator* comm;
    if (Result r = Enter(lock, handle, "ncclBroadcast", comm); r != kSuccess) {
      return r;
    }
    rank = comm->rank;
    ranks = static_cast<int>(comm->clique->members.size());
    if (from != to || root < 0 || root >= ranks) {
      return Refuse(kInvalidArgument, "ncclBroadcast: not in place, or no root",
                    comm);
    }
  }
  Result result = ncclGroupStart();
  const auto add = [&](Result r) {
    if (result == kSuccess) result = r;
  };
  if (rank != root) add(ncclRecv(to, count, type, root, handle, stream));
  for (int peer = 0; rank == root && peer < ranks; ++peer) {
    if (peer != root) add(ncclSend(from, count, type, peer, handle, stream));
  }
  const Result ended = ncclGroupEnd();
  return result == kSuccess ? ended : result;
}

const char* ncclGetErrorString(Result result) {
  static constexpr const char* kTexts[] = {
      "no error",
      "unhandled cuda error",
      "unhandled system error",
      "internal error",
      "invalid argument",
      "invalid usage",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return result >= 0 && result < std::ssize(kTexts) ? kTexts[result]
                                                    : "unknown result code";
}

// Valid until the thread's next call.
const char* ncclGetLastError(Comm handle) {
  Lock lock(Engine::Get().mutex);
  const Communicator* comm = Engine::Get().Find(handle);
  thread.returned_error =
      comm != nullptr ? comm->last_error : thread.last_error;
  return thread.returned_error.c_str();
}

}  // extern "C"
#pragma GCC visibility pop

}  // namespace refit::nccl::fake
