#include "plan/declaration_check.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/check.h"
#include "plan/file_limits.h"
#include "plan/message_lists.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// A copy of more loops has more elements than 63 bits count, because each loop
// has 2 iterations at least.
constexpr uint32_t kMostCopyLoops = 62;

absl::Status CheckPresence(const fb::Body& body) {
  const struct {
    std::string name;
    const void* part;
  } parts[] = {
      {"params", body.params()},         {"buffers", body.buffers()},
      {"programs", body.programs()},     {"rounds", body.rounds()},
      {"copy_lists", body.copy_lists()}, {"copies", body.copies()},
      {"loops", body.loops()},           {"limits", body.limits()},
      {"stats", body.stats()},
  };
  for (const auto& [name, part] : parts) {
    if (part == nullptr) return Bad(absl::StrCat("the body has no ", name));
  }
  if (body.source_ranks() > body.programs()->size()) {
    return Bad("source_ranks %u is above the %u programs", body.source_ranks(),
               body.programs()->size());
  }
  if (!IsAligned(body.copies()) || !IsAligned(body.loops())) {
    return Bad("copies and loops are not aligned to 8 bytes");
  }
  return absl::OkStatus();
}

// Words for programs, in an order that gives each once.
absl::Status CheckRequirements(const fb::Body& body) {
  const auto is_word = [](std::string_view text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    });
  };
  const uint32_t count = Length(body.requirements());
  for (uint32_t i = 0; i < count; ++i) {
    const fb::Requirement& now = *body.requirements()->Get(i);
    if (now.side() > fb::Side::kDestination) {
      return Bad("requirement %u: unknown side %u", i,
                 static_cast<uint32_t>(now.side()));
    }
    if (!is_word(now.key()->str()) || !is_word(now.value()->str())) {
      return Bad(
          "requirement %u: its key or value is not made of lower-case letters, "
          "digits and '_'",
          i);
    }
    if (i == 0) continue;
    const fb::Requirement& before = *body.requirements()->Get(i - 1);
    if (std::pair(before.side(), before.key()->str()) >=
        std::pair(now.side(), now.key()->str())) {
      return Bad("requirement %u: not ascending by side and key", i);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRungs(const fb::Body& body) {
  const fb::Delta& delta = *body.delta();
  const uint32_t count = Length(delta.rungs());
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t rung = delta.rungs()->Get(i);
    if (rung >= 1 && rung <= (i == 0 ? 7 : delta.rungs()->Get(i - 1) - 1U)) {
      continue;
    }
    return Bad(
        "delta: rung %u is %u, rungs descend from at most 7 to at least 1", i,
        rung);
  }
  if (count > 0) return absl::OkStatus();
  for (uint32_t i = 0; i < body.rounds()->size(); ++i) {
    if (IsDirect(body, i)) continue;
    return Bad("delta: round %u is staged, and no rungs", i);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPools(const fb::Body& body) {
  if (absl::Status s = CheckPresence(body); !s.ok()) return s;
  const auto& rounds = *body.rounds();
  for (uint32_t i = 0; i < rounds.size(); ++i) {
    const fb::Round& round = *rounds.Get(i);
    if (round.route() < fb::Route::kLocal ||
        round.route() > fb::Route::kNetwork) {
      return Bad("round %u: unknown route %u", i,
                 static_cast<uint32_t>(round.route()));
    }
    if (round.mechanism() > fb::Mechanism::kDirect) {
      return Bad("round %u: unknown mechanism %u", i,
                 static_cast<uint32_t>(round.mechanism()));
    }
    if (round.reserved() != 0) {
      return Bad("round %u: a reserved field is not 0", i);
    }
  }
  const auto& loops = *body.loops();
  for (uint32_t i = 0; i < loops.size(); ++i) {
    if (loops.Get(i)->extent() < 2) {
      return Bad("loop %u: extent %u is below 2", i, loops.Get(i)->extent());
    }
  }
  const auto& copies = *body.copies();
  for (uint32_t i = 0; i < copies.size(); ++i) {
    const fb::Copy& copy = *copies.Get(i);
    if (copy.reserved() != 0 || copy.reserved2() != 0) {
      return Bad("copy %u: a reserved field is not 0", i);
    }
    if (!IsKnown(copy.wire_dtype())) {
      return Bad("copy %u: unknown dtype %u", i,
                 static_cast<uint32_t>(copy.wire_dtype()));
    }
    if (copy.loops_count() > kMostCopyLoops) {
      return Bad("copy %u: %u loops are more than %u", i, copy.loops_count(),
                 kMostCopyLoops);
    }
    if (uint64_t{copy.loops_begin()} + copy.loops_count() > loops.size()) {
      return Bad("copy %u: loops end at %u of %u", i,
                 uint64_t{copy.loops_begin()} + copy.loops_count(),
                 loops.size());
    }
  }
  const auto& lists = *body.copy_lists();
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const uint64_t end =
        uint64_t{lists.Get(i)->begin()} + lists.Get(i)->count();
    if (end > copies.size()) {
      return Bad("copy list %u: copies end at %u of %u", i, end, copies.size());
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDeclarations(const fb::Body& body) {
  const uint32_t skips = Length(body.skips());
  for (uint32_t i = 0; i < skips; ++i) {
    const fb::Skip& skip = *body.skips()->Get(i);
    const fb::SkipReason reason = skip.reason();
    if (reason == fb::SkipReason::kUnspecified ||
        reason > fb::SkipReason::kUnread) {
      return Bad("skip %u: unknown reason %u", i,
                 static_cast<uint32_t>(reason));
    }
    absl::Status status = CheckUtf8("name", skip.name());
    status.Update(CheckUtf8("detail", skip.detail()));
    if (!status.ok()) return At(absl::StrCat("skip ", i), status);
  }
  const uint32_t casts = Length(body.casts());
  for (uint32_t i = 0; i < casts; ++i) {
    for (DType dtype :
         {body.casts()->Get(i)->from(), body.casts()->Get(i)->to()}) {
      if (!IsKnown(dtype)) {
        return Bad("cast %u: unknown dtype %u", i,
                   static_cast<uint32_t>(dtype));
      }
    }
  }
  const fb::Limits& limits = *body.limits();
  if (limits.bucket_bytes() > kLargestSize ||
      limits.staging_bytes() > kLargestSize) {
    return Bad("limits: more than 2^63 bytes");
  }
  if (limits.slots() > kSlotsMax) {
    return Bad("limits: slots is %u; wanted at most %u", limits.slots(),
               kSlotsMax);
  }
  absl::Status status =
      CheckUtf8("the binding link", body.stats()->binding_link());
  return status.ok() ? CheckRequirements(body) : status;
}

absl::Status CheckTopology(const fb::Body& body) {
  const fb::Topology* const topology = body.topology();
  if (topology == nullptr) return absl::OkStatus();
  absl::Status status = CheckUtf8("the machine", topology->machine());
  if (!status.ok()) return status;
  if (topology->hosts_per_nvlink_domain() == 0 ||
      topology->gpus_per_nic() == 0) {
    return Bad(
        "topology: hosts_per_nvlink_domain or gpus_per_nic is 0; wanted at "
        "least 1");
  }
  if (!std::isfinite(topology->spine_oversubscription()) ||
      topology->spine_oversubscription() < 1) {
    return Bad("topology: spine_oversubscription is %g; wanted at least 1",
               topology->spine_oversubscription());
  }
  for (const double speed : {topology->peer_bytes_per_second(),
                             topology->network_bytes_per_second()}) {
    if (std::isfinite(speed) && speed > 0) continue;
    return Bad("topology: a link has %g bytes per second; wanted more than 0",
               speed);
  }
  return absl::OkStatus();
}

absl::Status CheckDelta(const fb::Body& body) {
  const fb::Delta* const delta = body.delta();
  if (delta == nullptr) return absl::OkStatus();
  if (delta->changes() != fb::DeltaChanges::kSnapshot &&
      delta->changes() != fb::DeltaChanges::kBitmap) {
    return Bad("delta: unknown way %u to find changes",
               static_cast<uint32_t>(delta->changes()));
  }
  if (absl::Status status = CheckRungs(body); !status.ok()) return status;
  if (body.quantizations() != nullptr && body.quantizations()->size() > 0) {
    return Bad("delta: the plan quantizes, its refits cannot be delta");
  }
  for (uint32_t rank = body.source_ranks(); rank < body.programs()->size();
       ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (!ArePacked(program) && program.messages() == nullptr) continue;
    const bool sends_none =
        ForEachMessage(body, program, [](const fb::Message& message) {
          return message.kind() != fb::MessageKind::kSend;
        });
    if (sends_none) continue;
    return Bad(
        "delta: destination rank %u relays, which does not know what changed",
        rank);
  }
  return absl::OkStatus();
}

}  // namespace refit
