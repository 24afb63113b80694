#include "plan/features.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

#include "absl/container/flat_hash_set.h"
#include "plan/check.h"
#include "plan/plan_file.h"
#include "plan/quantize_check.h"

namespace refit {
namespace {

template <typename T, typename IsMeant>
bool Any(const flatbuffers::Vector<T>* all, const IsMeant& is_meant) {
  return std::any_of(all->begin(), all->end(), is_meant);
}

bool HasDirectRounds(const fb::Body& body) {
  return Any(body.rounds(), [](const fb::Round* round) {
    return round->mechanism() == fb::Mechanism::kDirect;
  });
}

bool HasPostHooks(const fb::Body& body) {
  return Any(body.buffers(), [](const fb::Buffer* buffer) {
    return Length(buffer->post_hooks()) > 0;
  });
}

// Whether `is_meant` holds of a message that a rank from `first_rank` on sends.
// Ranks of one list of messages send alike.
template <typename IsMeant>
bool AnySends(const fb::Body& body, uint32_t first_rank,
              const IsMeant& is_meant) {
  absl::flat_hash_set<const void*> seen;
  for (uint32_t rank = first_rank; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (!seen.insert(MessagesKey(body, program)).second) continue;
    const bool sends_none =
        ForEachSend(body, program, [&](const fb::Message& message) {
          return !is_meant(program, message);
        });
    if (!sends_none) return true;
  }
  return false;
}

bool HasRelays(const fb::Body& body) {
  return AnySends(
      body, body.source_ranks(),
      [](const fb::RankProgram&, const fb::Message&) { return true; });
}

bool HasStagedRelays(const fb::Body& body) {
  return AnySends(body, body.source_ranks(),
                  [&](const fb::RankProgram&, const fb::Message& message) {
                    return !IsDirect(body, message.round());
                  });
}

bool HasDelta(const fb::Body& body) { return body.delta() != nullptr; }

bool HasShifts(const fb::Body& body) {
  return Any(body.programs(), [](const fb::RankProgram* program) {
    return program->source_shift() != 0 || program->destination_shift() != 0;
  });
}

// Whether a message inside a host is in a round of another route, or passes on
// what its rank holds.
bool HasDealing(const fb::Body& body) {
  return AnySends(
      body, /*first_rank=*/0,
      [&](const fb::RankProgram& program, const fb::Message& message) {
        if (IsDirect(body, message.round())) return false;
        if (IsHeld(body, message)) return true;
        const fb::Round& round = *body.rounds()->Get(message.round());
        const uint32_t peer = PeerOf(body, program, message);
        return round.route() == fb::Route::kNetwork &&
               body.programs()->Get(peer)->host() == program.host();
      });
}

bool HasPackedMessages(const fb::Body& body) {
  return Any(body.programs(), [](const fb::RankProgram* program) {
    return ArePacked(*program);
  });
}

// What an executor must know of to run a plan, and how a body shows it.
struct Feature {
  uint64_t bit;
  std::string_view name;
  bool (*is_used)(const fb::Body& body);
};
constexpr std::array kFeatures = {
    Feature{kFeatureDirectRounds, "direct rounds", HasDirectRounds},
    Feature{kFeaturePostHooks, "post-hooks", HasPostHooks},
    Feature{kFeatureQuantization, "quantizations", HasQuantization},
    Feature{kFeatureRelays, "relays", HasRelays},
    Feature{kFeatureStagedRelays, "staged relays", HasStagedRelays},
    Feature{kFeatureDelta, "delta refits", HasDelta},
    Feature{kFeatureShifts, "shifted programs", HasShifts},
    Feature{kFeatureStagedDelta, "delta refits in staged rounds", HasRungs},
    Feature{kFeatureDealing, "dealt messages", HasDealing},
    Feature{kFeaturePackedMessages, "packed messages", HasPackedMessages},
    Feature{kFeatureBroadcasts, "broadcasts", HasBroadcasts},
};

}  // namespace

bool HasBroadcasts(const fb::Body& body) {
  return Any(body.programs(), [](const fb::RankProgram* program) {
    return !ArePacked(*program) &&
           Any(program->messages(), [](const fb::Message* message) {
             return message->broadcast() != 0;
           });
  });
}

uint32_t FormatVersionFor(const fb::Body& body, uint64_t features) {
  const bool says_what_feeds_relays =
      Any(body.programs(), [](const fb::RankProgram* program) {
        return program->relays() != nullptr;
      });
  const bool is_of_1_7 =
      body.topology() != nullptr || body.limits()->network_peers() > 0;
  const bool is_of_1_8 = (features & kFeatureShifts) != 0 ||
                         body.limits()->direct_multiprocessors() > 0;
  const uint32_t minor = (features & kFeatureBroadcasts) != 0       ? 13
                         : (features & kFeaturePackedMessages) != 0 ? 12
                         : body.limits()->direct_pulls()            ? 11
                         : (features & kFeatureDealing) != 0        ? 10
                         : (features & kFeatureStagedDelta) != 0    ? 9
                         : is_of_1_8                                ? 8
                         : is_of_1_7                                ? 7
                         : body.delta() != nullptr                  ? 6
                         : says_what_feeds_relays                   ? 5
                         : Length(body.requirements()) > 0          ? 4
                         : features >= kFeatureStagedRelays         ? 3
                         : features > kFeatureDirectRounds          ? 2
                                                                    : 1;
  return kFormatMajor << 16 | minor;
}

uint64_t RequiredFeatures(const fb::Body& body) {
  uint64_t features = 0;
  for (const Feature& feature : kFeatures) {
    if (feature.is_used(body)) features |= feature.bit;
  }
  return features;
}

absl::Status CheckFeatures(const fb::Body& body, uint64_t required) {
  for (const Feature& feature : kFeatures) {
    if ((required & feature.bit) != 0 || !feature.is_used(body)) continue;
    return Bad(
        "the plan has %s but does not require that executors know them (bit "
        "%d of required_features)",
        feature.name, std::countr_zero(feature.bit));
  }
  return absl::OkStatus();
}

std::vector<std::string> FeatureNames(uint64_t features) {
  std::vector<std::string> names;
  for (const Feature& feature : kFeatures) {
    if ((features & feature.bit) != 0) names.emplace_back(feature.name);
  }
  return names;
}

}  // namespace refit
