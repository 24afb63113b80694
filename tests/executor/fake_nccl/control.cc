#include <chrono>

#include "tests/executor/fake_nccl/engine.h"
#include "tests/executor/fake_nccl/fake_nccl.h"

namespace refit::nccl::fake {
namespace {

template <typename Change>
void Set(Change change) {
  Engine& engine = Engine::Get();
  std::lock_guard lock(engine.mutex);
  change(engine);
  engine.SetChanged();
}

template <typename Question>
auto Ask(Question question) {
  Engine& engine = Engine::Get();
  std::lock_guard lock(engine.mutex);
  return question(engine);
}

void SetFault(int rank, uint64_t operation, const Fault& fault) {
  Set([&](Engine& engine) {
    Worker& worker = engine.workers[rank];
    worker.faults[worker.issued + operation] = fault;
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void fake_nccl_reset() {
  Set([](Engine& engine) { engine.Reset(); });
}

void fake_nccl_release() {
  Set([](Engine& engine) { engine.is_released = true; });
}

void fake_nccl_set_rank(int rank) { thread.rank = rank; }

void fake_nccl_set_captures(bool on) { thread.captures = on; }

void fake_nccl_set_version(int version) {
  Set([&](Engine& engine) { engine.settings.version = version; });
}

void fake_nccl_set_rank_version(int rank, int version) {
  Set([&](Engine& engine) { engine.workers[rank].version = version; });
}

void fake_nccl_set_budget(size_t operations) {
  Set([&](Engine& engine) { engine.settings.budget = operations; });
}

void fake_nccl_set_capture_delay(int64_t microseconds) {
  Engine& engine = Engine::Get();
  std::lock_guard lock(engine.mutex);
  engine.settings.capture_delay = std::chrono::microseconds(microseconds);
}

void fake_nccl_set_connect_delay(int64_t microseconds) {
  Set([&](Engine& engine) {
    engine.settings.connect_delay = std::chrono::microseconds(microseconds);
  });
}

void fake_nccl_set_remote_errors(bool on) {
  Set([&](Engine& engine) { engine.settings.remote_errors = on; });
}

void fake_nccl_delay(int rank, int64_t microseconds) {
  Set([&](Engine& engine) {
    engine.workers[rank].delay = std::chrono::microseconds(microseconds);
  });
}

void fake_nccl_fail_at(int rank, uint64_t operation, int result) {
  SetFault(rank, operation,
           {.kind = Fault::kFail, .result = static_cast<Result>(result)});
}

void fake_nccl_hang_at(int rank, uint64_t operation) {
  SetFault(rank, operation, {.kind = Fault::kHang});
}

void fake_nccl_corrupt_at(int rank, uint64_t operation, size_t byte) {
  SetFault(rank, operation, {.kind = Fault::kCorrupt, .byte = byte});
}

void fake_nccl_hang_abort(int rank) {
  Set([&](Engine& engine) { engine.workers[rank].abort_hangs = true; });
}

void fake_nccl_kill(int rank) {
  Set([&](Engine& engine) { engine.workers[rank].is_killed = true; });
}

bool fake_nccl_is_deadlocked() {
  return Ask([](Engine& engine) { return engine.IsDeadlocked(); });
}

int fake_nccl_live_communicators() {
  return Ask([](Engine& engine) { return engine.LiveCommunicators(); });
}

int fake_nccl_unawaited() {
  return Ask([](Engine& engine) { return engine.Unawaited(thread.Owner()); });
}

uint64_t fake_nccl_lazy_connects() {
  return Ask([](Engine& engine) { return engine.counts.lazy_connects; });
}

uint64_t fake_nccl_cut_groups() {
  return Ask([](Engine& engine) { return engine.counts.cut_groups; });
}

uint64_t fake_nccl_messages() {
  return Ask([](Engine& engine) { return engine.counts.messages; });
}

uint64_t fake_nccl_largest_group() {
  return Ask([](Engine& engine) { return engine.counts.largest_group; });
}

uint64_t fake_nccl_group_mismatches() {
  return Ask([](Engine& engine) { return engine.counts.group_mismatches; });
}

uint64_t fake_nccl_violations() {
  return Ask([](Engine& engine) { return engine.counts.violations; });
}

const char* fake_nccl_first_violation() {
  thread.violation =
      Ask([](Engine& engine) { return engine.counts.first_violation; });
  return thread.violation.c_str();
}

const char* fake_nccl_key() {
  thread.violation = Ask([](Engine& engine) { return engine.counts.key; });
  return thread.violation.c_str();
}

}  // extern "C"
#pragma GCC visibility pop

}  // namespace refit::nccl::fake
