#include "tests/property/module_check.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

std::string PieceText(const Module& module, const Piece& piece) {
  return absl::StrCat("piece ", &piece - module.pieces.data());
}

// Every rank is fed once, by one that was fed before it.
std::string MistakeOfPieces(const Module& module) {
  const auto ascend = [](const std::vector<Rank>& ranks) {
    return !ranks.empty() && std::is_sorted(ranks.begin(), ranks.end()) &&
           std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end();
  };
  for (const Piece& piece : module.pieces) {
    if (!ascend(piece.sources) || !ascend(piece.destinations)) {
      return PieceText(module, piece) + ": ranks are missing, or not ascending";
    }
    if (!piece.relays.empty() && !piece.broadcasts &&
        piece.destinations.size() != 1) {
      return PieceText(module, piece) + " has relays from several roots";
    }
    std::set<Rank> fed(piece.destinations.begin(), piece.destinations.end());
    for (const Relay& relay : piece.relays) {
      if (!fed.contains(relay.sender) || !fed.insert(relay.receiver).second) {
        return absl::StrCat(PieceText(module, piece), ": rank ",
                            IndexOf(relay.receiver),
                            " is fed twice, or by one that is not fed");
      }
    }
  }
  return "";
}

// Elements that ranks receive and want, unless anything is broadcast: then
// messages alone say who only passes it on.
std::vector<int64_t> ReceivedOf(const Module& module) {
  std::vector<int64_t> received(static_cast<size_t>(module.world_size()), 0);
  for (const Piece& piece : module.pieces) {
    const int64_t elements = piece.box.Volume();
    for (const Rank rank : piece.destinations) {
      if (piece.root_keeps) received[IndexOf(rank)] += elements;
    }
    for (const Relay& relay : piece.relays) {
      received[IndexOf(relay.receiver)] += elements;
    }
  }
  return received;
}

std::string MistakeOfReceivers(const std::vector<int64_t>& received,
                               const std::vector<int64_t>& wanted) {
  for (size_t rank = 0; rank < wanted.size(); ++rank) {
    if (received[rank] != wanted[rank]) {
      return absl::StrFormat("rank %d receives %d elements and wants %d", rank,
                             received[rank], wanted[rank]);
    }
  }
  return "";
}

std::string MistakeOfTransfers(const Module& module) {
  const auto key = [](const Transfer& transfer) {
    return std::tuple(transfer.source, transfer.destination, transfer.piece);
  };
  const auto& transfers = module.transfers;
  size_t wanted = 0;
  for (const Piece& piece : module.pieces) {
    wanted += piece.destinations.size() + piece.relays.size();
  }
  if (transfers.size() != wanted) {
    return absl::StrFormat("%d transfers, %d wanted", transfers.size(), wanted);
  }
  std::set<std::pair<PieceId, Rank>> fed;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& transfer = transfers[i];
    const Piece& piece = module.piece(transfer.piece);
    if (i > 0 && key(transfer) < key(transfers[i - 1])) return "not sorted";
    const bool by_source =
        std::binary_search(piece.sources.begin(), piece.sources.end(),
                           transfer.source) &&
        std::binary_search(piece.destinations.begin(), piece.destinations.end(),
                           transfer.destination);
    const bool by_relay =
        std::count(piece.relays.begin(), piece.relays.end(),
                   Relay{transfer.source, transfer.destination}) == 1;
    if ((!by_source && !by_relay) ||
        !fed.emplace(transfer.piece, transfer.destination).second) {
      return PieceText(module, piece) +
             " is sent by a rank that does not hold it, or twice";
    }
  }
  return "";
}

std::string MessageText(const Module& module, const Message& message) {
  return absl::StrFormat("message %d from rank %d to %d",
                         &message - module.messages.data(),
                         IndexOf(message.source), IndexOf(message.destination));
}

// A relay passes on what its source received.
bool PassesOn(const Module& module, const Message& message) {
  std::set<PieceId> fed;
  for (size_t i = 0; i < message.fed_by.count; ++i) {
    const Message& fed_by = module.messages[message.fed_by.begin + i];
    if (fed_by.destination != message.source) return false;
    for (const Packed& packed :
         module.contents[static_cast<size_t>(fed_by.contents)]) {
      fed.insert(packed.piece);
    }
  }
  const auto& contents = module.contents[static_cast<size_t>(message.contents)];
  return std::all_of(contents.begin(), contents.end(),
                     [&](const Packed& of) { return fed.contains(of.piece); });
}

std::string MistakeOfMessages(const Module& module,
                              const std::vector<int64_t>& wanted) {
  std::vector<int64_t> unpacked(wanted.size(), 0);
  for (const Message& message : module.messages) {
    int64_t end = 0;
    for (const Packed& packed :
         module.contents[static_cast<size_t>(message.contents)]) {
      if (packed.staging_offset % kStagingAlignmentBytes != 0 ||
          packed.staging_offset < end) {
        return MessageText(module, message) + " has copies that overlap";
      }
      const Piece& piece = module.piece(packed.piece);
      if (!Contains(piece.box, packed.box)) {
        return MessageText(module, message) + " has more than its piece";
      }
      end = packed.staging_offset +
            packed.box.Volume() * DTypeBytes(piece.wire_dtype);
      if (message.is_unpacked) {
        unpacked[IndexOf(message.destination)] += packed.box.Volume();
      }
    }
    const bool is_staged = message.mechanism == Mechanism::kStaged;
    if (end > message.size_bytes ||
        (is_staged && message.size_bytes > module.limits.bucket_bytes)) {
      return MessageText(module, message) + " is too large";
    }
    if (module.IsRelay(message.source) && !PassesOn(module, message)) {
      return MessageText(module, message) + " passes on what did not come";
    }
  }
  return MistakeOfReceivers(unpacked, wanted);
}

// What a rank has in one round.
struct RankRound {
  int32_t operations = 0;
  std::vector<std::pair<int64_t, int64_t>> staging;  // begin, end
};
using RoundsOfRank = std::map<int32_t, RankRound>;

std::vector<RoundsOfRank> RoundsOf(const Module& module) {
  std::vector<RoundsOfRank> rounds(static_cast<size_t>(module.world_size()));
  const auto add = [&](Rank rank, const Message& message, int64_t offset,
                       bool has_staging) {
    RankRound& at = rounds[IndexOf(rank)][message.round];
    ++at.operations;
    if (has_staging && message.size_bytes > 0) {
      at.staging.emplace_back(offset, offset + message.size_bytes);
    }
  };
  for (const Message& message : module.messages) {
    if (message.mechanism == Mechanism::kDirect) continue;
    add(message.destination, message, message.destination_staging_offset, true);
    // A broadcast is sent once. What is held lies where it came.
    if (message.is_sent_with_other()) continue;
    add(message.source, message, message.source_staging_offset,
        !message.is_held);
  }
  return rounds;
}

std::string MistakeOfStaging(const Module& module) {
  const int32_t turns = StagingTurns(module);
  size_t rank = 0;
  for (const RoundsOfRank& rounds : RoundsOf(module)) {
    for (auto first = rounds.begin(); first != rounds.end(); ++first) {
      if (first->second.operations > module.limits.operations_per_round) {
        return absl::StrFormat("rank %d has %d operations in round %d", rank,
                               first->second.operations, first->first);
      }
      std::vector<std::pair<int64_t, int64_t>> used;
      for (auto it = first;
           it != rounds.end() && it->first < first->first + turns; ++it) {
        used.insert(used.end(), it->second.staging.begin(),
                    it->second.staging.end());
      }
      std::sort(used.begin(), used.end());
      int64_t end = 0;
      for (const auto& [begin, to] : used) {
        if (begin < end) {
          return absl::StrFormat(
              "rank %d uses byte %d of its staging twice from round %d on",
              rank, begin, first->first);
        }
        end = to;
      }
      if (end > module.limits.staging_bytes) {
        return absl::StrFormat("rank %d needs %d bytes of staging", rank, end);
      }
    }
    ++rank;
  }
  return "";
}

std::string MistakeOfRounds(const Module& module) {
  for (const Message& message : module.messages) {
    if (message.round < 0 || message.round >= std::ssize(module.rounds)) {
      return MessageText(module, message) + " has no round";
    }
    for (size_t i = 0; i < message.fed_by.count; ++i) {
      if (module.messages[message.fed_by.begin + i].round >= message.round) {
        return MessageText(module, message) + " goes before what feeds it";
      }
    }
  }
  const auto place = [&](uint32_t number) {
    const Message& message = module.messages[number];
    return std::tuple(message.round, message.source, message.destination);
  };
  const std::vector<uint32_t>& order = module.message_order;
  if (std::set<uint32_t>(order.begin(), order.end()).size() !=
          module.messages.size() ||
      order.size() != module.messages.size() ||
      !std::is_sorted(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        return place(a) < place(b);
      })) {
    return "messages are not in the order of programs";
  }
  return MistakeOfStaging(module);
}

}  // namespace

void ModuleCheck::After(std::string_view pass, const Module& module) {
  if (!mistake_.empty()) return;
  std::string mistake;
  if (pass == "intersect-layouts") {
    mistake = MistakeOfPieces(module);
    wanted_ = ReceivedOf(module);
  } else if (pass == "route-flows" || pass == "fan-out" ||
             pass == "choose-sources") {
    mistake = MistakeOfPieces(module);
    if (mistake.empty() && !module.stats.broadcasts) {
      mistake = MistakeOfReceivers(ReceivedOf(module), wanted_);
    }
    if (mistake.empty() && pass == "choose-sources") {
      mistake = MistakeOfTransfers(module);
    }
  } else if (pass == "form-buckets") {
    mistake = MistakeOfMessages(module, wanted_);
  } else if (pass == "schedule-rounds") {
    mistake = MistakeOfRounds(module);
  }
  if (!mistake.empty())
    mistake_ = absl::StrCat("after ", std::string(pass), ": ", mistake);
}

}  // namespace refit
