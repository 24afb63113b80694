// The executor and where its ranks meet. Whatever waits for other ranks or
// moves weights does so without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/ucx_api.h"
#include "plan/dtype.h"
#include "plan/enum_text.h"
#include "plan/plan_file.h"
#include "python/src/bindings.h"
#include "python/src/signals.h"
#include "python/src/status.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "refit/host_device.h"
#include "refit/interruption.h"
#include "refit/local_transport.h"
#include "refit/unique_id.h"
#include "refit/worker.h"

namespace refit::python {
namespace {

namespace nb = nanobind;
using std::chrono::nanoseconds;

nanoseconds Timeout(double seconds) {
  if (!(seconds > 0)) {
    Check(absl::InvalidArgumentError(
        absl::StrCat("timeout is ", seconds, " s; wanted more than 0")));
  }
  const std::chrono::duration<double> wanted(seconds);
  return wanted < std::chrono::duration<double>(nanoseconds::max())
             ? std::chrono::duration_cast<nanoseconds>(wanted)
             : nanoseconds::max();
}

// Name, address, bytes, dtype, shape, address of its bitmap or 0.
using TensorTuple = std::tuple<std::string, uintptr_t, uint64_t, std::string,
                               std::vector<uint64_t>, uintptr_t>;

// A worker whose calls hold no lock of the interpreter.
class RankExecutor {
 public:
  RankExecutor(std::shared_ptr<const PlanFile> plan, int32_t rank,
               std::optional<int> cuda_ordinal,
               std::shared_ptr<LocalFabric> fabric,
               const std::optional<TcpRendezvous>& rendezvous) {
    WorkerOptions options = {.plan = std::move(plan),
                             .device = nullptr,
                             .fabric = std::move(fabric),
                             .executor = {.rank = rank}};
    if (cuda_ordinal.has_value()) {
      options.device = Check(CreateCudaDevice(*cuda_ordinal));
    } else {
      options.device = std::make_shared<HostDevice>();
    }
    if (rendezvous.has_value()) options.meeting = *rendezvous;
    worker_ = Check(Worker::Create(std::move(options)));
  }

  // An end under way waits for peers, whose threads may need the interpreter.
  ~RankExecutor() {
    const nb::gil_scoped_release unlocked;
    worker_.reset();
  }
  RankExecutor(const RankExecutor&) = delete;
  RankExecutor& operator=(const RankExecutor&) = delete;

  void Connect(double timeout) {
    Call(
        [&](Executor& executor) { return executor.Connect(Timeout(timeout)); });
  }

  void Replace(std::shared_ptr<const PlanFile> plan, int32_t rank,
               std::shared_ptr<LocalFabric> fabric,
               const std::optional<TcpRendezvous>& rendezvous, double timeout) {
    Replacement next = {
        .plan = std::move(plan), .rank = rank, .fabric = std::move(fabric)};
    if (rendezvous.has_value()) next.meeting = *rendezvous;
    Waiting([&](const Interruption& poll) {
      return worker_->Replace(std::move(next), Timeout(timeout), poll);
    });
  }

  bool HasPlan(const PlanFile& plan, int32_t rank) const {
    return executor().state() != ExecutorState::kClosed &&
           &worker_->plan() == &plan && worker_->transport().rank() == rank;
  }

  // `hooks`: names and, where Wait is to perform them, functions of a hook's
  // name and a tensor's, which return what went wrong, "" if nothing.
  void Bind(const std::vector<TensorTuple>& tensors, double timeout,
            const std::vector<std::pair<std::string, nb::object>>& hooks) {
    std::vector<PostHookPerformer> performers;
    for (const auto& [name, function] : hooks) {
      performers.push_back({.name = name, .perform = nullptr});
      if (!function.is_none()) performers.back().perform = Performing(function);
    }
    std::vector<BoundTensor> bound;
    bound.reserve(tensors.size());
    for (const auto& [name, address, size_bytes, dtype, shape, changes] :
         tensors) {
      bound.push_back({.name = name,
                       .data = reinterpret_cast<void*>(address),
                       .size_bytes = size_bytes,
                       .dtype = ParseDType(dtype).value_or(DType::kUnspecified),
                       .shape = shape,
                       .changes = reinterpret_cast<uint32_t*>(changes)});
    }
    Call([&](Executor& executor) {
      return executor.Bind(bound, Timeout(timeout), std::move(performers));
    });
  }

  void Run(uintptr_t stream,
           const std::optional<std::vector<uintptr_t>>& addresses,
           double timeout, bool check, bool dense,
           uint32_t direct_multiprocessors) {
    RunOptions options = {.timeout = Timeout(timeout)};
    options.check = check;
    options.dense = dense;
    options.direct_multiprocessors = direct_multiprocessors;
    std::vector<const void*> now;
    if (addresses.has_value()) {
      for (const uintptr_t address : *addresses) {
        now.push_back(reinterpret_cast<const void*>(address));
      }
      options.addresses = now;
    }
    Call([&](Executor& executor) {
      return executor.Run(reinterpret_cast<Stream>(stream), options);
    });
  }

  void Wait() {
    Call([](Executor& executor) { return executor.Wait(); });
  }

  // Name, dtype, sum and elements of each param.
  std::vector<std::tuple<std::string, std::string, uint64_t, uint64_t>> Digest(
      uintptr_t stream, const std::vector<int32_t>& among) {
    absl::StatusOr<std::vector<ParamDigest>> digests;
    {
      const nb::gil_scoped_release unlocked;
      digests = worker_->executor().Digest(reinterpret_cast<Stream>(stream),
                                           {.among = among});
    }
    std::vector<std::tuple<std::string, std::string, uint64_t, uint64_t>> shown;
    for (const ParamDigest& digest : Check(std::move(digests))) {
      shown.emplace_back(digest.param, std::string(DTypeName(digest.dtype)),
                         digest.digest.sum, digest.digest.elements);
    }
    return shown;
  }

  // From another thread.
  void Interrupt() { worker_->Interrupt(); }

  void Close() {
    const nb::gil_scoped_release unlocked;
    worker_->Close();
  }

  // Tensor, name, detail, by_executor, refit.
  using HookTuple =
      std::tuple<std::string, std::string, std::string, bool, uint64_t>;
  std::vector<HookTuple> PostHooks() const {
    std::vector<HookTuple> hooks;
    for (const TensorPostHook& hook : executor().post_hooks()) {
      hooks.emplace_back(hook.tensor, hook.name, hook.detail, hook.by_executor,
                         hook.refit);
    }
    return hooks;
  }

  uint64_t Refits() const { return executor().refits(); }

  std::string State() const {
    return std::string(ExecutorStateName(executor().state()));
  }

  std::vector<std::string> Notices() const {
    std::vector<std::string> texts;
    for (const Notice& notice : executor().notices()) {
      texts.push_back(notice.text);
    }
    return texts;
  }

  // is_delta, why_dense, base_version, version, elements, changed_elements,
  // stored_bytes, dense_bytes, move_seconds, keep_seconds, rung, then
  // find_seconds, encode_seconds, wire_seconds, apply_seconds, check_seconds,
  // agree_seconds, total_seconds.
  using ReportTuple =
      std::tuple<bool, std::string, uint64_t, uint64_t, uint64_t, uint64_t,
                 uint64_t, uint64_t, double, double, uint32_t, double, double,
                 double, double, double, double, double>;
  std::optional<ReportTuple> LastDelta() const {
    const std::optional<DeltaReport>& report = executor().delta_report();
    if (!report.has_value()) return std::nullopt;
    return ReportTuple(
        report->is_delta, report->why_dense, report->base_version,
        report->version, report->elements, report->changed_elements,
        report->stored_bytes, report->dense_bytes, report->move_seconds,
        report->keep_seconds, report->rung, report->find_seconds,
        report->encode_seconds, report->wire_seconds, report->apply_seconds,
        report->check_seconds, report->agree_seconds, report->total_seconds);
  }

  nb::dict Counters() const {
    const RunCounters& counters = executor().counters();
    nb::dict result;
    result["rounds"] = counters.rounds;
    result["messages_sent"] = counters.messages_sent;
    result["messages_received"] = counters.messages_received;
    result["bytes_sent"] = counters.bytes_sent;
    result["bytes_received"] = counters.bytes_received;
    result["pack_seconds"] = counters.pack_seconds;
    result["wire_seconds"] = counters.wire_seconds;
    result["unpack_seconds"] = counters.unpack_seconds;
    result["fused_elements"] = counters.fused_elements;
    for (const fb::Route route :
         {fb::Route::kLocal, fb::Route::kPeer, fb::Route::kNetwork}) {
      for (const fb::Mechanism mechanism : fb::EnumValuesMechanism()) {
        const Traffic& traffic = counters.by(route, mechanism);
        const std::string key =
            absl::StrCat(std::string(EnumText(route)), "_",
                         std::string(EnumText(mechanism)), "_bytes_");
        result[nb::str((key + "sent").c_str())] = traffic.bytes_sent;
        result[nb::str((key + "received").c_str())] = traffic.bytes_received;
      }
    }
    return result;
  }

 private:
  const Executor& executor() const { return worker_->executor(); }

  // `call` without the interpreter's lock. A signal whose handler raises, and
  // Interrupt, end what it waits in.
  template <typename Function>
  void Call(const Function& call) {
    Waiting(
        [&](const Interruption& poll) { return worker_->Call(call, poll); });
  }

  template <typename Function>
  static void Waiting(const Function& call) {
    Signals signals;
    absl::Status status;
    {
      const nb::gil_scoped_release unlocked;
      status = call([&] { return signals.Poll(); });
    }
    signals.Rethrow();
    Check(status);
  }

  using Performer = decltype(PostHookPerformer::perform);

  // The function is let go of with the interpreter's lock, wherever the
  // executor drops it.
  static Performer Performing(const nb::object& function) {
    const std::shared_ptr<nb::object> held(
        new nb::object(function), [](nb::object* object) {
          const nb::gil_scoped_acquire locked;
          delete object;
        });
    return [held](const TensorPostHook& hook, const BoundTensor&) {
      const nb::gil_scoped_acquire locked;
      const auto problem =
          nb::cast<std::string>((*held)(hook.name, hook.tensor));
      return problem.empty() ? absl::OkStatus() : absl::InternalError(problem);
    };
  }

  std::unique_ptr<Worker> worker_;
};

nb::bytes NewUniqueId(const std::string& host) {
  const UniqueId id = Check(CreateUniqueId(host));
  return nb::bytes(id.bytes.data(), id.bytes.size());
}

nb::bytes NewHostedMeeting(int32_t world_size, const std::string& host) {
  absl::StatusOr<UniqueId> made;
  {
    const nb::gil_scoped_release unlocked;
    made = HostMeeting(world_size, host);
  }
  const UniqueId id = Check(std::move(made));
  return nb::bytes(id.bytes.data(), id.bytes.size());
}

TcpRendezvous FromUniqueId(const nb::bytes& bytes, int32_t rank,
                           int32_t world_size) {
  UniqueId id;
  if (bytes.size() != id.bytes.size()) {
    Check(absl::InvalidArgumentError(absl::StrCat(
        "the id has ", bytes.size(), " bytes; wanted ", id.bytes.size())));
  }
  std::copy_n(bytes.c_str(), id.bytes.size(), id.bytes.begin());
  return Check(RendezvousFromUniqueId(id, rank, world_size));
}

// The device of tensors, which is made once.
std::shared_ptr<Device> DeviceOf(std::optional<int> cuda_ordinal) {
  static std::mutex mutex;
  static auto* const devices =
      new std::map<std::optional<int>, std::shared_ptr<Device>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Device>& device = (*devices)[cuda_ordinal];
  if (device == nullptr) {
    if (cuda_ordinal.has_value()) {
      device = Check(CreateCudaDevice(*cuda_ordinal));
    } else {
      device = std::make_shared<HostDevice>();
    }
  }
  return device;
}

void CastAndMark(std::optional<int> cuda_ordinal, uintptr_t stream,
                 uintptr_t from, uintptr_t to, const std::string& to_dtype,
                 uintptr_t changes, uint64_t first_element, uint64_t elements) {
  const std::shared_ptr<Device> device = DeviceOf(cuda_ordinal);
  absl::Status status;
  {
    const nb::gil_scoped_release unlocked;
    status = device->CastAndMark(
        {.from = reinterpret_cast<const float*>(from),
         .to = reinterpret_cast<void*>(to),
         .to_dtype = ParseDType(to_dtype).value_or(DType::kUnspecified),
         .changes = reinterpret_cast<uint32_t*>(changes),
         .first_element = first_element,
         .elements = elements},
        reinterpret_cast<Stream>(stream));
  }
  Check(status);
}

void EndMeeting(const TcpRendezvous& rendezvous, const std::string& reason,
                double timeout) {
  const auto limit =
      std::min<nanoseconds>(Timeout(timeout), std::chrono::hours(24));
  Signals signals;
  absl::Status status;
  {
    const nb::gil_scoped_release unlocked;
    const ScopedInterruption scope([&] { return signals.Poll(); });
    status = EndMeetingTcp(rendezvous, absl::InvalidArgumentError(reason),
                           std::chrono::steady_clock::now() + limit);
  }
  signals.Rethrow();
  Check(status);
}

}  // namespace

void BindExecutor(nb::module_& module) {
  nb::class_<LocalFabric>(module, "LocalFabric")
      .def(
          "__init__",
          [](LocalFabric* self, int32_t world_size) {
            constexpr int32_t kMax = TcpRendezvous::kWorldSizeMax;
            if (world_size < 1 || world_size > kMax) {
              Check(absl::InvalidArgumentError(absl::StrCat(
                  "world size ", world_size, " is not between 1 and ", kMax)));
            }
            new (self) LocalFabric(world_size);
          },
          nb::arg("world_size"));
  nb::class_<TcpRendezvous>(module, "Rendezvous")
      .def_static("from_environment",
                  [] { return Check(RendezvousFromEnvironment()); })
      .def_static(
          "tcp",
          [](const std::string& host, uint16_t port, int32_t rank,
             int32_t world_size) {
            return TcpRendezvous{.host = host,
                                 .port = port,
                                 .rank = rank,
                                 .world_size = world_size,
                                 .secret = Check(SecretFromEnvironment())};
          },
          nb::arg("host"), nb::arg("port"), nb::arg("rank"),
          nb::arg("world_size"))
      .def_static("from_unique_id", &FromUniqueId, nb::arg("id"),
                  nb::arg("rank"), nb::arg("world_size"))
      .def_ro("host", &TcpRendezvous::host)
      .def_ro("port", &TcpRendezvous::port)
      .def_ro("rank", &TcpRendezvous::rank)
      .def_ro("world_size", &TcpRendezvous::world_size)
      .def("end_meeting", &EndMeeting, nb::arg("reason"), nb::arg("timeout"));
  nb::class_<RankExecutor>(module, "Executor")
      .def(nb::init<std::shared_ptr<PlanFile>, int32_t, std::optional<int>,
                    std::shared_ptr<LocalFabric>,
                    const std::optional<TcpRendezvous>&>(),
           nb::arg("plan"), nb::arg("rank"), nb::arg("cuda_ordinal").none(),
           nb::arg("fabric").none(), nb::arg("rendezvous").none())
      .def("connect", &RankExecutor::Connect, nb::arg("timeout"))
      .def("replace", &RankExecutor::Replace, nb::arg("plan"), nb::arg("rank"),
           nb::arg("fabric").none(), nb::arg("rendezvous").none(),
           nb::arg("timeout"))
      .def("has_plan", &RankExecutor::HasPlan, nb::arg("plan"), nb::arg("rank"))
      .def("bind", &RankExecutor::Bind, nb::arg("tensors"), nb::arg("timeout"),
           nb::arg("hooks"))
      .def("post_hooks", &RankExecutor::PostHooks)
      .def_prop_ro("refits", &RankExecutor::Refits)
      .def("run", &RankExecutor::Run, nb::arg("stream"),
           nb::arg("addresses").none(), nb::arg("timeout"), nb::arg("check"),
           nb::arg("dense"), nb::arg("direct_multiprocessors"))
      .def("wait", &RankExecutor::Wait)
      .def("digest", &RankExecutor::Digest, nb::arg("stream"), nb::arg("among"))
      .def("interrupt", &RankExecutor::Interrupt)
      .def("close", &RankExecutor::Close)
      .def_prop_ro("state", &RankExecutor::State)
      .def("notices", &RankExecutor::Notices)
      .def("delta_report", &RankExecutor::LastDelta)
      .def("counters", &RankExecutor::Counters);
  module.def("cast_and_mark", &CastAndMark, nb::arg("cuda_ordinal").none(),
             nb::arg("stream"), nb::arg("from"), nb::arg("to"),
             nb::arg("to_dtype"), nb::arg("changes"), nb::arg("first_element"),
             nb::arg("elements"));
  module.def("unique_id", &NewUniqueId, nb::arg("host"));
  module.def("host_meeting", &NewHostedMeeting, nb::arg("world_size"),
             nb::arg("host"));
  module.def("cuda_device_count", &CudaDeviceCount);
  module.def("local_rank", [] { return Check(LocalRankFromEnvironment()); });
  module.def("ucx", [] {
    const ucx::Api api = Check(ucx::Load());
    return std::pair(api.library, ucx::VersionText(api.version));
  });
  module.def("nccl", [] {
    const nccl::Api api = Check(nccl::Load());
    return std::pair(api.library, nccl::VersionText(api.version));
  });
}

}  // namespace refit::python
