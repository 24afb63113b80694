// The executor in C.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "executor/c_api/objects.h"
#include "executor/c_api/status.h"
#include "refit/worker.h"

namespace refit {
namespace {

static_assert(REFIT_NOTICE_HOSTS == static_cast<int>(NoticeKind::kHosts));
static_assert(REFIT_NOTICE_NOT_DELTA ==
              static_cast<int>(NoticeKind::kNotDelta));
static_assert(REFIT_STATE_LOADED == static_cast<int>(ExecutorState::kLoaded));
static_assert(REFIT_STATE_CLOSED == static_cast<int>(ExecutorState::kClosed));

absl::StatusOr<Wire> WireOf(const refit_executor_options& options) {
  switch (options.transport) {
    case REFIT_TRANSPORT_DEFAULT:
      return Wire::kDefault;
    case REFIT_TRANSPORT_NCCL:
      return Wire::kNccl;
    case REFIT_TRANSPORT_UCX:
      return Wire::kUcx;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "transport is ", options.transport, ", it should be 0, 1 or 2"));
  }
}

absl::Status CreateExecutor(const refit_executor_options& options,
                            refit_executor*& executor) {
  absl::Status status =
      CheckNotNull({{"plan", options.plan}, {"device", options.device}});
  status.Update(CheckReserved(options.reserved));
  status.Update(CheckReserved(options.reserved2));
  status.Update(
      CheckFlags({{"without_graph", options.without_graph},
                  {"without_memory_watch", options.without_memory_watch}}));
  if (status.ok()) status = CheckRank(*options.plan, options.rank);
  if (!status.ok()) return status;
  const absl::StatusOr<Wire> wire = WireOf(options);
  if (!wire.ok()) return wire.status();
  WorkerOptions made_of = {
      .plan = options.plan->file,
      .device = options.device->device,
      .wire = *wire,
      .executor = {.rank = options.rank,
                   .graph = options.without_graph == 0,
                   .watch_memory = options.without_memory_watch == 0}};
  if (options.rendezvous != nullptr) made_of.meeting = options.rendezvous->tcp;
  if (options.fabric != nullptr) made_of.fabric = options.fabric->fabric;
  absl::StatusOr<std::unique_ptr<Worker>> worker =
      Worker::Create(std::move(made_of));
  if (!worker.ok()) return worker.status();
  executor = new refit_executor{*std::move(worker)};
  return absl::OkStatus();
}

// Calls `take` for each of a caller's array, whose elements may be larger or
// smaller than ours, but have one size.
template <typename Struct, typename Take>
absl::Status ForEach(const Struct* array, size_t count, const char* name,
                     const char* struct_name, const Take& take) {
  if (count == 0) return absl::OkStatus();
  if (absl::Status s = CheckNotNull({{name, array}}); !s.ok()) return s;
  for (size_t i = 0; i < count; ++i) {
    const auto& element = *reinterpret_cast<const Struct*>(
        reinterpret_cast<const unsigned char*>(array) + i * array->struct_size);
    absl::Status status;
    if (element.struct_size != array->struct_size) {
      status = absl::InvalidArgumentError(
          absl::StrCat("struct_size is ", element.struct_size, ", that of ",
                       name, "[0] is ", array->struct_size));
    } else {
      const absl::StatusOr<Struct> known = Read(element, struct_name);
      status = known.ok() ? take(*known) : known.status();
    }
    if (status.ok()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, "[", i, "]: ", status.message()));
  }
  return absl::OkStatus();
}

// One that this library does not know is one that nobody wants.
DType ToDType(refit_dtype dtype) {
  return dtype > 0 && dtype <= static_cast<int>(DType::MAX)
             ? static_cast<DType>(dtype)
             : DType::kUnspecified;
}

absl::StatusOr<BoundTensor> ToBound(const refit_tensor& tensor) {
  absl::Status status = CheckNotNull({{"name", tensor.name}});
  if (tensor.dimensions > 0) {
    status.Update(CheckNotNull({{"shape", tensor.shape}}));
  }
  status.Update(CheckReserved(tensor.reserved));
  if (!status.ok()) return status;
  BoundTensor bound = {.name = tensor.name,
                       .data = tensor.data,
                       .size_bytes = tensor.size_bytes,
                       .dtype = ToDType(tensor.dtype),
                       .shape = {}};
  bound.shape.assign(tensor.shape, tensor.shape + tensor.dimensions);
  return bound;
}

using TensorsByName = absl::flat_hash_map<std::string_view, BoundTensor*>;

absl::Status SetBitmap(const refit_changes& given,
                       const TensorsByName& tensors) {
  const absl::Status status =
      CheckNotNull({{"tensor", given.tensor}, {"bits", given.bits}});
  if (!status.ok()) return status;
  const auto found = tensors.find(given.tensor);
  if (found == tensors.end() || found->second->changes != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", given.tensor, "\" ",
        found == tensors.end() ? "is none of the tensors" : "is given twice"));
  }
  found->second->changes = given.bits;
  return absl::OkStatus();
}

refit_post_hook ToC(const TensorPostHook& hook) {
  return {.struct_size = sizeof(refit_post_hook),
          .tensor = hook.tensor.c_str(),
          .name = hook.name.c_str(),
          .detail = hook.detail.c_str(),
          .by_executor = hook.by_executor ? 1 : 0,
          .reserved = 0,
          .refit = hook.refit};
}

absl::StatusOr<PostHookPerformer> ToPerformer(
    const refit_post_hook_performer& given) {
  const absl::Status status = CheckNotNull({{"name", given.name}});
  if (!status.ok()) return status;
  PostHookPerformer performer = {.name = given.name, .perform = nullptr};
  if (given.perform == nullptr) return performer;
  performer.perform = [perform = given.perform, context = given.context](
                          const TensorPostHook& hook,
                          const BoundTensor& tensor) {
    const refit_post_hook shown = ToC(hook);
    const refit_tensor bound = {.struct_size = sizeof(refit_tensor),
                                .name = tensor.name.c_str(),
                                .data = tensor.data,
                                .size_bytes = tensor.size_bytes,
                                .shape = tensor.shape.data(),
                                .dimensions = tensor.shape.size(),
                                .dtype = static_cast<refit_dtype>(tensor.dtype),
                                .reserved = 0};
    const int32_t failed = perform(&shown, &bound, context);
    return failed == 0 ? absl::OkStatus()
                       : absl::InternalError(
                             absl::StrCat("its function returned ", failed));
  };
  return performer;
}

absl::StatusOr<RunOptions> ToRunOptions(const refit_run_options* given) {
  RunOptions options;
  if (given == nullptr) return options;
  const absl::StatusOr<refit_run_options> known =
      Read(*given, "refit_run_options");
  if (!known.ok()) return known.status();
  const absl::StatusOr<std::chrono::nanoseconds> timeout =
      Timeout(known->timeout_ms);
  if (!timeout.ok()) return timeout.status();
  options.timeout = *timeout;
  if (known->addresses != nullptr) {
    options.addresses.emplace(known->addresses, known->address_count);
  } else if (known->address_count != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "addresses is NULL, address_count is ", known->address_count));
  }
  absl::Status status =
      CheckFlags({{"check", known->check}, {"dense", known->dense}});
  status.Update(CheckReserved(known->reserved));
  if (!status.ok()) return status;
  options.direct_multiprocessors = known->direct_multiprocessors;
  options.check = known->check == 1;
  options.dense = known->dense == 1;
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
      .fused_elements = counters.fused_elements,
  };
}

refit_delta_report ToC(const DeltaReport& report) {
  return {.struct_size = sizeof(refit_delta_report),
          .is_delta = report.is_delta ? 1 : 0,
          .rung = report.rung,
          .why_dense = report.why_dense.c_str(),
          .base_version = report.base_version,
          .version = report.version,
          .elements = report.elements,
          .changed_elements = report.changed_elements,
          .stored_bytes = report.stored_bytes,
          .dense_bytes = report.dense_bytes,
          .move_seconds = report.move_seconds,
          .keep_seconds = report.keep_seconds,
          .find_seconds = report.find_seconds,
          .encode_seconds = report.encode_seconds,
          .wire_seconds = report.wire_seconds,
          .apply_seconds = report.apply_seconds,
          .check_seconds = report.check_seconds,
          .agree_seconds = report.agree_seconds,
          .total_seconds = report.total_seconds};
}

// Gives a caller's struct, whose size the caller set, what is known `now`. What
// this library does not know stays 0.
template <typename Struct>
absl::Status Fill(Struct now, const char* name, Struct* given) {
  const size_t size_bytes = given->struct_size;
  const absl::Status status = CheckSize<Struct>(size_bytes, name);
  if (!status.ok()) return status;
  now.struct_size = size_bytes;
  std::memset(given, 0, size_bytes);
  std::memcpy(given, &now, std::min(size_bytes, sizeof(now)));
  return status;
}

refit_notice ToC(const Notice& notice) {
  return {.struct_size = sizeof(refit_notice),
          .kind = static_cast<refit_notice_kind>(notice.kind),
          .reserved = 0,
          .text = notice.text.c_str()};
}

// Shows each of what the executor's `list` holds.
template <typename Element, typename Visitor>
refit_status* VisitEach(const refit_executor* executor,
                        const std::vector<Element>& (Executor::*list)() const,
                        Visitor visit, void* context) {
  return Guarded(
      {{"executor", executor}, {"visit", reinterpret_cast<const void*>(visit)}},
      [&]() -> absl::Status {
        for (const Element& element : (executor->worker->executor().*list)()) {
          const auto shown = ToC(element);
          visit(&shown, context);
        }
        return absl::OkStatus();
      });
}

absl::Status Bind(refit_executor* executor, const refit_tensor* tensors,
                  size_t count, const refit_bind_options& options) {
  const auto timeout = Timeout(options.timeout_ms);
  if (!timeout.ok()) return timeout.status();
  std::vector<BoundTensor> bound;
  absl::Status status = ForEach(tensors, count, "tensors", "refit_tensor",
                                [&](const refit_tensor& tensor) {
                                  absl::StatusOr<BoundTensor> one =
                                      ToBound(tensor);
                                  if (one.ok())
                                    bound.push_back(*std::move(one));
                                  return one.status();
                                });
  if (!status.ok()) return status;
  TensorsByName by_name;
  if (options.changes_count > 0) {
    for (BoundTensor& tensor : bound) by_name.emplace(tensor.name, &tensor);
  }
  status = ForEach(options.changes, options.changes_count, "changes",
                   "refit_changes", [&](const refit_changes& changes) {
                     return SetBitmap(changes, by_name);
                   });
  std::vector<PostHookPerformer> performers;
  if (status.ok()) {
    status = ForEach(
        options.hooks, options.hook_count, "hooks", "refit_post_hook_performer",
        [&](const refit_post_hook_performer& hook) {
          absl::StatusOr<PostHookPerformer> one = ToPerformer(hook);
          if (one.ok()) performers.push_back(*std::move(one));
          return one.status();
        });
  }
  if (!status.ok()) return status;
  return executor->worker->Call([&](Executor& rank) {
    return rank.Bind(bound, *timeout, std::move(performers));
  });
}

}  // namespace
}  // namespace refit

using refit::Guarded;

refit_status* refit_executor_create(const refit_executor_options* options,
                                    refit_executor** executor) {
  return Guarded(executor, "executor", {{"options", options}},
                 [&]() -> absl::Status {
                   const absl::StatusOr<refit_executor_options> known =
                       refit::Read(*options, "refit_executor_options");
                   return known.ok() ? refit::CreateExecutor(*known, *executor)
                                     : known.status();
                 });
}

void refit_executor_free(refit_executor* executor) { delete executor; }

refit_status* refit_executor_connect(refit_executor* executor,
                                     int64_t timeout_ms) {
  return Guarded({{"executor", executor}}, [&]() -> absl::Status {
    const auto timeout = refit::Timeout(timeout_ms);
    if (!timeout.ok()) return timeout.status();
    return executor->worker->Call(
        [&](refit::Executor& rank) { return rank.Connect(*timeout); });
  });
}

refit_status* refit_executor_replace(refit_executor* executor,
                                     const refit_replacement* replacement,
                                     int64_t timeout_ms) {
  return Guarded(
      {{"executor", executor}, {"replacement", replacement}},
      [&]() -> absl::Status {
        const auto known = refit::Read(*replacement, "refit_replacement");
        if (!known.ok()) return known.status();
        absl::Status status = refit::CheckNotNull({{"plan", known->plan}});
        status.Update(refit::CheckReserved(known->reserved));
        if (!status.ok()) return status;
        const auto timeout = refit::Timeout(timeout_ms);
        if (!timeout.ok()) return timeout.status();
        refit::Replacement next = {.plan = known->plan->file,
                                   .rank = known->rank};
        if (known->rendezvous != nullptr) next.meeting = known->rendezvous->tcp;
        if (known->fabric != nullptr) next.fabric = known->fabric->fabric;
        return executor->worker->Replace(std::move(next), *timeout);
      });
}

refit_status* refit_executor_bind(refit_executor* executor,
                                  const refit_tensor* tensors, size_t count,
                                  int64_t timeout_ms) {
  const refit_bind_options options = {.struct_size = sizeof(refit_bind_options),
                                      .timeout_ms = timeout_ms,
                                      .hooks = nullptr,
                                      .hook_count = 0,
                                      .changes = nullptr,
                                      .changes_count = 0};
  return refit_executor_bind_with(executor, tensors, count, &options);
}

refit_status* refit_executor_bind_with(refit_executor* executor,
                                       const refit_tensor* tensors,
                                       size_t count,
                                       const refit_bind_options* options) {
  return Guarded({{"executor", executor}}, [&]() -> absl::Status {
    refit_bind_options known = {};
    if (options != nullptr) {
      const absl::StatusOr<refit_bind_options> given =
          refit::Read(*options, "refit_bind_options");
      if (!given.ok()) return given.status();
      known = *given;
    }
    return refit::Bind(executor, tensors, count, known);
  });
}

uint64_t refit_executor_refits(const refit_executor* executor) {
  return executor->worker->executor().refits();
}

refit_status* refit_executor_visit_post_hooks(const refit_executor* executor,
                                              refit_post_hook_visitor visit,
                                              void* context) {
  return refit::VisitEach(executor, &refit::Executor::post_hooks, visit,
                          context);
}

refit_status* refit_executor_run(refit_executor* executor, void* stream,
                                 const refit_run_options* options) {
  return Guarded({{"executor", executor}}, [&]() -> absl::Status {
    const auto known = refit::ToRunOptions(options);
    if (!known.ok()) return known.status();
    return executor->worker->Call(
        [&](refit::Executor& rank) { return rank.Run(stream, *known); });
  });
}

refit_status* refit_cast_and_mark(refit_device* device, void* stream,
                                  const refit_marking_cast* cast) {
  return Guarded({{"device", device}, {"cast", cast}}, [&]() -> absl::Status {
    const auto known = refit::Read(*cast, "refit_marking_cast");
    if (!known.ok()) return known.status();
    if (absl::Status s = refit::CheckReserved(known->reserved); !s.ok()) {
      return s;
    }
    return device->device->CastAndMark(
        {.from = known->from,
         .to = known->to,
         .to_dtype = refit::ToDType(known->to_dtype),
         .changes = known->changes,
         .first_element = known->first_element,
         .elements = known->elements},
        stream);
  });
}

refit_status* refit_executor_wait(refit_executor* executor) {
  return Guarded({{"executor", executor}}, [&]() -> absl::Status {
    return executor->worker->Call(
        [](refit::Executor& rank) { return rank.Wait(); });
  });
}

refit_status* refit_executor_visit_digest(refit_executor* executor,
                                          void* stream,
                                          const refit_digest_options* options,
                                          refit_param_digest_visitor visit,
                                          void* context) {
  return Guarded(
      {{"executor", executor}, {"visit", reinterpret_cast<const void*>(visit)}},
      [&]() -> absl::Status {
        refit::DigestOptions known;
        if (options != nullptr) {
          const absl::StatusOr<refit_digest_options> given =
              refit::Read(*options, "refit_digest_options");
          if (!given.ok()) return given.status();
          if (given->among == nullptr && given->among_count != 0) {
            return absl::InvalidArgumentError(absl::StrCat(
                "among is NULL, among_count is ", given->among_count));
          }
          known.among = {given->among, given->among_count};
        }
        const auto digests = executor->worker->executor().Digest(stream, known);
        if (!digests.ok()) return digests.status();
        for (const refit::ParamDigest& digest : *digests) {
          const refit_param_digest shown = {
              .struct_size = sizeof(refit_param_digest),
              .param = digest.param.c_str(),
              .dtype = static_cast<refit_dtype>(digest.dtype),
              .reserved = 0,
              .sum = digest.digest.sum,
              .elements = digest.digest.elements};
          visit(&shown, context);
        }
        return absl::OkStatus();
      });
}

uint64_t refit_digest_add(uint64_t sum_a, uint64_t sum_b) {
  refit::StateDigest digest = {.sum = sum_a, .elements = 0};
  digest += {.sum = sum_b, .elements = 0};
  return digest.sum;
}

void refit_executor_interrupt(refit_executor* executor) {
  executor->worker->Interrupt();
}

refit_state refit_executor_state(const refit_executor* executor) {
  return static_cast<refit_state>(executor->worker->executor().state());
}

const char* refit_state_name(refit_state state) {
  // They are literals, which end with a null.
  return refit::ExecutorStateName(static_cast<refit::ExecutorState>(state))
      .data();
}

refit_status* refit_executor_counters(const refit_executor* executor,
                                      refit_counters* counters) {
  return Guarded(
      {{"executor", executor}, {"counters", counters}}, [&]() -> absl::Status {
        return refit::Fill(refit::ToC(executor->worker->executor().counters()),
                           "refit_counters", counters);
      });
}

refit_status* refit_executor_delta_report(const refit_executor* executor,
                                          refit_delta_report* report) {
  return Guarded(
      {{"executor", executor}, {"report", report}}, [&]() -> absl::Status {
        const auto& last = executor->worker->executor().delta_report();
        if (!last.has_value()) {
          return absl::NotFoundError(
              "no refit of a plan with deltas has succeeded since the last "
              "bind or "
              "run");
        }
        return refit::Fill(refit::ToC(*last), "refit_delta_report", report);
      });
}

refit_status* refit_executor_visit_notices(const refit_executor* executor,
                                           refit_notice_visitor visit,
                                           void* context) {
  return refit::VisitEach(executor, &refit::Executor::notices, visit, context);
}

void refit_executor_close(refit_executor* executor) {
  if (executor == nullptr) return;
  executor->worker->Close();
}
