#include "compiler/job_warnings.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/job/side.h"
#include "compiler/layout/layout.h"
#include "plan/dtype.h"
#include "plan/sent_ranges.h"

namespace refit {
namespace {

// A staged message below this size leaves most of a link idle, and one above
// that size leaves nothing to pack while it travels (docs/benchmarks.md).
constexpr int64_t kFastBucketBytesMin = int64_t{4} << 20;
constexpr int64_t kFastBucketBytesMax = int64_t{1} << 30;
// Fewer messages of a pair than these cost too little to be worth a word.
constexpr int64_t kManyMessages = 64;
// Deltas that send this part of the bytes always gain much less than the rate
// of change promises.
constexpr double kMuchAlwaysSentPercent = 10;

int64_t CountGpus(const Job& job) {
  const int64_t source = CountRanks(job.source);
  const int64_t destination = CountRanks(job.destination);
  return job.colocated.value ? std::max(source, destination)
                             : source + destination;
}

void WarnOfOneHost(const Job& job, Diagnostics& diagnostics) {
  const TopologySpec& topology = job.topology;
  if (topology.gpus_per_host.given || topology.hosts.given) return;
  const int64_t gpus = CountGpus(job);
  if (gpus <= kUsualGpusPerHost) return;
  diagnostics.Warning(
      topology.place,
      absl::StrFormat("topology.gpus_per_host is not given, so that all %d "
                      "GPUs are on one host; wanted \"gpus_per_host\": %d, or "
                      "as many as your hosts have",
                      gpus, kUsualGpusPerHost));
}

// Tensor-parallel groups that are cut by the end of a host, though they would
// fit into fewer hosts.
void WarnOfCutGroups(const Job& job, const SideSpec& side, int64_t first_gpu,
                     Diagnostics& diagnostics) {
  const int64_t host = job.topology.gpus_per_host.value;
  const int64_t size = side.tensor_parallel.value;
  if (side.layout.value == LayoutKind::kGeneric || size == 1) return;
  if (host % size != 0 && size % host != 0) {
    diagnostics.Warning(
        job.topology.gpus_per_host.place,
        absl::StrFormat("topology.gpus_per_host %d does not fit "
                        "%s.tensor_parallel %d: groups of %d ranks are cut by "
                        "the ends of hosts; wanted a divisor or a multiple",
                        host, side.key, size, size));
    return;
  }
  if (first_gpu % std::min(host, size) == 0) return;
  diagnostics.Warning(
      job.topology.gpus_per_host.place,
      absl::StrFormat("%s rank 0 is GPU %d of its host, so that the ends of "
                      "hosts cut its groups of tensor_parallel %d; wanted "
                      "topology.hosts with the host of each rank",
                      side.key, first_gpu % host, size));
}

void WarnOfHosts(const Job& job, Diagnostics& diagnostics) {
  WarnOfOneHost(job, diagnostics);
  if (!job.topology.gpus_per_host.given) return;
  WarnOfCutGroups(job, job.source, 0, diagnostics);
  WarnOfCutGroups(job, job.destination,
                  job.colocated.value ? 0 : CountRanks(job.source),
                  diagnostics);
}

// A part of the model that one side asks for and the other leaves out.
void WarnOfDisagreement(const Located<bool>& source,
                        const Located<bool>& destination, std::string_view key,
                        std::string_view part, Diagnostics& diagnostics) {
  if (!source.given || !destination.given || source.value == destination.value)
    return;
  const auto text = [](bool value) { return value ? "true" : "false"; };
  diagnostics.Warning(
      (source.value ? source : destination).place,
      absl::StrFormat("source.%s is %s and destination.%s is %s, so that %s "
                      "not moved; wanted the same on both sides",
                      key, text(source.value), key, text(destination.value),
                      part));
}

// Of parts that a job need not move.
void WarnOfParts(const Job& job, const Model& model, Diagnostics& diagnostics) {
  const Located<bool>& source = job.source.vision;
  const Located<bool>& destination = job.destination.vision;
  const Family& family = *model.architecture.family;
  if (family.tower && !source.given && !destination.given) {
    diagnostics.Warning(
        job.source.place,
        absl::StrFormat("the vision tower of %s is not moved; wanted "
                        "source.vision: true to move it, or false if that is "
                        "meant",
                        family.model_type));
  }
  WarnOfDisagreement(source, destination, "vision", "the vision tower is",
                     diagnostics);
  WarnOfDisagreement(job.source.mtp, job.destination.mtp, "mtp",
                     "prediction layers are", diagnostics);
}

// Options of direct rounds in a plan without any.
void WarnOfDirectRounds(const OptionsSpec& options, const Module& module,
                        Diagnostics& diagnostics) {
  const bool is_direct = std::any_of(
      module.messages.begin(), module.messages.end(),
      [](const Message& m) { return m.mechanism == Mechanism::kDirect; });
  if (is_direct) return;
  const auto warn = [&](const Place& place, std::string_view key) {
    diagnostics.Warning(
        place, absl::StrFormat("options.%s has no effect: no round is direct; "
                               "wanted source and destination ranks on one "
                               "host, or a job without it",
                               key));
  };
  if (options.direct.given && options.direct.value != DirectKind::kPush) {
    warn(options.direct.place, "direct");
  }
  if (options.direct_multiprocessors.given) {
    warn(options.direct_multiprocessors.place, "direct_multiprocessors");
  }
}

// The params that post-hooks of a destination rewrite in place.
std::vector<bool> HookedParams(const Module& module) {
  std::vector<bool> hooked(module.params.size());
  for (const Buffer& buffer : module.buffers.all()) {
    if (buffer.post_hooks.empty()) continue;
    for (const Fragment& fragment : buffer.fragments) {
      hooked[IndexOf(fragment.param)] = true;
    }
  }
  return hooked;
}

// Bytes of staged messages that travel in every refit, whatever changed, by
// reason.
struct AlwaysSent {
  int64_t of = 0;      // all of these bytes
  int64_t cast = 0;    // by receivers, which hold something else then
  int64_t hooked = 0;  // likewise, once post-hooks rewrote them
  int64_t small = 0;   // messages too small to gain anything

  int64_t sum() const { return cast + hooked + small; }
};

// As the executor decides it (executor/delta), if workers mark all tensors.
AlwaysSent BytesAlwaysSent(const Module& module) {
  const std::vector<bool> hooked = HookedParams(module);
  std::vector<std::optional<AlwaysSent>> by_contents(module.contents.size());
  AlwaysSent all;
  for (const Message& message : module.messages) {
    if (message.mechanism != Mechanism::kStaged) continue;
    all.of += message.size_bytes;
    if (message.size_bytes <
        static_cast<int64_t>(WholeBelowBytes(module.limits.bucket_bytes))) {
      all.small += message.size_bytes;
      continue;
    }
    const auto contents = static_cast<size_t>(message.contents);
    std::optional<AlwaysSent>& of = by_contents[contents];
    if (!of.has_value()) {
      of.emplace();
      for (const Packed& packed : module.contents[contents]) {
        const Piece& piece = module.piece(packed.piece);
        const int64_t bytes =
            packed.box.Volume() * DTypeBytes(piece.wire_dtype);
        if (hooked[IndexOf(piece.param)]) {
          of->hooked += bytes;
        } else if (piece.wire_dtype != piece.destination_dtype) {
          of->cast += bytes;
        }
      }
    }
    all.cast += of->cast;
    all.hooked += of->hooked;
  }
  return all;
}

// Of deltas that have nothing to leave out, or send much whatever changed.
void WarnOfAlwaysSent(const Located<DeltaSpec>& delta, const Module& module,
                      Diagnostics& diagnostics) {
  if (!delta.value.enabled) return;
  if (!module.delta.has_value()) {
    diagnostics.Warning(
        delta.place,
        "options.delta has no effect: no round is staged, and direct rounds "
        "always move everything; wanted no delta, or options.peer \"staged\"");
    return;
  }
  const AlwaysSent always = BytesAlwaysSent(module);
  const auto percent = [&](int64_t bytes) {
    return 100 * static_cast<double>(bytes) / static_cast<double>(always.of);
  };
  if (always.of == 0 || percent(always.sum()) < kMuchAlwaysSentPercent) {
    return;
  }
  std::vector<std::string> reasons;
  const auto add = [&](int64_t bytes, std::string_view reason) {
    if (bytes == 0) return;
    reasons.push_back(absl::StrFormat("%.1f %% %s", percent(bytes), reason));
  };
  add(always.cast, "are cast by receivers");
  add(always.hooked, "are rewritten by post-hooks");
  add(always.small,
      absl::StrFormat("are in messages below %d bytes",
                      WholeBelowBytes(module.limits.bucket_bytes)));
  diagnostics.Warning(
      delta.place,
      absl::StrFormat(
          "with options.delta %.1f %% of the bytes of staged messages travel "
          "in each refit all the same: %s; wanted %sno delta",
          percent(always.sum()), absl::StrJoin(reasons, ", "),
          always.cast > 0 ? "the source's dtype at the destination, or " : ""));
}

// Of buckets far from what is fast.
void WarnOfBuckets(const Located<int64_t>& bucket, const Module& module,
                   Diagnostics& diagnostics) {
  if (!bucket.given) return;
  int64_t staged_bytes = 0;
  int64_t staged_messages = 0;
  int64_t largest = 0;
  for (const Message& message : module.messages) {
    if (message.mechanism != Mechanism::kStaged) continue;
    staged_bytes += message.size_bytes;
    ++staged_messages;
    largest = std::max(largest, message.size_bytes);
  }
  const bool is_small = bucket.value < kFastBucketBytesMin &&
                        staged_bytes > kManyMessages * kFastBucketBytesMin;
  const bool is_large = largest > kFastBucketBytesMax;
  if (!is_small && !is_large) return;
  diagnostics.Warning(
      bucket.place,
      absl::StrFormat(
          "options.bucket_bytes %d is far from what is fast: %d staged "
          "messages of at most %d bytes, %s; wanted %d to %d",
          bucket.value, staged_messages, largest,
          is_small ? "which leave most of each link idle"
                   : "of which none is packed while another travels",
          kFastBucketBytesMin, kFastBucketBytesMax));
}

}  // namespace

void WarnOfJob(const Job& job, const Model& model, Diagnostics& diagnostics) {
  WarnOfHosts(job, diagnostics);
  WarnOfFrameworks(job, model, diagnostics);
  WarnOfParts(job, model, diagnostics);
  WarnOfMissingRoles(model, diagnostics);
}

void WarnOfMessages(const Job& job, const Module& module,
                    Diagnostics& diagnostics) {
  WarnOfDirectRounds(job.options, module, diagnostics);
  WarnOfAlwaysSent(job.options.delta, module, diagnostics);
  WarnOfBuckets(job.options.bucket_bytes, module, diagnostics);
}

void WarnOfDelta(const OptionsSpec& options, double with, double without,
                 Diagnostics& diagnostics) {
  diagnostics.Warning(
      options.delta.place,
      absl::StrFormat(
          "with options.delta no rank relays, so that a dense refit is "
          "predicted to take %.3f ms instead of %.3f ms; wanted no delta, "
          "unless deltas gain more (refit-sim --change-rate predicts their "
          "time)",
          1e3 * with, 1e3 * without));
}

}  // namespace refit
